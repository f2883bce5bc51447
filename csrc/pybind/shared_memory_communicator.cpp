#include "shared_memory_communicator.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace sparsekit::shared_memory {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Number of bytes to copy at a time. The receiver can read one piece while the next one is being
// copied.
constexpr uint64_t kPiece = 1 << 17;
// Maximum time that a rank sleeps before checking that the other ranks are still alive.
constexpr milliseconds kSlice{100};
// Time to spin before sleeping, in case another rank is about to ring. A sleep takes longer than
// this.
constexpr microseconds kSpin{5};
constexpr size_t kLongestReason = 500;
constexpr double kForever = 1e9;  // in seconds; as nanoseconds, it does not overflow

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void spin(const Bell& bell, uint32_t rings) {
  const auto end = Clock::now() + kSpin;
  while (bell.rings() == rings && Clock::now() < end) pause();
}

void check_bytes(const std::vector<int64_t>& bytes, int world_size) {
  if (bytes.size() != static_cast<size_t>(world_size)) {
    throw std::invalid_argument("there must be a size for each of " + std::to_string(world_size) +
                                " ranks, got " + std::to_string(bytes.size()));
  }
  if (std::any_of(bytes.begin(), bytes.end(), [](int64_t size) { return size < 0; })) {
    throw std::invalid_argument("sizes must not be negative");
  }
}

void check_room(uint64_t size, uint64_t room, int rank) {
  if (size > room) {
    throw std::runtime_error(std::to_string(size) + " bytes have come from rank " +
                             std::to_string(rank) + " where " + std::to_string(room) +
                             " were expected");
  }
}

}  // namespace

Communicator::Communicator(int rank, int world_size, std::shared_ptr<Segment> segment,
                           const std::vector<int>& sockets, double seconds)
    : rank_(rank),
      world_size_(world_size),
      owner_(getpid()),
      seconds_(seconds),
      segment_(std::move(segment)),
      sockets_(world_size, -1) {
  // Each rank begins with the rank after it, so that not all ranks begin with the same one.
  for (int other = rank + 1; other < rank + world_size; ++other) {
    const int peer = other % world_size;
    peers_.push_back({peer, segment_->writer(rank, peer), segment_->reader(peer, rank)});
    sockets_[peer] = fcntl(sockets[peer], F_DUPFD_CLOEXEC, 0);
    if (sockets_[peer] < 0) {
      const int error = errno;
      close_sockets(nullptr);
      throw std::system_error(error, std::generic_category(), "duplicating a socket");
    }
  }
}

Communicator::~Communicator() {
  close("it has ended its exchange");
}

uint64_t Communicator::begin(const char* send, const std::vector<int64_t>& send_bytes,
                             char* receive, const std::vector<int64_t>& receive_bytes) {
  check_bytes(send_bytes, world_size_);
  check_bytes(receive_bytes, world_size_);
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  try {
    std::vector<Part> parts;
    for (int rank = 0; rank < world_size_; ++rank) {
      const auto size = static_cast<uint64_t>(send_bytes[rank]);
      const auto room = static_cast<uint64_t>(receive_bytes[rank]);
      if (rank == rank_) {
        check_room(size, room, rank);
        if (size > 0) std::memcpy(receive, send, size);
      }
      parts.push_back({send, size, receive, room});
      send += size;
      receive += room;
    }
    begun_.push_back(std::move(parts));
    // Only send here, since receiving would delay the caller.
    for (Peer& peer : peers_) send_some(peer, Segment::ring_bytes(world_size_));
  } catch (const std::exception& error) {
    hang_up(error.what());
    throw;
  }
  return next() - 1;
}

bool Communicator::work_on(uint64_t number, Clock::time_point deadline) {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_completed();
  if (number < first_) return true;
  check_usable();
  try {
    Bell& bell = segment_->bell(rank_);
    const auto end = Clock::now() + kSlice;
    for (bool in_vain = false;;) {
      const uint32_t rings = bell.rings();
      bool any = advance();
      if (!any && in_vain) {
        // Try once more, since after the last advance() the rank may have sent data and then left.
        const std::string gone = who_is_gone(number);
        if (!gone.empty() && !(any = advance())) throw std::runtime_error(gone);
      }
      if (number < first_) return true;
      const auto now = Clock::now();
      if (now >= deadline) throw std::runtime_error(missing(number));
      if (now >= end) return false;
      in_vain = !any;
      if (any) continue;
      spin(bell, rings);
      if (!bell.sleep(rings, std::min<Clock::duration>(deadline - now, kSlice))) return false;
    }
  } catch (const std::exception& error) {
    hang_up(error.what());
    throw;
  }
}

Clock::time_point Communicator::deadline() const {
  const std::chrono::duration<double> seconds(std::min(seconds_, kForever));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds);
}

void Communicator::close(const std::string& reason) {
  if (getpid() != owner_) {  // after a fork, a thread that does not exist here may hold mutex_
    close_sockets(nullptr);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  hang_up(reason);
}

void Communicator::check_usable() const {
  if (getpid() != owner_) {
    throw std::runtime_error("sparsekit: a forked process cannot use the exchange of its parent");
  }
  if (!gone_.empty()) {
    throw std::runtime_error("sparsekit: the shared memory is no more: " + gone_);
  }
}

// Exchanges a piece with each rank. Returns true if any bytes were sent or received.
bool Communicator::advance() {
  bool any = false;
  for (Peer& peer : peers_) {
    any |= send_some(peer, kPiece);
    any |= receive_some(peer, kPiece);
  }
  forget_completed();
  return any;
}

bool Communicator::send_some(Peer& peer, uint64_t limit) {
  uint64_t put = 0;
  while (peer.sending < next() && put < limit) {
    const Part& part = this->part(peer.sending, peer.rank);
    uint64_t room = peer.out.room();
    if (room == 0) break;
    if (!peer.announced) {
      peer.out.put(&part.send_bytes, sizeof part.send_bytes);
      peer.announced = true;
      put += kGrain;
      room -= kGrain;
    }
    const uint64_t size = std::min({room, part.send_bytes - peer.sent, limit});
    peer.out.put(part.send + peer.sent, size);
    put += size;
    peer.sent += size;
    if (peer.sent == part.send_bytes) {
      ++peer.sending;
      peer.announced = false;
      peer.sent = 0;
    }
  }
  if (put == 0) return false;
  peer.out.publish();
  segment_->bell(peer.rank).ring();
  return true;
}

bool Communicator::receive_some(Peer& peer, uint64_t limit) {
  uint64_t taken = 0;
  while (peer.receiving < next() && taken < limit) {
    const Part& part = this->part(peer.receiving, peer.rank);
    uint64_t available = peer.in.available();
    if (!peer.told) {
      if (available == 0) break;
      peer.in.take(&peer.coming, sizeof peer.coming);
      check_room(peer.coming, part.room, peer.rank);
      peer.told = true;
      taken += kGrain;
      available -= kGrain;
    }
    const uint64_t size = std::min({available, peer.coming - peer.received, limit});
    if (size == 0 && peer.coming > peer.received) break;
    peer.in.take(part.receive + peer.received, size);
    taken += size;
    peer.received += size;
    if (peer.received == peer.coming) {
      ++peer.receiving;
      peer.told = false;
      peer.received = 0;
    }
  }
  if (taken == 0) return false;
  if (peer.in.publish()) segment_->bell(peer.rank).ring();
  return true;
}

void Communicator::forget_completed() {
  uint64_t done = next();
  for (const Peer& peer : peers_) done = std::min({done, peer.sending, peer.receiving});
  for (; first_ < done; ++first_) begun_.pop_front();
}

// If a rank that is needed for this collective has left, returns a message about it, otherwise "".
std::string Communicator::who_is_gone(uint64_t number) {
  for (const Peer& peer : peers_) {
    if (peer.sending > number && peer.receiving > number) continue;
    char text[kLongestReason];
    const ssize_t size = recv(sockets_[peer.rank], text, sizeof text, MSG_DONTWAIT | MSG_PEEK);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) continue;
    const std::string reason =
        size > 0 ? std::string(text, size) : "its process has ended or is about to";
    return "rank " + std::to_string(peer.rank) + " is gone: " + reason;
  }
  return "";
}

std::string Communicator::missing(uint64_t number) const {
  std::string ranks;
  for (const Peer& peer : peers_) {
    if (peer.sending > number && peer.receiving > number) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer.rank);
  }
  std::string seconds = std::to_string(seconds_);
  seconds.erase(seconds.find_last_not_of('0') + 1);
  if (seconds.back() == '.') seconds.pop_back();
  return "timed out: no answer from rank " + ranks + " within " + seconds + " s";
}

void Communicator::hang_up(const std::string& reason) {
  if (!gone_.empty()) return;
  gone_ = reason;
  close_sockets(&reason);
  for (const Peer& peer : peers_) segment_->bell(peer.rank).ring();
  begun_.clear();
  peers_.clear();
  segment_.reset();
}

void Communicator::close_sockets(const std::string* reason) {
  for (int& socket : sockets_) {
    const int open = std::exchange(socket, -1);
    if (open < 0) continue;
    if (reason != nullptr) {
      send(open, reason->data(), std::min(reason->size(), kLongestReason),
           MSG_DONTWAIT | MSG_NOSIGNAL);
      // Shut the connection down: closing the socket is not enough, since a forked process may have
      // a copy of it.
      shutdown(open, SHUT_RDWR);
    }
    ::close(open);
  }
}

}  // namespace sparsekit::shared_memory
