// Looks up libnccl's functions at run time. Linking it would require libnccl wherever the module is
// imported, and a process could then have two copies, torch's and another one.
#pragma once

#include <nccl.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 0)
#error "sparsekit needs the nccl.h of NCCL 2.18 or later; SPARSEKIT_NCCL=0 builds without it"
#endif

namespace sparsekit::nccl {

struct Library {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) init_rank;
  decltype(&ncclCommGetAsyncError) get_async_error;
  decltype(&ncclCommFinalize) finalize;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclCommAbort) abort;
  ncclResult_t (*revoke)(ncclComm_t, int);  // null before NCCL 2.28.7, whose nccl.h lacks it
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclGetErrorString) error_string;
  decltype(&ncclGetLastError) last_error;  // null if the library lacks it
};

// Opens the library on the first call; throws std::runtime_error that names what is missing.
const Library& library();

}  // namespace sparsekit::nccl
