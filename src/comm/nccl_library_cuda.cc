#include "comm/nccl_library_cuda.h"

#include <dlfcn.h>

#include "core/out_of_memory.h"

namespace moebius {
namespace {

// Where the loader looks first, then where the build found it.
void* open_library() {
  if (void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)) return library;
  return dlopen(MOEBIUS_NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
}

NcclLibrary load() {
  NcclLibrary nccl;
  void* const library = open_library();
  if (library == nullptr) {
    nccl.why_missing = "libnccl.so.2 is not found (LD_LIBRARY_PATH may name its folder)";
    return nccl;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
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
