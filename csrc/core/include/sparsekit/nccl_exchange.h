// The native exchange: bytes from rank to rank over libnccl. Its functions are found at run time,
// so nothing here needs NCCL or CUDA until it is called, and nccl.h is needed by core/nccl alone.
//
// A failure throws std::runtime_error with NCCL's own message. A communicator that has thrown is
// unusable and should be aborted. Communicators block: calls that need
// other ranks wait for them without a limit of time, until the communicator is revoked or aborted.
#pragma once

#include <array>
#include <cstdint>

struct ncclComm;

namespace sparsekit::nccl {

// Identifies a communicator; the same on all its ranks.
using UniqueId = std::array<char, 128>;

// Version of the nccl.h that this was compiled with, such as "2.30.7".
const char* header_version();

// Opens the library and returns its version, such as 23007: libnccl.so.2 as torch has loaded it,
// or what SPARSEKIT_NCCL_LIBRARY names.
int library_version();

UniqueId unique_id();

// A communicator on the current CUDA device. Waits for all ranks, and nothing can end that: a
// caller with a limit of time calls this on a thread that it can leave behind.
ncclComm* connect(int rank, int world_size, const UniqueId& id);

// Throws if something has gone wrong since the last call, on the network for example. Needs no
// other rank and may be called while another thread is in all_to_all.
void check(ncclComm* communicator);

// Sends a part of `send` to each rank and gets a part of `receive` from each, rank 0's first, with
// nothing between them. The sizes are [world_size], in bytes; what one rank sends to another must
// be what that one receives. The parts are read and written in the order of the stream; the call
// itself waits until the work is in the stream. For that it needs a rank the first time that it
// sends to it or receives from it, since NCCL connects them then.
void all_to_all(ncclComm* communicator, int world_size, const void* send, const int64_t* send_bytes,
                void* receive, const int64_t* receive_bytes, void* stream);

// Waits for what is under way and frees the communicator, also if it throws.
void disconnect(ncclComm* communicator);

// Ends what is under way, on the device and in calls of other threads, without freeing anything.
// False if the library, from before NCCL 2.28.7, cannot do that.
bool revoke(ncclComm* communicator) noexcept;

// Frees the communicator at once, ending what is under way, on the device too. Null is nothing.
// NCCL asks that no other thread be in a call.
void abort(ncclComm* communicator) noexcept;

}  // namespace sparsekit::nccl
