// The parts that the tests of ops share: arrays that every device of the machine can use, the
// devices themselves, distances, finite differences, and streams on teams of any size.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/rng.h"
#include "core/tensor.h"
#include "device/accelerator.h"
#include "device/device.h"
#include "ops/gemm/cublas_lt.h"

namespace moebius::testing {

using Values = std::vector<double>;

// Returns the GPU of this machine, if there is one that this build can use; one for all tests of a program.
inline Accelerator* accelerator() {
  static const std::unique_ptr<Accelerator> gpu = []() -> std::unique_ptr<Accelerator> {
    if (!Accelerator::why_missing().empty()) return nullptr;
    open_cublas_lt();  // so that the library outlives the handle of gemm, which is destroyed at exit
    return std::make_unique<Accelerator>();
  }();
  return gpu.get();
}
inline std::vector<DeviceKind> devices() {
  std::vector<DeviceKind> all{DeviceKind::cpu};
  if (accelerator()) all.push_back(DeviceKind::cuda);
  return all;
}
inline Stream stream_on(DeviceKind device, ThreadPool& pool) {
  return device == DeviceKind::cuda ? Stream(*accelerator(), pool) : Stream(device, pool);
}

// A case of a table on one device:  INSTANTIATE_TEST_SUITE_P(Shapes, X,
// ValuesIn(on_each_device(cases())))  with class X : public DeviceTest<Case>,  whose tests run on
// s_ what c() says.
template <class Case>
struct On {
  DeviceKind device;
  Case c;
};
template <class Case>
std::vector<On<Case>> on_each_device(const std::vector<Case>& cases) {
  std::vector<On<Case>> all;
  for (const DeviceKind device : devices()) {
    for (const Case& c : cases) all.push_back({device, c});
  }
  return all;
}
template <class Case>
class DeviceTest : public ::testing::TestWithParam<On<Case>> {
 protected:
  const Case& c() const { return this->GetParam().c; }
  ThreadPool pool_{2};
  Stream s_ = stream_on(this->GetParam().device, pool_);
};
// For tests without a table: body(stream) on each device.
inline void on_each_device(const std::function<void(Stream&)>& body) {
  for (const DeviceKind device : devices()) {
    SCOPED_TRACE(name_of(device));
    ThreadPool pool(2);
    Stream s = stream_on(device, pool);
    body(s);
  }
}

// Bytes that both the host and the GPU can access (pinned memory where there is a GPU), copied by value.
class SharedBytes {
 public:
  SharedBytes() = default;
  explicit SharedBytes(int64_t n) : buffer_(accelerator() ? DeviceKind::cuda : DeviceKind::cpu, n) {}
  SharedBytes(const SharedBytes& other) { *this = other; }
  SharedBytes& operator=(const SharedBytes& other) {
    if (this == &other) return *this;
    other.settle();
    buffer_ = HostBuffer(accelerator() ? DeviceKind::cuda : DeviceKind::cpu, other.num_bytes());
    if (other.num_bytes() > 0) std::memcpy(buffer_.data(), other.buffer_.data(), other.num_bytes());
    return *this;
  }
  unsigned char* data() const { return static_cast<unsigned char*>(buffer_.data()); }
  int64_t num_bytes() const { return buffer_.num_bytes(); }
  // Waits for whatever the GPU may still write.
  void settle() const {
    if (accelerator()) cuda::synchronize(*accelerator());
  }

 private:
  HostBuffer buffer_;
};

// Owned elements of any float dtype, i32 or i64, accessed as double.
class Array {
 public:
  Array() = default;
  Array(Shape shape, DType dtype) : shape_(shape), dtype_(dtype), bytes_(shape.numel() * size_of(dtype)) {}

  // Marked as not written: all bits are set, which is a NaN in every float dtype and -1 in integers.
  static Array poisoned(Shape shape, DType dtype) {
    Array a(shape, dtype);
    if (a.bytes_.num_bytes() > 0) std::memset(a.bytes_.data(), 0xff, a.bytes_.num_bytes());
    return a;
  }
  // Normal values rounded to the dtype; arrays with different keys have different values.
  static Array normal(Shape shape, DType dtype, uint64_t key, double scale = 1) {
    Values v(shape.numel());
    const Rng rng(1234, RngSite::bench, key);
    for (size_t i = 0; i < v.size(); ++i) v[i] = scale * rng.normal(i);
    return of(shape, dtype, v);
  }
  static Array of(Shape shape, DType dtype, const Values& values) {
    Array a(shape, dtype);
    for (size_t i = 0; i < values.size(); ++i) a.set(i, values[i]);
    return a;
  }
  static Array of_ints(Shape shape, const std::vector<int32_t>& values) {
    return of(shape, DType::i32, Values(values.begin(), values.end()));
  }

  Tensor tensor() { return {.data = bytes_.data(), .shape = shape_, .dtype = dtype_}; }
  Values values() const {
    bytes_.settle();
    Values v(shape_.numel());
    for (size_t i = 0; i < v.size(); ++i) v[i] = get(i);
    return v;
  }
  std::vector<unsigned char> bytes() const {
    bytes_.settle();
    return {bytes_.data(), bytes_.data() + bytes_.num_bytes()};
  }

 private:
  template <class T>
  T load(size_t i) const {
    T t;
    std::memcpy(&t, bytes_.data() + i * sizeof t, sizeof t);
    return t;
  }
  template <class T>
  void store(size_t i, T t) {
    std::memcpy(bytes_.data() + i * sizeof t, &t, sizeof t);
  }
  double get(size_t i) const {
    switch (dtype_) {
      case DType::bf16:
        return to_f32(load<bf16>(i));
      case DType::f64:
        return load<double>(i);
      case DType::i32:
        return load<int32_t>(i);
      case DType::i64:
        return static_cast<double>(load<int64_t>(i));
      default:
        return load<float>(i);
    }
  }
  void set(size_t i, double x) {
    switch (dtype_) {
      case DType::bf16:
        return store(i, to_bf16(static_cast<float>(x)));
      case DType::f64:
        return store(i, x);
      case DType::i32:
        return store(i, static_cast<int32_t>(x));
      case DType::i64:
        return store(i, static_cast<int64_t>(x));
      default:
        return store(i, static_cast<float>(x));
    }
  }

  Shape shape_{0};
  DType dtype_ = DType::f32;
  SharedBytes bytes_;
};

inline double epsilon(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : 0x1p-23; }

inline double norm_of(const Values& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum);
}

// ||got - want|| <= relative ||want|| + floor sqrt(n). A NaN anywhere fails.
inline void expect_close(const std::string& what, const Values& got, const Values& want, double relative,
                         double floor) {
  ASSERT_EQ(got.size(), want.size()) << what;
  Values difference(got.size());
  for (size_t i = 0; i < got.size(); ++i) difference[i] = got[i] - want[i];
  EXPECT_LE(norm_of(difference), relative * norm_of(want) + floor * std::sqrt(static_cast<double>(got.size()))) << what;
}

// gradient = d loss / d x of a smooth loss in double, by central differences
// The errors h^2 |f'''| / 6 and eps |f| / h are both below 1e-7 here.
inline void expect_gradient(const std::string& what, const std::function<double(const Values&)>& loss, Values x,
                            const Values& gradient) {
  constexpr double h = 1e-5;
  Values differences(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double old = x[i];
    x[i] = old + h;
    const double above = loss(x);
    x[i] = old - h;
    differences[i] = (above - loss(x)) / (2 * h);
    x[i] = old;
  }
  expect_close(what + " against finite differences", gradient, differences, 1e-6, 1e-7);
}

inline double dot(const Values& x, const Values& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// body(stream) returns all arrays that it wrote; their bytes must be the same for
// teams of 1, 2 and 3, and on a GPU each time.
inline void expect_same_bits_for_any_team(const std::function<std::vector<Array>(Stream&)>& body) {
  std::vector<Array> first;
  for (const int num_threads : {1, 2, 3}) {
    ThreadPool pool(num_threads);
    Stream s(DeviceKind::cpu, pool);
    const std::vector<Array> outputs = body(s);
    if (num_threads == 1) first = outputs;
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_EQ(outputs[i].bytes(), first[i].bytes()) << "output " << i << " with " << num_threads << " threads";
    }
  }
  if (!accelerator()) return;
  ThreadPool pool(1);
  Stream s(*accelerator(), pool);
  first = body(s);
  const std::vector<Array> again = body(s);
  for (size_t i = 0; i < again.size(); ++i) {
    EXPECT_EQ(again[i].bytes(), first[i].bytes()) << "output " << i << " the second time on the GPU";
  }
}

// Returns the text of the Error that body throws.
inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// Runs body on the null device: it may touch no memory, and all of its work is counted. Returns
// the traced cost.
inline Cost cost_on_null(const std::function<void(Stream&)>& body) {
  ThreadPool pool(1);
  Trace trace;
  Stream s(DeviceKind::null, pool, &trace);
  body(s);
  Cost sum;
  for (const TraceEvent& e : trace.events()) sum += e.cost;
  return sum;
}

inline Tensor null_tensor(Shape shape, DType dtype = DType::f32) {
  return {.shape = shape, .dtype = dtype, .device = DeviceKind::null};
}

}  // namespace moebius::testing
