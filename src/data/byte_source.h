// A file as a stream of bytes, decompressed on the way when its name ends in .zst.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace moebius {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Up to `bytes` > 0 bytes; 0 only at the end. Error{input} for a damaged or truncated compressed file.
  virtual int64_t read(char* dst, int64_t bytes) = 0;
};

std::unique_ptr<ByteSource> open_bytes(const std::string& path);

}  // namespace moebius
