#include "device/device.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>

#include "device/accelerator.h"
#include "device/out_of_memory.h"
#include "device/pinned_memory.h"

namespace moebius {
namespace {

// Returns the number after `key` in a file of lines "key number";
// an empty key reads a file that is one number.
// Returns nothing where the file is missing or holds a word such as "max".
std::optional<int64_t> number_in(const std::string& path, const std::string& key = "") {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key, 0) != 0) continue;
    char* end = nullptr;
    const char* begin = line.c_str() + key.size();
    const int64_t value = std::strtoll(begin, &end, 10);
    return end == begin ? std::nullopt : std::optional(value);
  }
  return std::nullopt;
}

int64_t status_bytes(const char* key) { return number_in("/proc/self/status", key).value_or(0) * 1024; }

// Returns the bytes that a control group leaves. Its files have different names in
// the two versions.
int64_t group_available(const std::string& dir, const char* limit, const char* usage, const char* cache) {
  const auto most = number_in(dir + limit);
  if (!most) return INT64_MAX;
  const int64_t used = number_in(dir + usage).value_or(0) - number_in(dir + "/memory.stat", cache).value_or(0);
  return std::max<int64_t>(0, *most - std::max<int64_t>(0, used));
}

// Returns the minimum that the group at `path` below `top`, or any enclosing group, leaves. In a container the path may
// be the host's. Its folders then do not exist, and `top` itself is the container's group.
int64_t groups_available(const std::string& top, std::string path, bool is_v2) {
  int64_t least = INT64_MAX;
  for (;;) {
    const std::string dir = top + path;
    least = std::min(least, is_v2 ? group_available(dir, "/memory.max", "/memory.current", "inactive_file ")
                                  : group_available(dir, "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                                    "total_inactive_file "));
    if (path.empty()) return least;
    path.resize(path.rfind('/'));
  }
}

}  // namespace

Buffer::Buffer(DeviceKind device, int64_t num_bytes) : num_bytes_(num_bytes), device_(device) {
  if (device == DeviceKind::null || num_bytes == 0) return;
  if (device == DeviceKind::cuda) {
    data_ = cuda::allocate(num_bytes);
    return;
  }
  void* p = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    throw OutOfMemory(
        fmt::format("out of memory: {:.3f} GiB were requested in one piece: {}; stop other programs that hold memory, "
                    "or compute with smaller shapes",
                    num_bytes / 1073741824.0, std::strerror(errno)));
  }
  // With huge pages, large arenas have fewer page faults and TLB misses. This is advice to the kernel: a refusal does
  // not matter.
  if (num_bytes >= (8 << 20)) madvise(p, num_bytes, MADV_HUGEPAGE);
  data_ = p;
}

Buffer::~Buffer() {
  if (!data_) return;
  if (device_ == DeviceKind::cuda)
    cuda::release(data_);
  else
    munmap(data_, num_bytes_);
}

Accelerator& Stream::accelerator() const {
  MOEBIUS_ASSERT(accelerator_ != nullptr);
  return *accelerator_;
}

void copy_to_device(Stream& s, void* to, const void* from, int64_t num_bytes) {
  if (s.device() == DeviceKind::null || num_bytes == 0) return;
  if (s.device() == DeviceKind::cuda) return cuda::copy_to_device(s.accelerator(), to, from, num_bytes);
  std::memcpy(to, from, num_bytes);
}

void copy_to_host(Stream& s, void* to, const void* from, int64_t num_bytes, CopyWait wait) {
  if (s.device() == DeviceKind::null || num_bytes == 0) return;
  if (s.device() == DeviceKind::cpu) {
    std::memcpy(to, from, num_bytes);
    return;
  }
  cuda::copy_to_host(s.accelerator(), to, from, num_bytes);
  if (wait == CopyWait::done) synchronize(s);
}

void synchronize(Stream& s) {
  if (s.device() == DeviceKind::cuda) cuda::synchronize(s.accelerator());
}

double time_on_device(Stream& s, const std::function<void()>& body) {
  if (s.device() == DeviceKind::cuda) return cuda::time_ms(s.accelerator(), body);
  const double begin = now_us();
  body();
  return (now_us() - begin) * 1e-3;
}

namespace {

// Where memory is short, the system may kill the process instead of refusing to pin.
void check_can_be_pinned(int64_t num_bytes) {
  if (const int64_t available = available_memory_bytes(); num_bytes > available)
    throw OutOfPinnedMemory(num_bytes, "for copies to and from a GPU",
                            fmt::format("this process can have {:.3f} GiB more of host memory",
                                        static_cast<double>(available) / 1073741824.0));
}

}  // namespace

HostBuffer::HostBuffer(DeviceKind device, int64_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  if (device == DeviceKind::cuda) check_can_be_pinned(num_bytes);
  if (device == DeviceKind::cuda && num_bytes >= cuda::kMappedBytes)
    data_ = cuda::map_pinned(num_bytes);
  else if (device == DeviceKind::cuda)
    data_ = std::shared_ptr<void>(cuda::allocate_pinned(num_bytes), cuda::release_pinned);
  else
    data_ = std::shared_ptr<void>(std::calloc(num_bytes, 1), std::free);
  if (!data_) throw OutOfMemory(fmt::format("out of memory: {} bytes of host memory were requested", num_bytes));
}

OpScope::OpScope(Stream& s, const char* name, Cost cost) : s_(s), name_(name), cost_(cost) {
  if (s.device() == DeviceKind::cuda) {
    s.accelerator().begin_op(name, s.trace() != nullptr);
  } else if (s.trace() && s.device() != DeviceKind::null) {
    begin_us_ = now_us();
  }
}

// On the null device an op takes no time, and is only counted.
OpScope::~OpScope() {
  if (s_.device() == DeviceKind::cuda) {
    s_.accelerator().end_op(name_, s_.trace(), cost_);
  } else if (s_.trace() && s_.device() == DeviceKind::null) {
    s_.trace()->add(name_, 0, 0, cost_);
  } else if (s_.trace()) {
    s_.trace()->add(name_, begin_us_, now_us() - begin_us_, cost_);
  }
}

PhaseScope::PhaseScope(Stream& s, const char* name, int64_t index)
    : s_(s), name_(index < 0 ? name : fmt::format("{} {}", name, index)) {
  if (s.device() == DeviceKind::cuda) {
    s.accelerator().begin_op(name_.c_str(), s.trace() != nullptr);
  } else if (s.trace()) {
    begin_us_ = now_us();
  }
}

PhaseScope::~PhaseScope() {
  if (s_.device() == DeviceKind::cuda) {
    s_.accelerator().end_phase(name_, s_.trace());
  } else if (s_.trace()) {
    s_.trace()->add_phase(name_, begin_us_, now_us() - begin_us_);
  }
}

int num_available_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

int64_t available_memory_bytes(const std::string& root) {
  const auto free_kb = number_in(root + "/proc/meminfo", "MemAvailable:");
  int64_t least = free_kb ? *free_kb * 1024 : INT64_MAX;
  // The lines are "ID:CONTROLLERS:/PATH"; version 2 has ID 0 and no controllers.
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t path = line.find(":/");
    if (path == std::string::npos) continue;
    const bool is_v2 = line.rfind("0::", 0) == 0,
               is_v1 = line.substr(0, path + 1).find(":memory:") != std::string::npos;
    if (!is_v2 && !is_v1) continue;
    const std::string top = root + (is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    least = std::min(least, groups_available(top, line.substr(path + 1), is_v2));
  }
  return least;
}

int64_t peak_rss_bytes() { return status_bytes("VmHWM:"); }
int64_t current_rss_bytes() { return status_bytes("VmRSS:"); }

}  // namespace moebius
