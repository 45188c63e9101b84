#include "core/tensor.h"

namespace moebius {

std::string_view name_of(DeviceKind device) {
  switch (device) {
    case DeviceKind::cpu:
      return "cpu";
    case DeviceKind::cuda:
      return "cuda";
    case DeviceKind::null:
      return "null";
  }
  MOEBIUS_ASSERT(!"unknown device");
}

Shape::Shape(std::initializer_list<int64_t> dims) {
  MOEBIUS_ASSERT(dims.size() <= kMaxRank);
  for (int64_t d : dims) {
    MOEBIUS_ASSERT(d >= 0);
    dims_[rank_++] = d;
  }
}

int64_t Shape::numel() const {
  int64_t n = 1;
  for (int i = 0; i < rank_; ++i) n *= dims_[i];
  return n;
}

std::string to_string(const Shape& shape) {
  std::string s = "[";
  for (int i = 0; i < shape.rank(); ++i) s += fmt::format("{}{}", i ? ", " : "", shape[i]);
  return s + "]";
}

Tensor Tensor::view(Shape to) const {
  MOEBIUS_CHECK(usage, to.numel() == numel(), "Tensor::view: {} has {} elements, {} has {}", to_string(*this), numel(),
                to_string(to), to.numel());
  Tensor t = *this;
  t.shape = to;
  return t;
}

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  MOEBIUS_CHECK(usage, shape.rank() >= 1 && 0 <= begin && begin <= end && end <= shape[0],
                "Tensor::rows: [{}, {}) of {}", begin, end, to_string(*this));
  Tensor t = *this;
  const int64_t stride = shape[0] ? numel() / shape[0] : 0;
  switch (shape.rank()) {
    case 1:
      t.shape = {end - begin};
      break;
    case 2:
      t.shape = {end - begin, shape[1]};
      break;
    case 3:
      t.shape = {end - begin, shape[1], shape[2]};
      break;
    default:
      t.shape = {end - begin, shape[1], shape[2], shape[3]};
      MOEBIUS_ASSERT(shape.rank() == 4);
  }
  MOEBIUS_ASSERT(dtype != DType::f4_e2m1 || begin * stride % 2 == 0);
  if (data) t.data = static_cast<char*>(data) + bytes_of(dtype, begin * stride);
  return t;
}

void Tensor::wrong_dtype(DType asked) const {
  MOEBIUS_FAIL(usage, "Tensor::ptr: {} was accessed as {}", to_string(*this), name_of(asked));
}

std::string to_string(const Tensor& t) { return std::string(name_of(t.dtype)) + to_string(t.shape); }

void check_tensor(const char* who, const char* name, const Tensor& t, DType dtype, const Shape& shape) {
  MOEBIUS_CHECK(usage, t.dtype == dtype && t.shape == shape, "{}: {} must be {}{}; got {}", who, name, name_of(dtype),
                to_string(shape), to_string(t));
  MOEBIUS_CHECK(usage, t.data != nullptr || t.device == DeviceKind::null || t.numel() == 0, "{}: {} {} has no memory",
                who, name, to_string(t));
}

}  // namespace moebius
