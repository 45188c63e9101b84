#include "io/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "core/error.h"

namespace moebius {
namespace {

constexpr int64_t kMaxCallBytes = int64_t{1} << 30;

std::string advice(int error, const std::string& path) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return fmt::format("the disk is full ({} bytes free): free space or write elsewhere",
                         free_bytes(parent_dir(path)));
    case EACCES:
    case EPERM:
    case EROFS:
      return "give this user access or choose another place";
    case EEXIST:
      return "remove it, or wait for the process that writes it";
    case ENOENT:
    case ENOTDIR:
      return "check the path";
    case EFBIG:
      return "raise the file size limit or write to another file system";
    case EMFILE:
      return "raise the limit of open files (ulimit -n)";
    case ENFILE:
      return "the whole system has too many open files: end programs that hold many, or raise fs.file-max";
    default:
      return "check the disk and try again";
  }
}

[[noreturn]] void fail_io(const std::string& what, const std::string& path, int error) {
  MOEBIUS_FAIL(io, "{} {}: {}; {}", what, path, errno_text(error), advice(error, path));
}

bool is_missing(int error) { return error == ENOENT || error == ENOTDIR || error == EISDIR; }

}  // namespace

File File::open_with(const std::string& path, int flags, const char* what) {
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail_io(what, path, errno);
  return File(fd, path);
}

File File::open_read(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 && is_missing(errno)) MOEBIUS_FAIL(input, "open {}: {}; check the path", path, errno_text(errno));
  if (fd < 0) fail_io("open", path, errno);
  File file(fd, path);
  struct stat info {};
  if (::fstat(fd, &info) != 0) fail_io("stat", path, errno);
  MOEBIUS_CHECK(input, !S_ISDIR(info.st_mode), "open {}: expected a file; got a folder; check the path", path);
  return file;
}

File File::create(const std::string& path) { return open_with(path, O_RDWR | O_CREAT | O_TRUNC, "create"); }

File File::create_unique(const std::string& path) { return open_with(path, O_RDWR | O_CREAT | O_EXCL, "create"); }

File File::open_append(const std::string& path) { return open_with(path, O_WRONLY | O_CREAT | O_APPEND, "append to"); }

File::File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

int64_t File::size() const {
  struct stat info {};
  if (::fstat(fd_, &info) != 0) fail_io("stat", path_, errno);
  return info.st_size;
}

int64_t File::read_some(void* dst, int64_t bytes, int64_t offset) const {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t got =
        ::pread(fd_, static_cast<char*>(dst) + done, std::min(bytes - done, kMaxCallBytes), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_io(fmt::format("read of {} bytes at {} from", bytes, offset), path_, errno);
    if (got == 0) break;
    done += got;
  }
  return done;
}

int64_t File::read_next(void* dst, int64_t bytes) const {
  ssize_t got;
  do {
    got = ::read(fd_, dst, std::min(bytes, kMaxCallBytes));
  } while (got < 0 && errno == EINTR);
  if (got < 0) fail_io(fmt::format("read of {} bytes from", bytes), path_, errno);
  return got;
}

void File::read_at(void* dst, int64_t bytes, int64_t offset) const {
  const int64_t got = read_some(dst, bytes, offset);
  MOEBIUS_CHECK(io, got == bytes,
                "read {}: expected {} bytes at {}; got {} before the end of the file; "
                "it was cut short while in use, restore it",
                path_, bytes, offset, got);
}

void File::write_at(const void* src, int64_t bytes, int64_t offset) const {
  for (int64_t done = 0; done < bytes;) {
    const auto* from = static_cast<const char*>(src) + done;
    const ssize_t put = ::pwrite(fd_, from, std::min(bytes - done, kMaxCallBytes), offset + done);
    if (put < 0 && errno == EINTR) continue;
    // A write of zero bytes would loop for ever; it means that the disk is full.
    if (put <= 0) fail_io(fmt::format("write of {} bytes at {} to", bytes, offset), path_, put < 0 ? errno : ENOSPC);
    done += put;
  }
}

void File::append(const void* src, int64_t bytes) const {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t put = ::write(fd_, static_cast<const char*>(src) + done, std::min(bytes - done, kMaxCallBytes));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) fail_io(fmt::format("write of {} bytes to", bytes), path_, put < 0 ? errno : ENOSPC);
    done += put;
  }
}

void File::sync() const {
  // EINVAL means that there is nothing to sync: a pipe, or some devices.
  if (::fsync(fd_) != 0 && errno != EINVAL) fail_io("sync", path_, errno);
}

void File::close() {
  const int fd = std::exchange(fd_, -1);
  if (fd >= 0 && ::close(fd) != 0 && errno != EINTR) fail_io("close", path_, errno);
}

namespace {

// Returns whether the path is a device or a pipe, or the file that is this program's standard output. A rename would
// replace it.
bool is_stream(const std::string& path) {
  struct stat named {
  }, output{};
  if (::stat(path.c_str(), &named) != 0 || S_ISDIR(named.st_mode)) return false;
  return !S_ISREG(named.st_mode) ||
         (::fstat(STDOUT_FILENO, &output) == 0 && named.st_dev == output.st_dev && named.st_ino == output.st_ino);
}

}  // namespace

PendingFile::PendingFile(std::string path)
    : path_(std::move(path)), file_(File::create(fmt::format("{}.tmp-{}", path_, ::getpid()))) {}

PendingFile::~PendingFile() {
  if (!committed_) ::unlink(file_.path().c_str());
}

void PendingFile::commit() {
  file_.sync();
  file_.close();
  if (::rename(file_.path().c_str(), path_.c_str()) != 0) fail_io("rename to", path_, errno);
  committed_ = true;
  sync_dir(parent_dir(path_));
}

std::string read_file(const std::string& path) {
  const File file = File::open_read(path);
  std::string contents(file.size(), '\0');
  contents.resize(file.read_some(contents.data(), contents.size(), 0));
  return contents;
}

void write_file_atomic(const std::string& path, std::string_view contents) {
  if (is_stream(path)) {
    File stream = File::open_append(path);
    stream.append(contents.data(), std::ssize(contents));
    return stream.close();
  }
  std::error_code unknown;
  const bool is_link = std::filesystem::is_symlink(std::filesystem::symlink_status(path, unknown));
  PendingFile pending(is_link ? std::filesystem::weakly_canonical(path, unknown).string() : path);
  pending.file().write_at(contents.data(), contents.size(), 0);
  pending.commit();
}

void sync_dir(const std::string& dir) {
  const int fd = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_io("open folder", dir, errno);
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  if (error != 0 && error != EINVAL && error != ENOTSUP) fail_io("sync folder", dir, error);
}

std::string parent_dir(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

std::string errno_text(int error) { return std::generic_category().message(error); }

int64_t free_bytes(const std::string& path) {
  struct statvfs info {};
  if (::statvfs(path.c_str(), &info) != 0) return -1;
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

}  // namespace moebius
