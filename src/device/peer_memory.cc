#include "device/peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "device/accelerator.h"
#include "device/out_of_memory.h"

namespace moebius {
namespace {

void* map_file(int descriptor, int64_t num_bytes) {
  void* p = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (p == MAP_FAILED) {
    throw OutOfMemory(
        fmt::format("out of memory: {:.3f} GiB that ranks share were requested: {}; stop other programs "
                    "that hold memory, or compute with smaller shapes",
                    num_bytes / 1073741824.0, std::strerror(errno)));
  }
  return p;
}

// Returns what a user can do about an error of make_file.
const char* advice(int error) {
  if (error == EFBIG) return "; raise the limit of file sizes of this process (ulimit -f)";
  if (error == EMFILE) return "; raise the limit of open files of this process (ulimit -n)";
  return "";
}

// Returns the descriptor of a file of zeros in memory.
int make_file(int64_t num_bytes) {
  const int file = ::memfd_create("moebius", MFD_CLOEXEC);
  if (file >= 0 && ::ftruncate(file, num_bytes) == 0) return file;
  const int why = errno;
  if (file >= 0) ::close(file);
  MOEBIUS_FAIL(usage, "peer memory: a file of {} bytes in memory cannot be made: {}{}", num_bytes, std::strerror(why),
               advice(why));
}

}  // namespace

ProcessId this_process() {
  struct stat found {};
  const bool known = ::stat("/proc/self/ns/pid", &found) == 0;
  return {.number = ::getpid(), .pid_namespace = known ? static_cast<int64_t>(found.st_ino) : 0};
}

struct PeerMemory::Pages {
  enum class Kind { none, file, gpu, other_gpu };
  Kind kind = Kind::none;
  DeviceKind device = DeviceKind::null;
  void* data = nullptr;
  int64_t num_bytes = 0;
  int descriptor = -1;

  Pages() = default;
  Pages(const Pages&) = delete;
  ~Pages() {
    if (kind == Kind::file) ::munmap(data, num_bytes);
    if (kind == Kind::gpu) cuda::release(data);
    if (kind == Kind::other_gpu) cuda::close_ipc(data);
    if (descriptor >= 0) ::close(descriptor);
  }
  void map() {
    data = map_file(descriptor, num_bytes);
    kind = Kind::file;
  }
};

PeerMemory::PeerMemory(DeviceKind device, int64_t num_bytes) : pages_(std::make_shared<Pages>()) {
  pages_->device = device;
  pages_->num_bytes = num_bytes;
  if (device == DeviceKind::null || num_bytes == 0) return;
  if (device == DeviceKind::cuda) {
    pages_->data = cuda::allocate(num_bytes);
    pages_->kind = Pages::Kind::gpu;
    return;
  }
  pages_->descriptor = make_file(num_bytes);
  pages_->map();
}

PeerMemory::PeerMemory(const PeerHandle& h) {
  const auto device = static_cast<DeviceKind>(h.device);
  if (h.process == this_process()) {
    const std::unique_ptr<std::shared_ptr<Pages>> kept(reinterpret_cast<std::shared_ptr<Pages>*>(h.kept));
    pages_ = *kept;
    if (device == DeviceKind::cuda) cuda::enable_peer_access(pages_->data);
    return;
  }
  pages_ = std::make_shared<Pages>();
  pages_->device = device;
  pages_->num_bytes = h.num_bytes;
  if (device == DeviceKind::cuda) {
    pages_->data = cuda::open_ipc(h.ipc);
    pages_->kind = Pages::Kind::other_gpu;
    return;
  }
  MOEBIUS_CHECK(usage, h.process.pid_namespace == this_process().pid_namespace,
                "peer memory: process {} numbers processes in another way (another container or machine), so its "
                "memory cannot be mapped",
                h.process.number);
  const std::string path = fmt::format("/proc/{}/fd/{}", h.process.number, h.descriptor);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  MOEBIUS_CHECK(usage, file >= 0, "peer memory: memory of process {} cannot be mapped: {}: {}", h.process.number, path,
                std::strerror(errno));
  pages_->descriptor = file;
  pages_->map();
  // The pages stay mapped, so a rank need not have a descriptor for each rank that it reaches.
  ::close(std::exchange(pages_->descriptor, -1));
}

void* PeerMemory::data() const { return pages_ ? pages_->data : nullptr; }
int64_t PeerMemory::num_bytes() const { return pages_ ? pages_->num_bytes : 0; }

PeerHandle PeerMemory::handle_for(const ProcessId& to) const {
  PeerHandle h{.process = this_process(), .num_bytes = num_bytes()};
  if (!data()) return h;
  h.device = static_cast<int32_t>(pages_->device);
  if (to == h.process)
    h.kept = reinterpret_cast<int64_t>(new std::shared_ptr<Pages>(pages_));
  else if (pages_->device == DeviceKind::cuda)
    h.ipc = cuda::ipc_handle(pages_->data);
  else
    h.descriptor = pages_->descriptor;
  MOEBIUS_ASSERT(to == h.process || pages_->kind == Pages::Kind::gpu || h.descriptor >= 0);
  return h;
}

}  // namespace moebius
