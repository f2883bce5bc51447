// All-to-all of bytes between the processes of one host. Knows nothing of Python.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shared_memory_segment.h"

namespace sparsekit::shared_memory {

using Clock = std::chrono::steady_clock;

// The collectives of one rank.
//
// One rank sends another a stream of messages, one for each collective and in their
// order, each a word with its size and then its bytes. So a rank knows to which collective a byte
// belongs by counting, and each call works on all collectives that have begun: a rank that waits
// for the second one reads what comes for the first, and nobody waits in a circle.
//
// A connected socket for each other rank carries nothing but the end: the kernel closes it when a
// process dies, and one that gives up sends its reason first.
//
// At most one thread at a time is in a call.
class Communicator {
 public:
  // `sockets` has one for each rank, and anything for this one; they stay the caller's.
  Communicator(int rank, int world_size, std::shared_ptr<Segment> segment,
               const std::vector<int>& sockets, double seconds);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  // Begins a collective, whose number it returns. Both arrays hold the part of rank 0 first, and
  // stay the communicator's until completed() is above the number. A rank may send less than the
  // receiver has room for.
  uint64_t begin(const char* send, const std::vector<int64_t>& send_bytes, char* receive,
                 const std::vector<int64_t>& receive_bytes);

  // Works for a moment on all that has begun; returns sooner at a signal. Whether the collective is
  // completed. Throws if it cannot be, or is not at the deadline.
  bool work_on(uint64_t number, Clock::time_point deadline);

  // The collectives below this number are done.
  uint64_t completed() const { return first_.load(); }

  // For work_on of a wait that begins now.
  Clock::time_point deadline() const;

  // The other ranks are told why; what they have not received will not come. In a forked process,
  // which takes no part, this only closes its sockets.
  void close(const std::string& reason);

 private:
  struct Part {  // of a collective, for one rank
    const char* send;
    uint64_t send_bytes;
    char* receive;
    uint64_t room;
  };
  struct Peer {
    int rank;
    RingWriter out;
    RingReader in;
    uint64_t sending = 0;  // the collective whose part is on its way
    bool announced = false;
    uint64_t sent = 0;
    uint64_t receiving = 0;
    bool told = false;
    uint64_t coming = 0;
    uint64_t received = 0;
  };

  void check_usable() const;
  bool advance();
  bool send_some(Peer& peer, uint64_t limit);
  bool receive_some(Peer& peer, uint64_t limit);
  void forget_completed();
  std::string who_is_gone(uint64_t number);
  std::string missing(uint64_t number) const;
  void hang_up(const std::string& reason);
  void close_sockets(const std::string* reason);

  uint64_t next() const { return first_ + begun_.size(); }
  const Part& part(uint64_t number, int rank) const { return begun_[number - first_][rank]; }

  const int rank_;
  const int world_size_;
  const int owner_;  // the process
  const double seconds_;
  std::mutex mutex_;
  std::shared_ptr<Segment> segment_;
  std::vector<int> sockets_;
  std::vector<Peer> peers_;
  // From the collective `first_` on.
  std::deque<std::vector<Part>> begun_;
  std::atomic<uint64_t> first_{0};
  std::string gone_;
};

}  // namespace sparsekit::shared_memory
