#include "checkpoint/folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <system_error>

#include "core/error.h"
#include "io/files.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr std::string_view kUnfinished = ".tmp-";

[[noreturn]] void fail_io(const std::string& what, const std::string& path, int error) {
  MOEBIUS_FAIL(io, "checkpoint: {} {}: {}; check the folder, its disk and this user's access to it", what, path,
               errno_text(error));
}

std::optional<int64_t> step_of(const std::string& name) {
  int64_t step = -1;
  if (!name.starts_with(kStep)) return std::nullopt;
  std::from_chars(name.data() + kStep.size(), name.data() + name.size(), step);
  if (step < 0 || name != step_folder_name(step)) return std::nullopt;
  return step;
}

void for_each_folder(const std::string& dir, const std::function<void(const fs::path&)>& visit) {
  std::error_code error;
  fs::directory_iterator it(dir, error);
  if (error == std::errc::no_such_file_or_directory) return;
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    std::error_code gone;  // a live run may remove it meanwhile
    if (it->is_directory(gone)) visit(it->path());
  }
  if (error) fail_io("list", dir, error.value());
}

std::string holder(int fd) {
  std::string text(256, '\0');
  const ssize_t got = ::pread(fd, text.data(), text.size(), 0);
  text.resize(std::max<ssize_t>(got, 0));
  text.resize(std::min(text.size(), text.find('\n')));
  return text.empty() ? "an unnamed process" : text;
}

std::string this_process() {
  char host[256] = {};
  const bool named = ::gethostname(host, sizeof(host) - 1) == 0;
  return fmt::format("process {} on {}", ::getpid(), named ? host : "an unnamed host");
}

std::string random_hex() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

// Not every file system can lock. On such a one, the user must start only one run per folder.
bool cannot_lock(int error) { return error == ENOSYS || error == EOPNOTSUPP || error == ENOLCK || error == EINVAL; }

}  // namespace

std::string step_folder_name(int64_t step) { return fmt::format("{}{:08}", kStep, step); }

std::string unfinished_name(int64_t step) { return step_folder_name(step) + std::string(kUnfinished) + random_hex(); }

std::string free_old_folder(const std::string& dir) {
  for (int64_t n = 1;; ++n) {
    const std::string folder = fmt::format("{}/old-{}", dir, n);
    std::error_code unreadable;
    if (!fs::exists(folder, unreadable)) return folder;
  }
}

std::vector<StepFolder> step_folders(const std::string& dir) {
  std::vector<StepFolder> folders;
  for_each_folder(dir, [&](const fs::path& path) {
    if (const auto step = step_of(path.filename().string())) folders.push_back({*step, path.string()});
  });
  std::sort(folders.begin(), folders.end(), [](const StepFolder& a, const StepFolder& b) { return a.step < b.step; });
  return folders;
}

std::vector<std::string> unfinished_folders(const std::string& dir) {
  std::vector<std::string> folders;
  for_each_folder(dir, [&](const fs::path& path) {
    const std::string name = path.filename().string();
    const size_t mark = name.find(kUnfinished);
    if (mark != name.npos && step_of(name.substr(0, mark))) folders.push_back(path.string());
  });
  return folders;
}

void make_dirs(const std::string& dir) {
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) fail_io("create folder", dir, error.value());
  sync_dir(parent_dir(dir));
}

void rename_folder(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_io("rename " + from + " to", to, errno);
}

void exchange_folders(const std::string& unfinished, const std::string& b) {
  if (::renameat2(AT_FDCWD, unfinished.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS) fail_io("exchange " + unfinished + " with", b, errno);
  // For network file systems: two renames. A crash between them loses b, and no other checkpoint.
  rename_folder(b, unfinished + "0");
  rename_folder(unfinished, b);
}

void remove_folder(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail_io("remove", path, error.value());
}

CheckpointLock::CheckpointLock(const std::string& dir) : path_(dir + "/lock") {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail_io("open", path_, errno);
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && !cannot_lock(errno)) {
    const int error = errno;
    const std::string other = holder(fd_);
    ::close(fd_);
    if (error != EWOULDBLOCK) fail_io("lock", path_, error);
    MOEBIUS_FAIL(
        usage,
        "checkpoint: expected {} to be used by one run at a time; got a second one besides {}; wait for that one "
        "to end or choose another run.dir",
        dir, other);
  }
  // This is only for people who read the error above; if this write fails, nothing is lost.
  const std::string me = this_process();
  if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, me.data(), me.size(), 0) < 0) return;
}

CheckpointLock::~CheckpointLock() { ::close(fd_); }

// It is synced, so that other machines of a network file system can read it.
std::string CheckpointLock::sign() const {
  const std::string signature = random_hex(), text = this_process() + "\n" + signature + "\n";
  const auto size = static_cast<ssize_t>(text.size());
  if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, text.data(), text.size(), 0) != size) fail_io("write", path_, errno);
  if (::fsync(fd_) != 0 && errno != EINVAL && errno != ENOTSUP) fail_io("sync", path_, errno);
  return signature;
}

std::string why_not_signed(const std::string& dir, const std::string& signature) {
  try {
    return read_file(dir + "/lock").ends_with("\n" + signature + "\n") ? "" : "another";
  } catch (const Error& e) {
    return e.what();
  }
}

}  // namespace moebius
