// Reads any bytes as a safetensors file. They are refused with Error{input}, or every entry can be
// read and the entries tile the data.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "core/error.h"
#include "io/safetensors.h"

namespace {

void check(bool condition) {
  if (!condition) std::abort();
}

// Reads all data that the header lists.
void read_all(const moebius::SafetensorsFile& file, int64_t file_bytes) {
  int64_t end = file_bytes;
  for (auto it = file.entries().rbegin(); it != file.entries().rend(); ++it) {
    check(it->offset + it->bytes == end);
    end = it->offset;
    std::vector<char> data(it->bytes);
    file.read(*it, data.data());
    check(file.find(it->name) == &*it);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int fd = ::memfd_create("safetensors", 0);
  check(fd >= 0 && ::write(fd, data, size) == static_cast<ssize_t>(size));
  try {
    read_all(moebius::SafetensorsFile::open("/proc/self/fd/" + std::to_string(fd)), static_cast<int64_t>(size));
  } catch (const moebius::Error& error) {
    check(error.kind() == moebius::ErrorKind::input);
  }
  ::close(fd);
  return 0;
}
