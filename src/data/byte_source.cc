#include "data/byte_source.h"

#include <zstd.h>

#include <string_view>
#include <vector>

#include "core/error.h"
#include "io/files.h"

namespace moebius {
namespace {

class PlainBytes : public ByteSource {
 public:
  explicit PlainBytes(const std::string& path) : file_(File::open_read(path)) {}

  int64_t read(char* dst, int64_t bytes) override { return file_.read_next(dst, bytes); }

 private:
  File file_;
};

struct FreeStream {
  void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
};

// One or more zstd frames. The file may end between frames only.
class ZstdBytes : public ByteSource {
 public:
  explicit ZstdBytes(const std::string& path)
      : compressed_(path), path_(path), stream_(ZSTD_createDStream()), chunk_(ZSTD_DStreamInSize()) {}

  int64_t read(char* dst, int64_t bytes) override {
    ZSTD_outBuffer out{dst, static_cast<size_t>(bytes), 0};
    while (out.pos == 0) {
      if (in_.pos == in_.size && !refill()) break;
      frame_rest_ = ZSTD_decompressStream(stream_.get(), &out, &in_);
      MOEBIUS_CHECK(input, !ZSTD_isError(frame_rest_),
                    "{}: expected zstd data; got {}; the file is damaged; fetch it again", path_,
                    ZSTD_getErrorName(frame_rest_));
    }
    return static_cast<int64_t>(out.pos);
  }

 private:
  // Reads the next chunk, and returns false at a valid end. The decoder leaves the last byte of a
  // frame unread until all its output was taken. So it holds no more output here.
  bool refill() {
    const int64_t got = compressed_.read(chunk_.data(), chunk_.size());
    in_ = {chunk_.data(), static_cast<size_t>(got), 0};
    if (got > 0) return true;
    MOEBIUS_CHECK(input, frame_rest_ == 0,
                  "{}: expected a whole zstd file; got one that ends inside a frame; fetch it again", path_);
    return false;
  }

  PlainBytes compressed_;
  std::string path_;
  std::unique_ptr<ZSTD_DStream, FreeStream> stream_;
  std::vector<char> chunk_;
  ZSTD_inBuffer in_{nullptr, 0, 0};
  size_t frame_rest_ = 1;  // 0 between frames; a file without frames is not zstd
};

}  // namespace

std::unique_ptr<ByteSource> open_bytes(const std::string& path) {
  if (std::string_view(path).ends_with(".zst")) return std::make_unique<ZstdBytes>(path);
  return std::make_unique<PlainBytes>(path);
}

}  // namespace moebius
