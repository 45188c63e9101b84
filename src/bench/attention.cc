#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "bench/attention_check.h"
#include "bench/timing.h"
#include "device/gpu_limits.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_scratch.h"
#include "ops/attention/portable_attention_config.h"

namespace moebius {
namespace {

constexpr int64_t kMaxBenchHeadDim = 256;  // the maximum on a GPU

// Returns, from the cost of causal sequences, the cost of the keys that the mask leaves.
Cost masked_cost(Cost cost, const BenchMask& mask, int64_t S) {
  const auto pairs = [](int64_t rows, int64_t window) {
    const double n = static_cast<double>(rows), w = static_cast<double>(window);
    return window == 0 || window >= rows ? n * (n + 1) / 2 : w * (w + 1) / 2 + (n - w) * w;
  };
  const int64_t document = S / mask.documents;
  cost.flops *= static_cast<double>(mask.documents) * pairs(document, mask.window) / pairs(S, mask.window);
  return cost;
}

// An op, and the report to which its lines are added.
template <class Op>
struct TimedAttention {
  BenchReport& report;
  BenchTensors& tensors;
  const BenchMask& mask;
  const char* name;
  void (*run)(Stream&, const Op&);
};

// Returns whether our own kernels for these tensors are the portable ones.
template <class Op>
bool is_portable(const Stream& s, const Op& op) {
  return s.device() == DeviceKind::cuda && !(uses_hopper_kernels(s) && cuda::sm90_takes(op));
}

// Returns the configs of the portable kernels that run the op; empty if it runs on others.
template <class Op>
std::string text_of_kernel(const Stream& s, const Op& op, bool is_cudnn) {
  if (is_cudnn || !is_portable(s, op)) return "";
  constexpr bool kIsBackward = std::is_same_v<Op, AttentionBwd>;
  const int64_t v_width = [&] {
    if constexpr (kIsBackward)
      return op.v_TGd.dim(2);
    else
      return op.v_UGd.dim(2);
  }();
  return portable_attention_text(kIsBackward, std::max(op.q_THd.dim(2), v_width), gpu_limits(s));
}

template <class Op>
void add_line(BenchDevice& device, const TimedAttention<Op>& timed, Op op, BenchLine line) {
  Stream& s = device.stream();
  const Tensor scratch = timed.tensors.bytes(Op::scratch_bytes(op, s));
  op.scratch = scratch;
  line.cost = masked_cost(cost(op), timed.mask, op.q_THd.dim(0) / op.batch);
  device.time(line, [&] { timed.run(s, op); });
  check_attention(s, line, op, timed.mask);
  timed.report.lines.push_back(std::move(line));
}

// Adds a line for the kernels that a run uses; two lines if there is a choice.
template <class Op>
void add_lines(BenchDevice& device, const TimedAttention<Op>& timed, Op op, bool all_portable) {
  if (!device.is_gpu() || all_portable || !may_use_cudnn(gpu_kernels(device.stream()), op))
    return add_line(device, timed, op,
                    {.name = timed.name, .kernel = text_of_kernel(device.stream(), op, /*is_cudnn=*/false)});
  const bool is_cudnn = uses_cudnn(gpu_kernels(device.stream()), op);
  for (const auto& [kernels, name] : {std::pair(AttentionKernels::own, "own"), {AttentionKernels::cudnn, "cudnn"}}) {
    op.kernels = kernels;
    const bool is_chosen = is_cudnn == (kernels == AttentionKernels::cudnn);
    const std::string text = text_of_kernel(device.stream(), op, kernels == AttentionKernels::cudnn);
    add_line(device, timed, op,
             {.name = fmt::format("{} {}", timed.name, name),
              .kernel = fmt::format("{}{}{}", is_chosen ? "the kernels that a run takes" : "not what a run takes",
                                    text.empty() ? "" : ": ", text)});
  }
}

// Adds a line for each path of the Hopper kernels that can compute the backward pass, and for the order of sums in runs
// of several ranks if that is another one.
void add_path_lines(BenchDevice& device, const TimedAttention<AttentionBwd>& timed, AttentionBwd op) {
  using enum AttentionBwdPath;
  const Stream& s = device.stream();
  const DsSizes z = cuda::ds_sizes(op);
  const bool is_cudnn = cudnn_is_chosen(op);
  op.kernels = AttentionKernels::own;
  for (const auto& [path, name] :
       {std::pair(one_kernel, "one_kernel"), {kept_ds, "kept_ds"}, {recomputed, "recomputed"}}) {
    if (!can_take(z, path)) continue;
    op.path = path;
    const bool is_chosen = !is_cudnn && bwd_path(z) == path;
    add_line(device, timed, op,
             {.name = fmt::format("{} {}", timed.name, name),
              .kernel = is_chosen ? "the path that a run takes" : "not the path that a run takes"});
    if (path != one_kernel || alternating_set(z, gpu_limits(s).num_multiprocessors) == 0) continue;
    AttentionBwd of_several = op;
    of_several.owns_gpu = false;
    add_line(device, timed, of_several,
             {.name = fmt::format("{} {}, several ranks", timed.name, name), .kernel = "the order of several ranks"});
  }
}

void check_has_paths(const Stream& s, const AttentionBwd& op) {
  const bool has_paths = s.device() == DeviceKind::cuda && uses_hopper_kernels(s) && cuda::sm90_takes(op);
  MOEBIUS_CHECK(
      usage, has_paths,
      "--paths: expected a Hopper GPU, its own kernels, and heads of 64, 96, 128 or 256, or of 192 with values of 128; "
      "got q {} and v {} on {}; leave it out",
      to_string(op.q_THd), to_string(op.v_TGd), s.device() == DeviceKind::cpu ? "a CPU" : "a GPU");
}

BenchShape shape_of(const BenchSpec& spec) {
  BenchShape shape = bench_shape(spec.shape, spec.scale);
  MOEBIUS_CHECK(usage, spec.sequences >= 0 && spec.length >= 0,
                "--sequences, --length: expected at least 0; got {} and {}; 0 means those of --shape", spec.sequences,
                spec.length);
  if (spec.sequences > 0) shape.batch = spec.sequences;
  if (spec.length > 0) shape.seq = spec.length;
  return shape;
}

// Returns for each row where its document begins within its sequence.
std::vector<int32_t> document_starts(const BenchShape& shape, int64_t documents) {
  const int64_t document = shape.seq / documents;
  std::vector<int32_t> starts(shape.T());
  for (int64_t t = 0; t < shape.T(); ++t) starts[t] = static_cast<int32_t>(t % shape.seq / document * document);
  return starts;
}

}  // namespace

BenchReport bench_attention(const BenchSpec& spec) {
  BenchShape shape = shape_of(spec);
  const BenchMask& mask = spec.mask;
  MOEBIUS_CHECK(usage, spec.head_dim >= 0 && spec.head_dim <= kMaxBenchHeadDim,
                "--head-dim: expected 0 to {}; got {}; 0 takes the widths of the shape", kMaxBenchHeadDim,
                spec.head_dim);
  if (spec.head_dim > 0) shape.head = shape.v_head = spec.head_dim;
  MOEBIUS_CHECK(usage, mask.window >= 0,
                "--window: expected at least 0; got {}; 0 lets a query attend to all keys before it", mask.window);
  MOEBIUS_CHECK(
      usage, mask.documents >= 1 && shape.seq % mask.documents == 0,
      "--documents: expected a divisor of the {} tokens of a sequence; got {}; 1 means one document in each sequence",
      shape.seq, mask.documents);
  BenchDevice device(spec);
  BenchTensors tensors(device.stream());
  const int64_t T = shape.T(), H = shape.H, G = shape.G, d = shape.head, v_d = shape.v_head;
  const DType dtype = DType::bf16;
  AttentionFwd fwd{.o_THd = tensors.zeros({T, H, v_d}, dtype),
                   .lse_TH = tensors.zeros({T, H}, DType::f32),
                   .q_THd = tensors.normal({T, H, d}, dtype, 1.0f),
                   .k_UGd = tensors.normal({T, G, d}, dtype, 1.0f),
                   .v_UGd = tensors.normal({T, G, v_d}, dtype, 1.0f),
                   .batch = shape.batch,
                   .window = mask.window,
                   .scale = 1.0f / std::sqrt(static_cast<float>(d))};
  if (mask.documents > 1) fwd.doc_start_T = tensors.ints({T}, document_starts(shape, mask.documents));
  AttentionBwd bwd{.dq_THd = tensors.zeros({T, H, d}, dtype),
                   .dk_TGd = tensors.zeros({T, G, d}, dtype),
                   .dv_TGd = tensors.zeros({T, G, v_d}, dtype),
                   .do_THd = tensors.normal({T, H, v_d}, dtype, 1.0f),
                   .o_THd = fwd.o_THd,
                   .lse_TH = fwd.lse_TH,
                   .q_THd = fwd.q_THd,
                   .k_TGd = fwd.k_UGd,
                   .v_TGd = fwd.v_UGd,
                   .doc_start_T = fwd.doc_start_T,
                   .batch = shape.batch,
                   .window = mask.window,
                   .scale = fwd.scale,
                   .owns_gpu = true};  // as in a run of one rank
  if (spec.paths) check_has_paths(device.stream(), bwd);
  BenchReport report{.ceilings = device.measure_ceilings(spec.scale)};
  const bool all_portable = spec.kernels == KernelChoice::portable;
  add_lines<AttentionFwd>(device, {report, tensors, mask, "attention_fwd", attention_fwd}, fwd, all_portable);
  add_lines<AttentionBwd>(device, {report, tensors, mask, "attention_bwd", attention_bwd}, bwd, all_portable);
  if (spec.paths) add_path_lines(device, {report, tensors, mask, "attention_bwd", attention_bwd}, bwd);
  for (BenchLine& line : report.lines) line.roofline_ms = roofline_ms({line.cost}, report.ceilings);
  return report;
}

}  // namespace moebius
