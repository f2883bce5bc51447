// Exchanges bytes between all processes of a group on one host. Does not use Python.
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

// Runs the collectives of one rank.
//
// Each rank sends a stream of messages to every other rank: one message per collective, in order. A
// message is a word with the size of the data, followed by the data. So a rank finds the collective
// that a byte belongs to by counting bytes. Each call makes progress on all collectives that have
// begun: a rank that is waiting for the second collective also reads the bytes of the first one. So
// there can be no deadlock.
//
// The sockets connected to the other ranks serve only to detect that a rank has left. If a process
// dies, the kernel closes its sockets; a rank that gives up sends the reason before it leaves.
//
// At most one thread at a time may be in a call.
class Communicator {
 public:
  // `sockets` has one descriptor per rank; this rank's own is ignored. The caller
  // keeps ownership of the descriptors.
  Communicator(int rank, int world_size, std::shared_ptr<Segment> segment,
               const std::vector<int>& sockets, double seconds);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  // Begins a collective and returns its number. `send` and `receive` hold the parts of all ranks in
  // order. They must stay valid until completed() is larger than this number. A rank may send fewer
  // bytes than the receiver expects.
  uint64_t begin(const char* send, const std::vector<int64_t>& send_bytes, char* receive,
                 const std::vector<int64_t>& receive_bytes);

  // Works on all collectives that have begun, for a short time or until a signal arrives. Returns
  // true if collective `number` is completed. Throws if it cannot be completed, or if it is not
  // completed by the deadline.
  bool work_on(uint64_t number, Clock::time_point deadline);

  // Returns the number of completed collectives. All collectives with smaller numbers are
  // completed.
  uint64_t completed() const { return first_.load(); }

  // Returns the deadline for a wait that begins now, to pass to work_on().
  Clock::time_point deadline() const;

  // Leaves the exchange and sends the reason to the other ranks. Data that they have not yet
  // received is lost. A forked process is not a rank; there, close() only closes the sockets.
  void close(const std::string& reason);

 private:
  struct Part {  // the data that is exchanged with one rank in one collective
    const char* send;
    uint64_t send_bytes;
    char* receive;
    uint64_t room;
  };
  struct Peer {
    int rank;
    RingWriter out;
    RingReader in;
    uint64_t sending = 0;  // number of the collective whose data is being sent
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
  const int owner_;  // id of the process that created this object
  const double seconds_;
  std::mutex mutex_;
  std::shared_ptr<Segment> segment_;
  std::vector<int> sockets_;
  std::vector<Peer> peers_;
  // Collectives first_, first_ + 1, ..., each with one part per rank.
  std::deque<std::vector<Part>> begun_;
  std::atomic<uint64_t> first_{0};
  std::string gone_;
};

}  // namespace sparsekit::shared_memory
