// NCCL's functions, found when they are first needed:
// so the program also starts where the library is missing.
#pragma once

#include <nccl.h>

#include <string>

namespace moebius {

struct NcclLibrary {
  decltype(&::ncclGetVersion) get_version = nullptr;
  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) comm_init = nullptr;
  decltype(&::ncclCommDestroy) comm_destroy = nullptr;
  decltype(&::ncclCommAbort) comm_abort = nullptr;
  decltype(&::ncclCommGetAsyncError) async_error = nullptr;
  decltype(&::ncclGetErrorString) error_string = nullptr;
  decltype(&::ncclGetLastError) last_error = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) recv = nullptr;
  decltype(&::ncclAllReduce) all_reduce = nullptr;
  decltype(&::ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&::ncclAllGather) all_gather = nullptr;

  std::string why_missing;  // empty when all functions above were found
};

const NcclLibrary& nccl_library();  // opened once in a process

// Throws Error{distributed} with the call and NCCL's message; OutOfMemory when memory ran out.
void check_nccl(ncclResult_t status, const char* call);
#define MOEBIUS_NCCL(call) ::moebius::check_nccl((call), #call)

}  // namespace moebius
