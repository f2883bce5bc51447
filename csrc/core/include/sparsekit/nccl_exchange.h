// The native exchange: sends bytes from rank to rank through libnccl. NCCL's functions are looked
// up at run time, so neither NCCL nor CUDA is needed until a function declared here is called. Only
// core/nccl includes nccl.h.
//
// A failure throws std::runtime_error with NCCL's own message. A communicator that has thrown is
// unusable and should be aborted. Communicators block: a call that needs other ranks waits for them
// without a time limit, until the communicator is revoked or aborted.
#pragma once

#include <array>
#include <cstdint>

struct ncclComm;

namespace sparsekit::nccl {

// Identifies a communicator; all its ranks use the same id.
using UniqueId = std::array<char, 128>;

// Returns the version of the nccl.h used to compile, such as "2.30.7".
const char* header_version();

// Opens the library and returns its version, such as 23007. The library is the libnccl.so.2 that
// torch has loaded, unless the environment variable SPARSEKIT_NCCL_LIBRARY is set to another file.
int library_version();

UniqueId unique_id();

// Creates a communicator on the current CUDA device. Waits for all ranks. The wait cannot be
// interrupted, so a caller with a time limit should call this function on a thread that it can
// abandon.
ncclComm* connect(int rank, int world_size, const UniqueId& id);

// Throws if the communicator has failed since the last call, for example due to the network. Does
// not wait for other ranks, and may be called while another thread is in all_to_all().
void check(ncclComm* communicator);

// Sends a part of `send` to each rank, and receives a part of `receive` from each rank. Parts are
// contiguous and ordered by rank. send_bytes [world_size] and receive_bytes [world_size] are the
// sizes of the parts. The sender and the receiver of a part must agree on its size. The parts are
// read and written in stream order; the call returns once the work is queued in the stream. The
// first transfer with a rank waits for that rank, since that is when NCCL connects to it.
void all_to_all(ncclComm* communicator, int world_size, const void* send, const int64_t* send_bytes,
                void* receive, const int64_t* receive_bytes, void* stream);

// Waits for pending work and frees the communicator. It is freed even if this call throws.
void disconnect(ncclComm* communicator);

// Ends pending work, on the device and in other threads' calls, without freeing anything. Returns
// false if the library is older than NCCL 2.28.7 and therefore cannot do this.
bool revoke(ncclComm* communicator) noexcept;

// Frees the communicator immediately; this also ends pending work on the device. Does nothing for
// null. NCCL requires that no other thread be inside a call on the communicator.
void abort(ncclComm* communicator) noexcept;

}  // namespace sparsekit::nccl
