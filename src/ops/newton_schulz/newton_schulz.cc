#include "ops/newton_schulz/newton_schulz.h"

#include <algorithm>
#include <utility>

#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/newton_schulz/newton_schulz_backends.h"
#include "ops/op_checks.h"
#include "ops/optimizer/optimizer.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;
constexpr int64_t kAlign = 256;  // bytes

// Cuts the scratch into tensors, each at a multiple of kAlign bytes. Without memory it counts.
class Scratch {
 public:
  explicit Scratch(Tensor bytes) : bytes_(bytes) {}
  Tensor take(Shape shape, DType dtype) {
    Tensor t{.shape = shape, .dtype = dtype, .device = bytes_.device};
    if (bytes_.data) t.data = static_cast<char*>(bytes_.data) + used_;
    used_ += div_ceil(t.num_bytes(), kAlign) * kAlign;
    return t;
  }
  int64_t used() const { return used_; }

 private:
  Tensor bytes_;
  int64_t used_ = 0;
};

struct Workspace {
  Workspace(Scratch& scratch, int64_t M, int64_t N, DType compute)
      : x_MN(scratch.take({M, N}, compute)),
        next_MN(scratch.take({M, N}, compute)),
        s_RR(scratch.take({std::min(M, N), std::min(M, N)}, compute)),
        b_RR(scratch.take(s_RR.shape, compute)),
        sum_1(scratch.take({1}, DType::f64)),
        partial_P(scratch.take({SumSquares::num_partials(Tensor{.shape = {M * N}})}, DType::f64)) {}
  Tensor x_MN, next_MN, s_RR, b_RR, sum_1, partial_P;
};

// x becomes next.
void iterate(Stream& s, Workspace& r) {
  const bool is_wide = r.x_MN.dim(0) <= r.x_MN.dim(1);
  gemm(s, {.c_MN = r.s_RR, .a = r.x_MN, .b = r.x_MN, .trans_a = !is_wide, .trans_b = is_wide});
  gemm(s, {.c_MN = r.b_RR, .a = r.s_RR, .b = r.s_RR});
  add_scaled(s, {.z = r.b_RR, .x = r.b_RR, .y = r.s_RR, .a = kC, .b = kB});
  add_scaled(s, {.z = r.next_MN, .x = r.x_MN, .a = kA});
  gemm(s, {.c_MN = r.next_MN, .a = is_wide ? r.b_RR : r.x_MN, .b = is_wide ? r.x_MN : r.b_RR, .accumulate = true});
  std::swap(r.x_MN, r.next_MN);
}

}  // namespace

void add_scaled(Stream& s, const AddScaled& a) {
  const char* who = "add_scaled";
  check_float(who, "x", a.x);
  check_float(who, "z", a.z);
  check_tensor(who, "z", a.z, a.z.dtype, a.x.shape);
  if (!a.y.empty()) check_tensor(who, "y", a.y, a.z.dtype, a.x.shape);
  if (!a.sum_squares_1.empty()) check_tensor(who, "sum_squares", a.sum_squares_1, DType::f64, {1});
  OpScope scope(s, who, cost(a));
  if (a.x.empty()) return;
  run_on_device(s, cpu::add_scaled, cuda::add_scaled, a);
}

Cost cost(const AddScaled& a) {
  const int64_t bytes = a.x.num_bytes() + a.z.num_bytes() + (a.y.empty() ? 0 : a.y.num_bytes());
  return {static_cast<double>((a.y.empty() ? 1 : 3) * a.x.numel()), static_cast<double>(bytes)};
}

int64_t NewtonSchulz::scratch_bytes(int64_t M, int64_t N, DType compute) {
  Scratch counted(Tensor{});
  Workspace(counted, M, N, compute);
  return counted.used();
}

void newton_schulz(Stream& s, const NewtonSchulz& a) {
  const char* who = "newton_schulz";
  MOEBIUS_CHECK(usage, a.u_MN.shape.rank() == 2, "{}: u must be a matrix; got {}", who, to_string(a.u_MN));
  const int64_t M = a.u_MN.dim(0), N = a.u_MN.dim(1);
  check_tensor(who, "u", a.u_MN, DType::f32, {M, N});
  check_tensor(who, "o", a.o_MN, DType::f32, {M, N});
  MOEBIUS_CHECK(usage, a.compute == DType::f32 || a.compute == DType::bf16, "{}: compute must be f32 or bf16; got {}",
                who, name_of(a.compute));
  check_scratch(who, a.scratch, NewtonSchulz::scratch_bytes(M, N, a.compute));
  if (M * N == 0) return;
  Scratch scratch(a.scratch);
  Workspace work(scratch, M, N, a.compute);
  fill_zero(s, work.sum_1);
  const Tensor flat = a.u_MN.view({M * N});
  sum_squares(s, {.sum_1 = work.sum_1, .partial_P = work.partial_P, .x = std::span(&flat, 1)});
  add_scaled(s, {.z = work.x_MN, .x = a.u_MN, .sum_squares_1 = work.sum_1});
  for (int i = 0; i < NewtonSchulz::kSteps; ++i) iterate(s, work);
  add_scaled(s, {.z = a.o_MN, .x = work.x_MN, .a = a.factor});
}

}  // namespace moebius
