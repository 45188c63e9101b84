#include "ops/newton_schulz/newton_schulz.h"

#include <algorithm>
#include <utility>

#include "ops/elementwise/elementwise.h"
#include "ops/gemm/batched_gemm.h"
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
  Workspace(Scratch& scratch, const Shape& BMN, DType compute)
      : x_BMN(scratch.take(BMN, compute)),
        next_BMN(scratch.take(BMN, compute)),
        s_BRR(scratch.take({BMN[0], std::min(BMN[1], BMN[2]), std::min(BMN[1], BMN[2])}, compute)),
        b_BRR(scratch.take(s_BRR.shape, compute)),
        sum_B(scratch.take({BMN[0]}, DType::f64)),
        partial_P(scratch.take({SumSquares::num_partials(Tensor{.shape = {BMN[1] * BMN[2]}})}, DType::f64)) {}
  Tensor x_BMN, next_BMN, s_BRR, b_BRR, sum_B, partial_P;
};

// Sets sum_B to the squared norms of the matrices.
void measure(Stream& s, const Tensor& u_BMN, const Workspace& work) {
  const int64_t numel = u_BMN.dim(1) * u_BMN.dim(2);
  fill_zero(s, work.sum_B);
  for (int64_t i = 0; i < u_BMN.dim(0); ++i) {
    const Tensor flat = u_BMN.rows(i, i + 1).view({numel});
    sum_squares(s, {.sum_1 = work.sum_B.rows(i, i + 1), .partial_P = work.partial_P, .x = std::span(&flat, 1)});
  }
}

// x becomes next.
void iterate(Stream& s, Workspace& r) {
  const bool is_wide = r.x_BMN.dim(1) <= r.x_BMN.dim(2);
  batched_gemm(s, {.c_BMN = r.s_BRR, .a = r.x_BMN, .b = r.x_BMN, .trans_a = !is_wide, .trans_b = is_wide});
  batched_gemm(s, {.c_BMN = r.b_BRR, .a = r.s_BRR, .b = r.s_BRR});
  add_scaled(s, {.z = r.b_BRR, .x = r.b_BRR, .y = r.s_BRR, .a = kC, .b = kB});
  add_scaled(s, {.z = r.next_BMN, .x = r.x_BMN, .a = kA});
  batched_gemm(
      s, {.c_BMN = r.next_BMN, .a = is_wide ? r.b_BRR : r.x_BMN, .b = is_wide ? r.x_BMN : r.b_BRR, .accumulate = true});
  std::swap(r.x_BMN, r.next_BMN);
}

}  // namespace

void add_scaled(Stream& s, const AddScaled& a) {
  const char* who = "add_scaled";
  check_float(who, "x", a.x);
  check_float(who, "z", a.z);
  check_tensor(who, "z", a.z, a.z.dtype, a.x.shape);
  if (!a.y.empty()) check_tensor(who, "y", a.y, a.z.dtype, a.x.shape);
  if (!a.sum_squares_B.empty()) check_tensor(who, "sum_squares", a.sum_squares_B, DType::f64, {a.x.dim(0)});
  OpScope scope(s, who, cost(a));
  if (a.x.empty()) return;
  run_on_device(s, cpu::add_scaled, cuda::add_scaled, a);
}

Cost cost(const AddScaled& a) {
  const int64_t bytes = a.x.num_bytes() + a.z.num_bytes() + (a.y.empty() ? 0 : a.y.num_bytes());
  return {static_cast<double>((a.y.empty() ? 1 : 3) * a.x.numel()), static_cast<double>(bytes)};
}

int64_t NewtonSchulz::scratch_bytes(const Shape& BMN, DType compute) {
  Scratch counted(Tensor{});
  Workspace(counted, BMN, compute);
  return counted.used();
}

void newton_schulz(Stream& s, const NewtonSchulz& a) {
  const char* who = "newton_schulz";
  const Shape& shape = a.u_BMN.shape;
  MOEBIUS_CHECK(usage, shape.rank() == 3, "{}: u must be a batch of matrices; got {}", who, to_string(a.u_BMN));
  check_tensor(who, "u", a.u_BMN, DType::f32, shape);
  check_tensor(who, "o", a.o_BMN, DType::f32, shape);
  MOEBIUS_CHECK(usage, a.compute == DType::f32 || a.compute == DType::bf16, "{}: compute must be f32 or bf16; got {}",
                who, name_of(a.compute));
  check_scratch(who, a.scratch, NewtonSchulz::scratch_bytes(shape, a.compute));
  if (a.u_BMN.empty()) return;
  Scratch scratch(a.scratch);
  Workspace work(scratch, shape, a.compute);
  measure(s, a.u_BMN, work);
  add_scaled(s, {.z = work.x_BMN, .x = a.u_BMN, .sum_squares_B = work.sum_B});
  for (int i = 0; i < NewtonSchulz::kSteps; ++i) iterate(s, work);
  add_scaled(s, {.z = a.o_BMN, .x = work.x_BMN, .a = a.factor});
}

}  // namespace moebius
