// A file as a stream of bytes. A file whose name ends in .zst is decompressed while it is read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace moebius {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Reads up to `bytes` > 0 bytes and returns their number, which is 0 at the end only. Throws
  // Error{input} for a damaged or truncated compressed file.
  virtual int64_t read(char* dst, int64_t bytes) = 0;
};

std::unique_ptr<ByteSource> open_bytes(const std::string& path);

}  // namespace moebius
