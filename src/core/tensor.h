// A Tensor is a non-owning view of contiguous row-major memory with a shape, a dtype and a device.
//
// Names of tensors end in their logical shape, one letter per dimension:
//   T  tokens            N  pairs, T * K      V  vocabulary     D  model dimension
//   R  rows received     S  sequence, or segments               F  hidden dimension of an expert
//   H  query heads       G  key-value heads   d  head dimension L  layers
//   E, e  experts        K  top-k             P  stages         M  micro-batches
//   C  columns of qkv, (H + 2 G) d
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/dtype.h"
#include "core/error.h"

namespace moebius {

enum class DeviceKind : uint8_t { cpu, cuda, null };  // null runs nothing; it counts work and memory

std::string_view name_of(DeviceKind device);

class Shape {
 public:
  static constexpr int kMaxRank = 5;
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);  // REQUIRES: at most kMaxRank dims, none negative
  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[i]; }
  int64_t numel() const;  // 1 for rank 0
  bool operator==(const Shape&) const = default;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

std::string to_string(const Shape& shape);  // "[4, 8]"

struct Tensor {
  void* data = nullptr;
  Shape shape{0};
  DType dtype = DType::f32;
  DeviceKind device = DeviceKind::cpu;

  int64_t numel() const { return shape.numel(); }
  int64_t num_bytes() const { return bytes_of(dtype, numel()); }
  int64_t dim(int i) const { return shape[i]; }
  // Returns whether there are no elements. An optional argument that was not given is empty.
  bool empty() const { return shape.numel() == 0; }

  // Returns the elements; T must be the dtype's type. The result is null only when there
  // are no elements.
  template <class T>
  T* ptr() const {
    if (dtype != dtype_of<T>) wrong_dtype(dtype_of<T>);
    return static_cast<T*>(data);
  }

  Tensor view(Shape to) const;  // the same elements in another shape
  // [begin, end) of dim 0. REQUIRES: with f4_e2m1, begin is at a whole byte.
  Tensor rows(int64_t begin, int64_t end) const;

 private:
  [[noreturn]] void wrong_dtype(DType asked) const;
};

std::string to_string(const Tensor& t);  // "bf16[4, 8]"

template <class T>
Tensor tensor_of(T* data, Shape shape) {
  return {.data = data, .shape = shape, .dtype = dtype_of<T>};
}

// Throws Error{usage} "who: name must be DTYPE SHAPE; got ..." unless t has exactly this
// dtype and shape.
void check_tensor(const char* who, const char* name, const Tensor& t, DType dtype, const Shape& shape);

}  // namespace moebius
