#include "plan/work_time.h"

#include <algorithm>
#include <cmath>

#include "plan/cost/critical_path.h"
#include "plan/cost/loss_time.h"
#include "plan/cost/megatron_bytes.h"
#include "plan/cost/multiprocessors.h"
#include "plan/cost/row_exchange.h"

namespace moebius {
namespace {

constexpr double kBf16 = 2;

// The bytes that the quantiser moves for a product, over those of the product in bf16. It reads each operand and
// writes it twice, along both of its dims: 2 + 1 + 1 bytes of an element that counts 2, where half of a product's
// bytes are operands. A recipe's own quantiser is among the ops.
constexpr double kQuantizerBytes = 1;

bool is_quantized(const std::string& op, const TimeContext& c) {
  if (products_precision(c.spec, c.assume, c.machine) == PlanPrecision::from_recipe) return false;
  const bool is_assumed = c.assume.precision != PlanPrecision::from_recipe;
  if (op == "expert_wgrad" && !is_assumed && c.spec.precision.weight_gradients == WeightGradientPrecision::compute)
    return false;
  return op == "gemm" || op == "gated_up" || op == "d_gated_down" || kernel_class(op) == KernelClass::experts;
}

// Returns whether the op runs Moebius' portable kernels on a GPU that has others: with run.kernels = "portable", and
// in attention with heads that only they support, or where cuDNN is slower (ops/attention/attention_choice.cc).
bool is_portable(const OpWork& op, const TimeContext& c) {
  if (!c.machine.is_gpu || c.assume.system != PlanSystem::moebius) return false;
  const bool is_attention = op.kind == KernelClass::attention_forward || op.kind == KernelClass::attention_backward;
  if (c.spec.kernels == KernelChoice::portable)
    return is_attention || op.kind == KernelClass::experts || op.name == "gated_up" || op.name == "d_gated_down";
  const ModelSpec& m = c.spec.model;
  if (!is_attention || m.is_latent()) return false;
  if (m.head_dim == 64 || m.head_dim == 128) return false;
  constexpr int64_t kVector = 8, kNarrow = 64, kWidest = 256;
  const bool is_narrow = op.kind == KernelClass::attention_backward && m.head_dim < kNarrow;
  return m.head_dim % kVector != 0 || m.head_dim > kWidest || is_narrow;
}

HeadWidths head_widths(const ModelSpec& m) { return {m.head_dim, m.is_latent() ? m.v_head_dim : m.head_dim}; }

// Returns the factor for masked scores of tiles that attention computes as a whole: above the diagonal and, with
// a window, of keys before it. With cp an op does a part of a layer, whose keys are not known to be in a window.
double masked_tiles(const TimeContext& c, const OpWork& op) {
  if (!c.machine.is_gpu) return 1;
  constexpr double kTile = 128;
  const double seq = static_cast<double>(c.spec.shape.seq * c.spec.mesh.cp);
  const HeadWidths w = head_widths(c.spec.model);
  const int64_t widths = op.kind == KernelClass::attention_backward ? 3 * w.qk + 2 * w.v : w.qk + w.v;
  const int64_t queries = c.spec.shape.tokens() * c.spec.model.num_heads / c.spec.mesh.tp;
  const double keys_of_query = op.cost.flops / (2 * static_cast<double>(widths * queries));
  const bool has_window = c.spec.model.sliding_window > 0 && c.spec.mesh.cp == 1 && keys_of_query < 0.45 * seq;
  return has_window ? 1 + kTile / keys_of_query : 1 + kTile / seq;
}

double rate(const TimeContext& c, const OpWork& op) {
  const Shares& shares = c.machine.of(c.assume.system);
  const auto share = [&](Share s) { return shares[static_cast<size_t>(s)]; };
  if (is_quantized(op.name, c)) {
    const bool is_4_bits = products_precision(c.spec, c.assume, c.machine) == PlanPrecision::nvfp4;
    const double peak = is_4_bits ? c.machine.nvfp4_tflops : c.machine.fp8_tflops;
    return peak * share(Share::low_precision) * 1e12;
  }
  const double peak = c.machine.bf16_tflops * 1e12 * (is_portable(op, c) ? c.machine.portable : 1);
  const HeadWidths widths = head_widths(c.spec.model);
  if (op.kind == KernelClass::experts) return peak * share(Share::experts);
  if (op.kind == KernelClass::attention_forward)
    return peak * share(Share::attention_forward) / masked_tiles(c, op) /
           attention_over_products(c.machine, widths, /*backward=*/false);
  if (op.kind == KernelClass::attention_backward)
    return peak * share(Share::attention_backward) / masked_tiles(c, op) /
           attention_over_products(c.machine, widths, /*backward=*/true);
  return peak * share(Share::products);
}

// Returns the seconds in which a GPU finds the largest logits for QK-clip, after an op of the forward pass of
// attention: a portable kernel recomputes the scores (ops/attention/cuda/attention_max_logit.cu). On a CPU they are
// found in the forward pass itself.
double max_logit_seconds(const TimeContext& c, const OpWork& op) {
  const bool is_own = c.machine.is_gpu && c.assume.system == PlanSystem::moebius;
  const bool clips = c.spec.optimizer && c.spec.optimizer->qk_clip > 0;
  if (!is_own || !clips || op.kind != KernelClass::attention_forward) return 0;
  const HeadWidths widths = head_widths(c.spec.model);
  const double qk = static_cast<double>(widths.qk), v = static_cast<double>(widths.v);
  const Shares& shares = c.machine.of(c.assume.system);
  const double rate =
      c.machine.bf16_tflops * 1e12 * c.machine.portable * shares[static_cast<size_t>(Share::attention_forward)];
  return op.cost.flops * qk / (qk + v) * masked_tiles(c, op) / rate +
         static_cast<double>(op.calls) * c.machine.kernel_us * 1e-6;
}

// Returns the rows that the busiest rank's experts get, over the rows that the dry run computed: it counts every
// planned row, most of which no token fills where all-gather plans for the worst case. Weights are read once by each
// call, however many rows there are.
double expert_rows(const TimeContext& c) {
  const EngineSpec& spec = c.spec;
  const ModelSpec& m = spec.model;
  const int64_t ranks = spec.mesh.ep * spec.mesh.etp;
  const double busiest = c.assume.load.busiest_rank(m.num_experts, spec.mesh.ep);
  if (ranks == 1) return busiest;
  const double T = static_cast<double>(rows_between_projections(spec.shape, spec.mesh));
  const double even = T * static_cast<double>(m.top_k * spec.mesh.etp);
  const double worst = T * static_cast<double>(ranks * std::min(m.top_k, m.num_experts / spec.mesh.ep));
  const double bound = spec.balance.rank_rows_factor;
  const bool is_bound = spec.dispatcher == DispatcherKind::alltoall && bound > 0;
  return busiest * even / (is_bound ? std::min(worst, std::ceil(bound * even)) : worst);
}

// Returns whether the op writes to the memory of other ranks, which the direct and two-level dispatchers do.
bool writes_to_ranks(const std::string& op) {
  for (const char* name : {"push_rows", "push_routes", "return_sums", "return_pairs"})
    if (op == name) return true;
  return false;
}

void add_op(PassTime& time, const TimeContext& c, const OpWork& op, double rows) {
  const double scale = op.kind == KernelClass::experts ? rows : 1;
  const double bytes = scale * (op.cost.bytes - op.cost.weight_bytes) + op.cost.weight_bytes;
  const double flops = scale * op.cost.flops, calls = static_cast<double>(op.calls);
  // The arithmetic and the memory accesses of a kernel overlap, but less so the closer their times are.
  double seconds = std::hypot(flops / rate(c, op), bytes / memory_rate(c)) *
                   idle_multiprocessors(c, op, {.flops = flops / calls, .bytes = bytes / calls});
  // Other blocks of a kernel work beside the longest chain of steps of one.
  seconds = std::hypot(seconds, calls * critical_path(c, op).seconds());
  if (const double loss = loss_seconds(c, op, rate(c, op), memory_rate(c)); loss > 0) seconds = loss;
  const int64_t kernels = op.calls * (c.machine.is_gpu ? op.kernels : 1);
  const double launches = static_cast<double>(kernels) * c.machine.kernel_us * 1e-6;
  time.kernels[static_cast<size_t>(op.kind)] += seconds + launches + max_logit_seconds(c, op);
  time.launches += launches;
  if (op.kind == KernelClass::memory && writes_to_ranks(op.name)) time.writers += seconds;
  const bool quantises = c.assume.precision != PlanPrecision::from_recipe && is_quantized(op.name, c);
  const double quantising = quantises ? kQuantizerBytes * bytes / memory_rate(c) : 0;
  time.kernels[static_cast<size_t>(KernelClass::memory)] += quantising;
  if (op.kind == KernelClass::experts) time.experts += seconds + launches + quantising;
}

void add_memory(PassTime& time, const TimeContext& c, double bytes) {
  time.kernels[static_cast<size_t>(KernelClass::memory)] += bytes / memory_rate(c);
}

// Returns the compute of a pass that `shorter` does not have.
PassTime saved_compute(const PassTime& pass, const PassTime& shorter) {
  PassTime saved;
  for (size_t i = 0; i < saved.kernels.size(); ++i) saved.kernels[i] = pass.kernels[i] - shorter.kernels[i];
  return saved;
}

void add_rows(PassTime& time, const TimeContext& c, const RowsSent& sent) {
  if (sent.wire_bytes == 0) return;
  const auto axis = static_cast<size_t>(expert_axis(c.spec.mesh));
  time.groups[axis] += sent.seconds;
  time.wire_bytes[axis] += sent.wire_bytes;
  time.messages += sent.messages;
}

double seconds_of_rows(const PassTime& time) {
  double seconds = 0;
  for (int i = 0; i < kNumAxes; ++i)
    if (is_expert_axis(static_cast<Axis>(i))) seconds += time.groups[static_cast<size_t>(i)];
  return seconds;
}

// Multiprocessors that send rows: the default of DeepEP, and what Megatron Bridge gives HybridEP.
double sending_multiprocessors(const TimeContext& c) {
  return dispatcher_of(c) == PlanDispatcher::hybridep ? 32 : kSendingMultiprocessors;
}

// Overlaps the exchanges of rows with the pass of another micro-batch. Compute loses the multiprocessors that send
// them, and the memory bandwidth for reading them and for the writes of other ranks.
void merge(PassTime& time, const TimeContext& c) {
  const double sent = seconds_of_rows(time);
  if (sent == 0) return;
  const double compute = time.compute();
  const double passes = static_cast<double>(c.spec.num_micro_batches * c.spec.pipeline.num_virtual);
  time.hidden = merged_passes(c.spec) / passes * std::min(sent, compute);
  const double left =
      rows_sent(c, RowDirection::to_experts).outgoing_bytes + rows_sent(c, RowDirection::back).outgoing_bytes;
  const double moved = 2 * left / memory_rate(c);
  const double more = taken_by_groups(c.machine, sending_multiprocessors(c)) * time.hidden + moved * time.hidden / sent;
  for (double& seconds : time.kernels) seconds *= 1 + more / compute;
}

// With parallel.expert_overlap = "layer", two of the three exchanges of a backward pass overlap with products of the
// experts: x, unless the pre-activations are recomputed from it, and dx (model/moe/dispatched_experts.h).
void overlap_layer(PassTime& backward, const TimeContext& c, const RecomputeSpec& recompute) {
  const double sent = seconds_of_rows(backward);
  const double ways = recompute.covers(&RecomputeSpec::expert_up) ? 1 : 2;
  double& experts = backward.kernels[static_cast<size_t>(KernelClass::experts)];
  const double hidden = std::min(ways / 3 * sent, experts);
  backward.hidden += hidden;
  experts += taken_by_groups(c.machine) * hidden;
}

// With parallel.expert_overlap = "batch_split", rows move in parts that overlap with products of the part before them
// (model/moe/dispatched_experts_parts.cc): a near part, which two ranks do not have, and a far one. The first of two
// products has two thirds of the time of experts. dy, one of three exchanges of backward, overlaps with a third of it.
void overlap_parts(PassTime& forward, PassTime& backward, const TimeContext& c) {
  const int64_t num_ranks = c.spec.mesh.ep * c.spec.mesh.etp;
  if (num_ranks == 1) return;
  const auto share = [&](int64_t n) { return static_cast<double>(n) / static_cast<double>(num_ranks); };
  const double own = share(1), near = share((num_ranks + 1) / 2 - 1), far = 1 - own - near;
  const auto experts = [](PassTime& p) -> double& { return p.kernels[static_cast<size_t>(KernelClass::experts)]; };
  const auto hide = [&](PassTime& pass, double hidden) {
    pass.hidden += hidden;
    experts(pass) += taken_by_groups(c.machine) * hidden;
  };
  const double x = seconds_of_rows(forward) / 2 / (1 - own), dy = seconds_of_rows(backward) / 3 / (1 - own);
  const double up = experts(forward) * 2 / 3, down = experts(forward) / 3, of_dy = experts(backward) / 3;
  const double first = near > 0 ? near : far;
  hide(forward, std::min(first * x, own * up) + std::min(far * x, near * (up + down)) + std::min(near * x, far * up) +
                    std::min(far * x, own * down));
  hide(backward, std::min(first * dy, own * of_dy) + std::min(far * dy, near * of_dy));
}

// Hides exchanges of rows of tp and cp (model/attention/row_blocks.h). Beside them is about half of a backward pass's
// products: those of the weight gradients. beside: seconds of these exchanges.
void hide_in_products(PassTime& time, const TimeContext& c, double beside) {
  if (c.assume.system != PlanSystem::moebius || beside <= 0) return;
  constexpr double kMultiprocessors = 16;  // of NCCL's kernels (comm/gpu/nccl/world.h)
  double& products = time.kernels[static_cast<size_t>(KernelClass::products)];
  const double hidden = std::min(beside, products / 2);
  time.hidden += hidden;
  products += taken_by_groups(c.machine, kMultiprocessors) * hidden;
}

// Overlaps the exchanges of tp with products. Each is in tp pieces, and one of them has no product beside it.
void overlap_tp(PassTime& time, const TimeContext& c) {
  const double pieces = static_cast<double>(c.spec.mesh.tp), sent = time.groups[static_cast<size_t>(Axis::tp)];
  time.hidden += std::min((1 - 1 / pieces) * sent, time.kernels[static_cast<size_t>(KernelClass::products)]);
}

PassTime time_of(const TimeContext& c, const PartWork& part, PassWork PartWork::*pass) {
  const SimplerParts& of = part.simpler;
  if (!of.experts) return pass_time(c, part.*pass);
  PassTime time = pass_time(c, of.experts->*pass);
  time += pass_time(c, of.attention->*pass);
  return time -= pass_time(c, of.neither->*pass);
}

// Adds the work that Megatron recomputes in the backward pass: the experts' activation, or all of an MoE layer.
// num_moe: MoE layers of the part; its ops are summed over them.
void add_recompute(PartTime& t, const TimeContext& c, const PartWork& part, int64_t num_moe) {
  const ModelSpec& m = c.spec.model;
  const double rows = static_cast<double>(num_moe * rows_between_projections(c.spec.shape, c.spec.mesh) * m.top_k);
  if (c.assume.recompute == PlanRecompute::activation) {
    add_memory(t.backward, c, kBf16 * 3 * rows * static_cast<double>(m.moe_intermediate_size));
    add_memory(t.backward, c, static_cast<double>(num_moe) * biased_bytes(c).activation);
  }
  if (c.assume.recompute != PlanRecompute::moe) return;
  const PartWork& with_experts = part.simpler.experts ? *part.simpler.experts : part;
  // Modules of multi-token prediction run with the loss.
  for (const PassWork* pass : {&with_experts.forward, &with_experts.loss})
    for (const OpWork& op : pass->ops)
      if (op.kind == KernelClass::experts) add_op(t.backward, c, op, expert_rows(c));
  add_memory(t.backward, c, static_cast<double>(num_moe) * (permuted_bytes(c) + biased_bytes(c).forward));
  for (int64_t i = 0; i < num_moe; ++i) add_rows(t.backward, c, forward_rows_sent(c));
}

// Moebius posts the receive of a pass before the preceding pass runs (parallel/pipeline/schedule.h). NCCL's kernel for
// the receive occupies its multiprocessors until the message has arrived, so all passes of a pipeline overlap with one.
void slow_beside_receives(PassTime& time, const TimeContext& c) {
  if (c.assume.system != PlanSystem::moebius || c.spec.mesh.pp == 1 || !c.spec.overlap) return;
  for (double& seconds : time.kernels) seconds *= 1 + taken_by_groups(c.machine);
}

// A kernel that writes rows to other ranks reads or sums some while others are on the links. Its time is
// among the kernels', so the exchange shows what is longer than that. sent: seconds of the written rows on the links.
void overlap_writes(PassTime& time, const TimeContext& c, double sent) {
  if (sent <= 0) return;
  const double shown = std::hypot(sent, time.writers) - time.writers;
  time.groups[static_cast<size_t>(expert_axis(c.spec.mesh))] -= sent - shown;
}

double host_share(const TimeContext& c) {
  PlanGraphs graphs = c.assume.graphs;
  if (graphs == PlanGraphs::from_recipe)
    graphs = c.assume.system == PlanSystem::moebius && c.spec.graph ? PlanGraphs::full : PlanGraphs::none;
  if (graphs == PlanGraphs::full) return 0;
  return graphs == PlanGraphs::partial ? 0.5 : 1;
}

}  // namespace

double attention_over_products(const PlanMachine& m, const HeadWidths& widths, bool backward) {
  if (m.exponentials_t_s <= 0 || m.f32_tflops <= 0) return 1;
  const double qk = static_cast<double>(widths.qk), v = static_cast<double>(widths.v);
  const double products = 2 * (backward ? 3 * qk + 2 * v : qk + v) / m.bf16_tflops;
  return 1 + (1 / m.exponentials_t_s + (backward ? kScalarOperations / m.f32_tflops : 0)) / products;
}

double taken_by_groups(const PlanMachine& m, double sending) {
  return m.multiprocessors > 0 ? kTakenOfShare * sending / m.multiprocessors : 0;
}

double merged_passes(const EngineSpec& spec) {
  const int64_t P = spec.mesh.pp, V = spec.pipeline.num_virtual;
  const int64_t alone = V == 1 ? P : 2 * (P - 1) + (V - 1) * P + 1;
  return static_cast<double>(std::max<int64_t>(0, V * spec.num_micro_batches - alone));
}

int64_t RankSpan::local(const PlanMachine& m) const {
  const auto domain = static_cast<int64_t>(m.domain_ranks);
  return std::clamp<int64_t>(domain / stride, 1, size);
}

namespace {

RankSpan positions_of(const MeshShape& m, Axis axis) {
  switch (axis) {
    case Axis::tp:
      return {m.tp, 1};
    case Axis::cp:
      return {m.cp, m.tp};
    case Axis::cp_inner:
      return {m.cp_inner, m.tp};
    case Axis::cp_outer:
      return {m.cp_outer(), m.tp * m.cp_inner};
    case Axis::dp:
      return {m.dp, m.tp * m.cp};
    case Axis::dp_cp:
      return {m.dp * m.cp, m.tp};
    case Axis::tp_cp:
      return {m.tp * m.cp, 1};
    case Axis::tp_cp_dp:
      return {m.tp * m.cp * m.dp, 1};
    case Axis::etp:
      return {m.etp, 1};
    case Axis::ep:
      return {m.ep, m.etp};
    case Axis::etp_ep:
      return {m.etp * m.ep, 1};
    case Axis::edp:
      return {m.edp, m.etp * m.ep};
    case Axis::etp_edp:  // blocks of etp ranks at a stride of etp * ep: on average one rank in ep
      return {m.etp * m.edp, m.ep};
    case Axis::pp:  // two neighbours
    case Axis::pp_back:
    case Axis::tp_pp:  // nothing of a step
    case Axis::etp_ep_pp:
      return {std::min<int64_t>(2, m.pp), m.tp * m.cp * m.dp};
    case Axis::world:
      return {m.world(), 1};
  }
  MOEBIUS_FAIL(internal, "span_of: an axis that is not known");
}

}  // namespace

RankSpan span_of(const MeshShape& m, Axis axis) {
  RankSpan span = positions_of(m, axis);
  span.node = static_cast<int>(ranks_on_node(m, axis));
  return span;
}

RankSpan span_of_gradients(const EngineSpec& spec, Axis axis) {
  RankSpan span = span_of(spec.mesh, axis);
  if (spec.optimizer && spec.optimizer->grad == GradFormat::bf16) span.sums = DType::bf16;
  return span;
}

double lost_beside(const TimeContext& c, double hidden, double all, double memory_s) {
  return all > 0 ? hidden * (taken_by_groups(c.machine) + memory_s / all) : 0;
}

double PassTime::compute() const {
  double sum = 0;
  for (const double seconds : kernels) sum += seconds;
  return sum;
}

double PassTime::exposed() const {
  double sum = 0 - hidden;
  for (const double seconds : groups) sum += seconds;
  return sum;
}

PassTime& PassTime::add(const PassTime& o, double times) {
  for (size_t i = 0; i < kernels.size(); ++i) kernels[i] += times * o.kernels[i];
  host += times * o.host;
  hidden += times * o.hidden;
  writers += times * o.writers;
  launches += times * o.launches;
  experts += times * o.experts;
  messages += times * o.messages;
  for (size_t i = 0; i < groups.size(); ++i) groups[i] += times * o.groups[i];
  for (size_t i = 0; i < wire_bytes.size(); ++i) wire_bytes[i] += times * o.wire_bytes[i];
  return *this;
}

PassTime pass_time(const TimeContext& c, const PassWork& work) {
  PassTime time;
  double beside = 0;
  const double rows = expert_rows(c);
  for (const OpWork& op : work.ops) add_op(time, c, op, rows);
  for (const SentWork& sent : work.sent) {
    if (is_expert_axis(sent.axis) && !is_own(c)) continue;
    const RankSpan span = span_of_messages(c, sent);
    const double n = static_cast<double>(sent.calls);
    const auto axis = static_cast<size_t>(sent.axis);
    time.groups[axis] += n * group_seconds(c, span, sent.call, sent.wire_bytes / n);
    if (sent.overlaps) beside += n * group_seconds(c, span, sent.call, sent.wire_bytes / n);
    time.wire_bytes[axis] += sent.wire_bytes;
    time.messages += n * group_messages(c, span, sent.call);
  }
  hide_in_products(time, c, beside);
  return time;
}

PartTime part_time(const TimeContext& c, const PartWork& part, bool is_moe, bool is_layer) {
  PartTime t{.forward = time_of(c, part, &PartWork::forward),
             .loss = time_of(c, part, &PartWork::loss),
             .backward = time_of(c, part, &PartWork::backward),
             .backward_weight = time_of(c, part, &PartWork::backward_weight)};
  if (part.leave.calls > 0) add_op(t.leave, c, part.leave, 1);
  if (c.assume.system == PlanSystem::moebius) {
    t.copies = time_of(c, part, &PartWork::copies);
    t.stored_first = saved_compute(t.backward, time_of(c, part, &PartWork::first_backward));
  }
  const int64_t num_moe = !is_moe ? 0 : is_layer ? 1 : c.spec.shape.num_mtp;  // the part has all modules
  for (int64_t i = 0; i < num_moe; ++i) {
    add_rows(t.forward, c, forward_rows_sent(c));
    add_rows(t.backward, c, backward_rows_sent(c));
  }
  if (num_moe > 0 && writes_to_windows(c)) {
    overlap_writes(t.forward, c, static_cast<double>(num_moe) * forward_rows_sent(c).seconds);
    overlap_writes(t.backward, c, static_cast<double>(num_moe) * backward_rows_sent(c).seconds);
  }
  if (is_moe && c.assume.system == PlanSystem::megatron) {
    const BiasedBytes biased = biased_bytes(c);
    add_memory(t.forward, c, static_cast<double>(num_moe) * (permuted_bytes(c) + biased.forward));
    add_memory(t.backward, c, static_cast<double>(num_moe) * (2 * permuted_bytes(c) + biased.backward));
    add_recompute(t, c, part, num_moe);
  }
  if (c.assume.system == PlanSystem::megatron) add_unfused(t, c, part, is_layer);
  // Without experts the host waits for nothing, and its launches are ahead of the device.
  const auto num_layers = static_cast<double>(c.spec.model.num_experts == 0 ? 0 : is_layer ? 1 : num_moe);
  t.forward.host = num_layers * host_share(c) * c.machine.layer_us * 1e-6;
  t.backward.host = 2 * t.forward.host;
  // If Megatron recomputes a whole layer, it sends the rows again.
  if (part.recompute.layer && c.assume.system == PlanSystem::megatron) {
    for (int64_t i = 0; i < num_moe; ++i) add_rows(t.backward, c, forward_rows_sent(c));
    t.backward.host += t.forward.host;
  }
  const bool is_megatron = is_moe && c.assume.system == PlanSystem::megatron;
  if (is_megatron) add_expert_launches(t, c, num_moe, part.recompute.layer || c.assume.recompute == PlanRecompute::moe);
  // A backward_input by itself has no weight gradients to overlap with.
  const ExpertOverlap own = is_megatron || !is_moe ? ExpertOverlap::none : c.spec.expert_overlap;
  if (own != ExpertOverlap::none && !part.splits) overlap_layer(t.backward, c, part.recompute);
  if (own == ExpertOverlap::batch_split) overlap_parts(t.forward, t.backward, c);
  for (PassTime* pass : {&t.forward, &t.loss, &t.backward}) slow_beside_receives(*pass, c);
  if (is_moe && c.assume.merged_overlap)
    for (PassTime* pass : {&t.forward, &t.backward}) merge(*pass, c);
  if (c.assume.tp_overlap && is_layer)
    for (PassTime* pass : {&t.forward, &t.backward}) overlap_tp(*pass, c);
  if (is_megatron) add_layer_launches(t, c, num_moe, host_share(c));
  return t;
}

double units_of_token(const ModelSpec& m, double units) {
  if (units <= 1) return 0;
  const double K = static_cast<double>(m.top_k), away = (units - 1) / units;
  if (m.n_group <= 1) return away * units * (1 - std::pow(1 - 1 / units, K));
  const double groups = static_cast<double>(m.n_group), kept = static_cast<double>(m.topk_group);
  const double of_group = units / groups;  // units that share the experts of a group
  if (of_group >= 1) return away * kept * of_group * (1 - std::pow(1 - 1 / of_group, K / kept));
  // A unit has several groups: the probability that none of them is chosen.
  double none = 1;
  for (double i = 0; i < std::round(groups / units); ++i) none *= std::max(0.0, (groups - kept - i) / (groups - i));
  return away * units * (1 - none);
}

}  // namespace moebius
