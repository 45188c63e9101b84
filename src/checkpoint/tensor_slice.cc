#include "checkpoint/tensor_slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "core/block_code.h"

namespace moebius {
namespace {

// A block as a list of runs that are contiguous in the global tensor: run i is elements [first + i * stride, + length).
struct Runs {
  int64_t length = 0, stride = 0, first = 0;

  explicit Runs(const TensorSlice& s) {
    int64_t inner = 1;
    for (size_t i = std::max(s.shard.dim, 0); i < s.shape.size(); ++i) inner *= s.shape[i];
    length = stride = inner;
    if (s.shard.dim < 0 || s.shape[s.shard.dim] == 0) return;
    const int64_t row = inner / s.shape[s.shard.dim];
    length = s.shard.count * row;
    first = s.shard.begin * row;
  }
  int64_t global(int64_t position) const { return first + position / length * stride + position % length; }
  int64_t left(int64_t position) const { return length - position % length; }
  // Returns the first position at or after a global element.
  int64_t at_or_after(int64_t element) const {
    const int64_t run = element / stride, inside = element % stride - first;
    return run * length + std::clamp<int64_t>(inside, 0, length);
  }
};

bool is_all_of(const std::vector<int64_t>& shape, const Shard& shard) {
  return shard.dim < 0 || (shard.begin == 0 && shard.count == shape[shard.dim]);
}

// Returns whether the ranges tile a block. REQUIRES: they are sorted by begin.
bool tiles(const std::vector<TensorSlice>& slices, size_t begin, size_t end) {
  int64_t next = 0;
  for (size_t i = begin; i < end; ++i) {
    if (slices[i].begin != next) return false;
    next = slices[i].end;
  }
  return next == block_numel(slices[begin]);
}

}  // namespace

bool cuts_block(const TensorSlice& codes) {
  const bool of_columns = codes.shard.dim + 1 == std::ssize(codes.shape) && codes.shard.dim >= 0;
  if (of_columns && (codes.shard.begin % kCodeBlock != 0 || codes.shard.count % kCodeBlock != 0)) return true;
  return codes.begin % kCodeBlock != 0 || codes.end % kCodeBlock != 0;
}

TensorSlice scales_slice(const TensorSlice& codes) {
  TensorSlice s = codes;
  s.shape.back() /= kCodeBlock;
  if (s.shard.dim + 1 == std::ssize(s.shape)) {
    s.shard.begin /= kCodeBlock;
    s.shard.count /= kCodeBlock;
  }
  s.begin /= kCodeBlock;
  s.end /= kCodeBlock;
  return s;
}

TensorSlice whole_slice(std::vector<int64_t> shape) {
  const int64_t numel = numel_of(shape);
  return {.shape = std::move(shape), .shard = {}, .begin = 0, .end = numel};
}

std::vector<int64_t> dims_of(const Shape& shape) {
  std::vector<int64_t> dims(shape.rank());
  for (int i = 0; i < shape.rank(); ++i) dims[i] = shape[i];
  return dims;
}

int64_t numel_of(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t dim : shape)
    if (dim < 0 || __builtin_mul_overflow(numel, dim, &numel)) return -1;
  return numel;
}

int64_t block_numel(const TensorSlice& s) {
  if (s.shard.dim < 0) return numel_of(s.shape);
  std::vector<int64_t> block = s.shape;
  block[s.shard.dim] = s.shard.count;
  return numel_of(block);
}

bool is_whole(const TensorSlice& s) { return is_all_of(s.shape, s.shard) && s.numel() == numel_of(s.shape); }

bool is_legal(const TensorSlice& s) {
  if (numel_of(s.shape) < 0 || s.shard.dim >= static_cast<int>(s.shape.size())) return false;
  if (s.shard.dim >= 0) {
    const int64_t size = s.shape[s.shard.dim];
    if (s.shard.begin < 0 || s.shard.count < 0 || s.shard.count > size || s.shard.begin > size - s.shard.count)
      return false;
  }
  return 0 <= s.begin && s.begin <= s.end && s.end <= block_numel(s);
}

std::string slice_name(const std::string& name, const TensorSlice& s) {
  std::string text = name;
  if (!is_all_of(s.shape, s.shard)) {
    text += '[';
    for (int i = 0; i < s.shard.dim; ++i) text += ":, ";
    text += fmt::format("{}:{}]", s.shard.begin, s.shard.begin + s.shard.count);
  }
  if (s.numel() != block_numel(s)) text += fmt::format(".flat[{}:{}]", s.begin, s.end);
  return text;
}

std::vector<CommonRun> common_runs(const TensorSlice& a, const TensorSlice& b) {
  std::vector<CommonRun> runs;
  if (a.numel() == 0 || b.numel() == 0) return runs;
  const Runs of_a(a), of_b(b);
  for (int64_t pa = a.begin, pb = b.begin; pa < a.end && pb < b.end;) {
    const int64_t ga = of_a.global(pa), gb = of_b.global(pb);
    if (ga < gb) {
      pa = of_a.at_or_after(gb);
    } else if (gb < ga) {
      pb = of_b.at_or_after(ga);
    } else {
      const int64_t count = std::min({of_a.left(pa), of_b.left(pb), a.end - pa, b.end - pb});
      const CommonRun run{.in_a = pa - a.begin, .in_b = pb - b.begin, .count = count};
      const bool continues_run = !runs.empty() && runs.back().in_a + runs.back().count == run.in_a &&
                                 runs.back().in_b + runs.back().count == run.in_b;
      if (continues_run) {
        runs.back().count += count;
      } else {
        runs.push_back(run);
      }
      pa += count;
      pb += count;
    }
  }
  return runs;
}

std::string partition_problem(std::vector<TensorSlice> slices) {
  for (TensorSlice& s : slices)
    if (is_all_of(s.shape, s.shard)) s.shard = {};
  const auto key = [](const TensorSlice& s) { return std::tuple(s.shard.dim, s.shard.begin, s.begin, s.end); };
  std::sort(slices.begin(), slices.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  const auto named = [&](size_t i) { return slice_name("it", slices[i]); };
  int64_t next = 0;  // along the dimension of the blocks
  for (size_t i = 0; i < slices.size();) {
    size_t end = i;
    while (end < slices.size() && slices[end].shard == slices[i].shard) ++end;
    const Shard& shard = slices[i].shard;
    if (shard.dim != slices[0].shard.dim || (shard.dim >= 0 && shard.begin != next))
      return fmt::format("{} does not follow what comes before it", named(i));
    if (!tiles(slices, i, end)) return fmt::format("the ranges do not tile the block of {}", named(i));
    next = shard.begin + shard.count;
    i = end;
  }
  if (slices.empty()) return "nothing holds it";
  const Shard& last = slices.back().shard;
  if (last.dim >= 0 && next != slices[0].shape[last.dim])
    return fmt::format("{} is the last of it", named(slices.size() - 1));
  return "";
}

}  // namespace moebius
