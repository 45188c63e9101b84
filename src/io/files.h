// Files through POSIX calls.
// An error names the path, the bytes requested, the system's reason and what to do.
//
// No file is mapped into memory: a file that shrinks during a read is an error, never a signal.
// A path that does not exist is bad input (ErrorKind::input);
// later refusals of the system are ErrorKind::io.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moebius {

// An open file. It owns its descriptor; it can be moved but not copied.
class File {
 public:
  File() = default;
  static File open_read(const std::string& path);
  static File create(const std::string& path);         // read and write; an existing file is emptied
  static File create_unique(const std::string& path);  // like create, but Error{io} if the path exists
  static File open_append(const std::string& path);    // created if missing; every append goes to the end
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  bool is_open() const { return fd_ >= 0; }
  const std::string& path() const { return path_; }
  int64_t size() const;

  // These move all of `bytes`, or throw Error{io}.
  // One system call moves at most 2 GiB, so calls above 1 GiB are split.
  void read_at(void* dst, int64_t bytes, int64_t offset) const;
  void write_at(const void* src, int64_t bytes, int64_t offset) const;
  void append(const void* src, int64_t bytes) const;  // writes at the file's current position
  // Reads as much of [offset, offset + bytes) as the file has.
  // Returns the number of bytes read; 0 is the end.
  int64_t read_some(void* dst, int64_t bytes, int64_t offset) const;

  // Reads up to `bytes` at the file's current position, as they arrive. Returns 0 only at the end.
  // Works on pipes.
  int64_t read_next(void* dst, int64_t bytes) const;

  void sync() const;  // writes data and metadata to the device
  void close();       // may be called twice; Error{io} when the system reports a late write error

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  static File open_with(const std::string& path, int flags, const char* what);
  int fd_ = -1;
  std::string path_;
};

// A file that appears under its name only when it is complete.
// It is written under a temporary name, synced, then renamed. Without commit() the destructor removes it.
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
// Writes a file that appears when it is complete. A link keeps its name, and the file that it points to is replaced. A
// device, a pipe or standard output is written to as it is. Error{io} as for PendingFile.
void write_file_atomic(const std::string& path, std::string_view contents);

// Makes renames and new names in the folder durable. File systems that cannot sync
// folders are accepted.
void sync_dir(const std::string& dir);
std::string parent_dir(const std::string& path);  // "." for a name without a folder

// Returns the system's text for an errno value. Thread-safe.
std::string errno_text(int error);

// Returns the bytes that an unprivileged writer may still use on the file system of `path`;
// -1 if unknown.
int64_t free_bytes(const std::string& path);

}  // namespace moebius
