#include "core/device.h"

#include <sched.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace moebius {
namespace {

int64_t status_bytes(const char* key) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind(key, 0) == 0) return std::stoll(line.substr(std::strlen(key))) * 1024;
  }
  return 0;
}

}  // namespace

Buffer::Buffer(DeviceKind device, int64_t num_bytes) : num_bytes_(num_bytes), device_(device) {
  MOEBIUS_CHECK(usage, device != DeviceKind::cuda, "Buffer: this build has no CUDA backend; set run.device = \"cpu\"");
  if (device == DeviceKind::null || num_bytes == 0) return;
  void* p = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  MOEBIUS_CHECK(
      usage, p != MAP_FAILED,
      "out of memory: {:.3f} GiB were asked for in one piece: {}; use a smaller micro_batch, seq_len or model "
      "(`moebius config` prints the memory table)",
      num_bytes / 1073741824.0, std::strerror(errno));
  // Fewer page faults and TLB misses for the large arenas; advice, so a refusal does not matter.
  if (num_bytes >= (8 << 20)) madvise(p, num_bytes, MADV_HUGEPAGE);
  data_ = p;
}

Buffer::~Buffer() {
  if (data_) munmap(data_, num_bytes_);
}

OpScope::OpScope(Stream& s, const char* name, Cost cost) : trace_(s.trace()), name_(name), cost_(cost) {
  if (trace_) begin_us_ = now_us();
}

OpScope::~OpScope() {
  if (trace_) trace_->add(name_, begin_us_, now_us() - begin_us_, cost_);
}

int num_available_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

int64_t peak_rss_bytes() { return status_bytes("VmHWM:"); }
int64_t current_rss_bytes() { return status_bytes("VmRSS:"); }

}  // namespace moebius
