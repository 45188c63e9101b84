#include "hub/fused_experts.h"

#include <cstring>

#include "core/error.h"

namespace moebius {

std::optional<FusedPlace> fused_place(HfFamily family, const std::string& canonical, const std::vector<int64_t>& shape,
                                      int64_t num_experts) {
  const auto expert = parse_expert_name(canonical);
  if (family != HfFamily::gpt_oss || !expert) return std::nullopt;
  MOEBIUS_ASSERT(shape.size() == (expert->is_bias ? 1 : 2) && expert->expert < num_experts);
  const bool is_down = expert->projection == ExpertProjection::down;
  const int64_t taken = is_down ? 1 : 2, out = shape[0], in = expert->is_bias ? 1 : shape[1], width = taken * out;
  FusedPlace place{.name = fused_name(*expert), .shape = {num_experts, in, width}, .rows = out, .cols = in};
  place.offset = expert->expert * in * width + (expert->projection == ExpertProjection::up ? 1 : 0);
  place.row_stride = taken;
  place.col_stride = width;
  if (!expert->is_bias) return place;
  place.shape = {num_experts, width};
  place.rows = 1;
  place.cols = out;
  place.row_stride = width;
  place.col_stride = taken;
  return place;
}

FusedPlace packed_place(const ExpertName& expert, const std::vector<int64_t>& shape, int64_t num_experts) {
  MOEBIUS_ASSERT(shape.size() == 2 && !expert.is_bias && expert.expert < num_experts);
  const bool is_down = expert.projection == ExpertProjection::down;
  const int64_t taken = is_down ? 1 : 2, out = shape[0], in = shape[1];
  const int64_t first = expert.projection == ExpertProjection::up ? 1 : 0;
  return {.name = fused_name(expert),
          .shape = {num_experts, taken * out, in},
          .rows = out,
          .cols = in,
          .offset = (expert.expert * taken * out + first) * in,
          .row_stride = taken * in,
          .col_stride = 1};
}

namespace {

// Calls run with an integer of this size. Loops have the rows inside, since the stride of the columns is the
// larger one.
template <class Run>
void with_element(int64_t bytes, Run run) {
  switch (bytes) {
    case 1:
      return run(uint8_t{});
    case 2:
      return run(uint16_t{});
    case 4:
      return run(uint32_t{});
    default:
      MOEBIUS_ASSERT(bytes == 8);
      return run(uint64_t{});
  }
}

template <class T>
void put(T* fused, const T* own, const FusedPlace& place, int64_t first) {
  for (int64_t c = 0; c < place.cols; ++c) {
    T* column = fused + place.offset + c * place.col_stride - first;
    for (int64_t r = 0; r < place.rows; ++r) column[r * place.row_stride] = own[r * place.cols + c];
  }
}

}  // namespace

void put_into_fused(void* fused, const void* own, const FusedPlace& place, int64_t first, int64_t element_bytes) {
  with_element(element_bytes,
               [&]<class T>(T) { put(static_cast<T*>(fused), static_cast<const T*>(own), place, first); });
}

void take_from_fused(void* own, const void* fused, const FusedPlace& place, int64_t element_bytes) {
  with_element(element_bytes, [&]<class T>(T) {
    T* to = static_cast<T*>(own);
    const T* from = static_cast<const T*>(fused) + place.offset;
    for (int64_t c = 0; c < place.cols; ++c)
      for (int64_t r = 0; r < place.rows; ++r)
        to[r * place.cols + c] = from[r * place.row_stride + c * place.col_stride];
  });
}

}  // namespace moebius
