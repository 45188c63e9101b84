// A Tensor is a non-owning view of contiguous row-major memory with a shape, a dtype and a place.
//
// Names end in their logical shape:
//   T tokens       N T*K pairs         V vocabulary   D model dim      R rows received   S sequence (or segments)
//   F expert hidden  H query heads     L layers       E, e experts     G kv heads        P stages
//   K top-k        d head dim          M micro-batches  C qkv columns, (H + 2 G) d
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/dtype.h"
#include "core/error.h"

namespace moebius {

enum class DeviceKind : uint8_t { cpu, cuda, null };  // null runs nothing and counts everything

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
  int64_t num_bytes() const { return numel() * size_of(dtype); }
  int64_t dim(int i) const { return shape[i]; }
  // An optional argument that was not given.
  bool empty() const { return shape.numel() == 0; }

  // The elements; T must be the dtype's type. Null only when there are no elements.
  template <class T>
  T* ptr() const {
    if (dtype != dtype_of<T>) wrong_dtype(dtype_of<T>);
    return static_cast<T*>(data);
  }

  Tensor view(Shape to) const;                    // same elements, other shape
  Tensor rows(int64_t begin, int64_t end) const;  // [begin, end) of dim 0

 private:
  [[noreturn]] void wrong_dtype(DType asked) const;
};

std::string to_string(const Tensor& t);  // "bf16[4, 8]"

template <class T>
Tensor tensor_of(T* data, Shape shape) {
  return {.data = data, .shape = shape, .dtype = dtype_of<T>};
}

// Error{usage} "who: name must be DTYPE SHAPE; got ..." unless t is exactly that.
void check_tensor(const char* who, const char* name, const Tensor& t, DType dtype, const Shape& shape);

}  // namespace moebius
