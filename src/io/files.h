// Files through POSIX calls, with errors that say the path, the bytes wanted, the system's reason and what to do.
//
// Nothing here is mapped into memory: a file that shrinks under a reader is an error, never a signal.
// A path that is not there is bad input (ErrorKind::input); whatever the system refuses later is ErrorKind::io.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moebius {

// An open file. Owns its descriptor; moves, never copies.
class File {
 public:
  File() = default;
  static File open_read(const std::string& path);
  static File create(const std::string& path);         // read and write; an existing file is emptied
  static File create_unique(const std::string& path);  // as create, but Error{io} if the path exists
  static File open_append(const std::string& path);    // created if missing; every append goes to the end
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  bool is_open() const { return fd_ >= 0; }
  const std::string& path() const { return path_; }
  int64_t size() const;

  // All of `bytes` or Error{io}; calls above 1 GiB are split, since one call moves at most 2 GiB.
  void read_at(void* dst, int64_t bytes, int64_t offset) const;
  void write_at(const void* src, int64_t bytes, int64_t offset) const;
  void append(const void* src, int64_t bytes) const;  // at the file's own position
  // As much of [offset, offset + bytes) as the file has; returns the bytes read, 0 at the end.
  int64_t read_some(void* dst, int64_t bytes, int64_t offset) const;

  // Up to `bytes` from the file's own position, as they come; 0 only at the end. Works on pipes.
  int64_t read_next(void* dst, int64_t bytes) const;

  void sync() const;  // data and metadata on the device
  void close();       // closing twice is fine; Error{io} when the system reports a late write error

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  static File open_with(const std::string& path, int flags, const char* what);
  int fd_ = -1;
  std::string path_;
};

// A file that appears under its name only when it is whole: written beside it, synced, then renamed.
// Destroyed without commit() it leaves nothing behind.
class PendingFile {
 public:
  explicit PendingFile(std::string path);
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;
  File& file() { return file_; }
  void commit();  // fsync, close, rename, fsync of the folder

 private:
  std::string path_;
  File file_;
  bool committed_ = false;
};

std::string read_file(const std::string& path);
void write_file_atomic(const std::string& path, std::string_view contents);

// Makes renames and new names in the folder durable. File systems that cannot sync folders are let pass.
void sync_dir(const std::string& dir);
std::string parent_dir(const std::string& path);  // "." for a bare name

// The system's words for an errno value. Thread-safe.
std::string errno_text(int error);

// Bytes an unprivileged writer may still use on the file system that holds the path; -1 when it cannot be told.
int64_t free_bytes(const std::string& path);

}  // namespace moebius
