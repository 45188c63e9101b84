// A tensor on the GPU and the same on the CPU, for tests that compute with both.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "device/device.h"

namespace moebius {

// Bytes on the GPU, with a copy in host memory.
struct Twin {
  Twin(Stream& s, const Shape& shape, DType dtype, uint64_t seed) : s_(s) {
    Tensor t{.shape = shape, .dtype = dtype};
    bytes_.resize(t.num_bytes());
    memory_ = Buffer(DeviceKind::cuda, std::max<int64_t>(1, t.num_bytes()));
    host = t;
    host.data = bytes_.data();
    host.device = DeviceKind::cpu;
    gpu = t;
    gpu.data = memory_.data();
    gpu.device = DeviceKind::cuda;
    fill(seed);
    copy_to_device(s, gpu.data, host.data, host.num_bytes());
    synchronize(s);
  }
  // Fills in values whose magnitudes differ so much that the order of their sum shows.
  void fill(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int64_t i = 0; i < host.numel(); ++i) {
      const int exponent = static_cast<int>(random() % 40) - 20;
      const double x = std::ldexp(static_cast<double>(random() % 4001) - 2000, exponent);
      if (host.dtype == DType::f32) host.ptr<float>()[i] = static_cast<float>(x);
      if (host.dtype == DType::f64) host.ptr<double>()[i] = x;
      if (host.dtype == DType::i64) host.ptr<int64_t>()[i] = static_cast<int64_t>(x);
      if (host.dtype == DType::bf16) host.ptr<bf16>()[i] = to_bf16(static_cast<float>(x));
    }
  }
  void expect_same(const char* what) {
    std::vector<std::byte> got(bytes_.size());
    copy_to_host(s_, got.data(), gpu.data, gpu.num_bytes());
    EXPECT_TRUE(got.empty() || std::memcmp(got.data(), bytes_.data(), got.size()) == 0)
        << what << ", " << to_string(host);
  }
  Tensor host, gpu;

 private:
  Stream s_;
  std::vector<std::byte> bytes_;
  Buffer memory_;
};

}  // namespace moebius
