#include "comm/gpu/nccl/library.h"

#include "core/shared_library.h"
#include "device/out_of_memory.h"

namespace moebius {
namespace {

NcclLibrary load() {
  const SharedLibrary library = open_library("libnccl.so.2", MOEBIUS_NCCL_LIBRARY);
  NcclLibrary nccl{.why_missing = library.why_missing};
  if (library.handle == nullptr) return nccl;
  const auto find = [&](auto& function, const char* name) {
    function = find_function<std::decay_t<decltype(function)>>(library, name);
    if (function == nullptr) nccl.why_missing = fmt::format("libnccl.so.2 has no {}: it is too old", name);
  };
  find(nccl.get_version, "ncclGetVersion");
  find(nccl.get_unique_id, "ncclGetUniqueId");
  find(nccl.comm_init, "ncclCommInitRankConfig");
  find(nccl.comm_destroy, "ncclCommDestroy");
  find(nccl.comm_abort, "ncclCommAbort");
  find(nccl.async_error, "ncclCommGetAsyncError");
  find(nccl.error_string, "ncclGetErrorString");
  find(nccl.last_error, "ncclGetLastError");
  find(nccl.group_start, "ncclGroupStart");
  find(nccl.group_end, "ncclGroupEnd");
  find(nccl.send, "ncclSend");
  find(nccl.recv, "ncclRecv");
  find(nccl.all_reduce, "ncclAllReduce");
  find(nccl.reduce_scatter, "ncclReduceScatter");
  find(nccl.all_gather, "ncclAllGather");
  return nccl;
}

}  // namespace

const NcclLibrary& nccl_library() {
  static const NcclLibrary library = load();
  return library;
}

void check_nccl(ncclResult_t status, const char* call) {
  if (status == ncclSuccess) return;
  const NcclLibrary& nccl = nccl_library();
  throw_library_error(ErrorKind::distributed,
                      fmt::format("{}: {}: {}", call, nccl.error_string(status), nccl.last_error(nullptr)));
}

}  // namespace moebius
