#include "weights/not_finite.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "hub/hf_folder.h"

namespace moebius {
namespace {

// NaN and infinity are the values whose exponent is all ones.
template <class Bits>
int64_t count_from(const void* elements, int64_t n, Bits infinity) {
  const auto* at = static_cast<const char*>(elements);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    Bits bits;
    std::memcpy(&bits, at + i * static_cast<int64_t>(sizeof bits), sizeof bits);
    count += (bits & infinity) == infinity;
  }
  return count;
}

// Numbers from `limit` on round to infinity, after they became f32.
template <class From>
int64_t count_beyond(const void* elements, int64_t n, float limit) {
  const auto* at = static_cast<const char*>(elements);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    From x;
    std::memcpy(&x, at + i * static_cast<int64_t>(sizeof x), sizeof x);
    count += !(std::fabs(static_cast<float>(x)) < limit);  // NaN too
  }
  return count;
}

constexpr float kBeyondBf16 = 0x1.ffp127f;  // halfway from its largest number, 0x1.fep127, to the next

}  // namespace

int64_t count_not_finite(const void* elements, DType dtype, int64_t n, DType held) {
  const float limit = held == DType::bf16 ? kBeyondBf16 : std::numeric_limits<float>::infinity();
  if (dtype == DType::f64 && held != DType::f64) return count_beyond<double>(elements, n, limit);
  if (dtype == DType::f32 && held == DType::bf16) return count_beyond<float>(elements, n, limit);
  switch (dtype) {
    case DType::f32:
      return count_from<uint32_t>(elements, n, 0x7f800000u);
    case DType::bf16:
      return count_from<uint16_t>(elements, n, 0x7f80u);
    case DType::f16:
      return count_from<uint16_t>(elements, n, 0x7c00u);
    case DType::f64:
      return count_from<uint64_t>(elements, n, 0x7ff0000000000000u);
    default:
      return 0;
  }
}

void add_not_finite(std::vector<NotFinite>* list, const std::string& name, int64_t count) {
  if (count == 0) return;
  if (list->empty() || list->back().name != name) list->push_back({name, 0});
  list->back().count += count;
}

std::string not_finite_warning(const std::string& path, const std::vector<NotFinite>& list) {
  if (list.empty()) return "";
  std::vector<std::string> names;
  int64_t count = 0;
  for (const NotFinite& each : list) {
    names.push_back(each.name);
    count += each.count;
  }
  return fmt::format(
      "weights of {}: expected finite numbers; got {} that are NaN or infinite in {} tensor{} ({}), as they are "
      "or in the dtype they are put into; what is computed from them will be, too: fetch or train the model again",
      path, count, list.size(), list.size() == 1 ? "" : "s", name_list(names, 5));
}

}  // namespace moebius
