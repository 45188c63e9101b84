#include "parallel/optim/muon.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "ops/elementwise/elementwise.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "parallel/optim/adamw.h"
#include "parallel/optim/matrix_batches.h"

namespace moebius {
namespace {

// The size of an element of AdamW's updates (arXiv 2502.16982, section 2.2).
constexpr double kUpdateSize = 0.2;

bool is_other(const ParamSpec& spec) { return !is_of_matrices(spec); }

// The ranks that hold the shards of a matrix.
Axis shard_axis(const Param& p) { return p.spec.kind == ParamKind::experts ? Axis::etp : Axis::tp; }

// 1, or NaN where the factor of the gradients is not finite: then sgd() changes nothing.
Tensor valid(Stream& s, StepStack& stack, const Tensor& scale_1) {
  const Tensor valid_1 = stack.alloc({1}, DType::f32), norm_1 = stack.alloc({1}, DType::f32),
               sum_1 = stack.alloc({1}, DType::f64), partial_P = stack.alloc({1}, DType::f64);
  fill_zero(s, sum_1);
  sum_squares(s, {.sum_1 = sum_1, .partial_P = partial_P, .x = std::span(&scale_1, 1)});
  clip_scale(s, {.norm_1 = norm_1, .scale_1 = valid_1, .sum_squares_1 = sum_1});
  return valid_1;
}

// Returns n elements, which begin at the same place as `first`.
Tensor extended(Tensor first, int64_t n) {
  first.shape = {n};
  return first;
}

// Returns whether two parts are of one parameter and shape, and the second one follows the first in memory.
bool follows(const TrainedParams::OfPart& first, const TrainedParams::OfPart& second) {
  const ParamPart &a = *first.part, &b = *second.part;
  return first.param == second.param && a.shape == b.shape && a.offset + a.local_shape().numel() == b.offset;
}

// A part as a whole matrix, and back. Shards are equal, and in the order of the ranks.
class WholeMatrix {
 public:
  // buffer_n: memory for a matrix.
  WholeMatrix(const Mesh& mesh, const TrainedParams::OfPart& of, const Tensor& buffer_n)
      : group_(mesh.group(shard_axis(*of.param))), shape_(of.part->shape), shard_(of.part->shard), buffer_n_(buffer_n) {
    if (shard_.dim < 0) shard_ = {.dim = 0, .begin = 0, .count = shape_[0]};
    MOEBIUS_ASSERT(shard_.count * num_shards() == shape_[shard_.dim]);
  }

  // Returns the matrix, which is in whole_n or in the memory of the gradient.
  Tensor gather(Stream& s, const Tensor& shard, const Tensor& whole_n) const {
    if (num_shards() == 1) return shard;
    group_.all_gather(s, buffer_n_, shard.view({shard.numel()}));
    if (shard_.dim == 0) return buffer_n_.view(shape_);
    const Tensor whole = whole_n.view(shape_);
    for (int64_t r = 0; r < num_shards(); ++r) {
      const Tensor from = buffer_n_.rows(r * shard.numel(), (r + 1) * shard.numel()).view(shard.shape);
      copy_columns(s, {.to_TA = whole, .from_TB = from, .to_first = r * shard_.count, .count = shard_.count});
    }
    return whole;
  }

  // Returns this rank's shard of a whole matrix, flat.
  Tensor own(Stream& s, const Tensor& whole) const {
    if (shard_.dim == 0) {
      const Tensor rows = whole.rows(shard_.begin, shard_.begin + shard_.count);
      return rows.view({rows.numel()});
    }
    const Tensor columns = buffer_n_.rows(0, shape_[0] * shard_.count).view({shape_[0], shard_.count});
    copy_columns(s, {.to_TA = columns, .from_TB = whole, .from_first = shard_.begin, .count = shard_.count});
    return columns.view({columns.numel()});
  }

 private:
  int64_t num_shards() const { return shard_.count == shape_[shard_.dim] ? 1 : group_.size(); }

  Group& group_;
  Shape shape_;
  Shard shard_;
  Tensor buffer_n_;
};

}  // namespace

MuonOptimizer::MuonOptimizer(const OptimizerContext& context)
    : spec_(context.spec),
      table_(context.params),
      mesh_(*context.mesh),
      sharding_(*context.sharding),
      matrices_(context, std::span(kStatePrefixes).first(1), is_of_matrices),
      others_(context, std::span(kStatePrefixes).subspan(1), is_other) {
  for (const Param& p : table_.all()) scratch_.at_least(update_scratch(spec_, p.spec));
}

void MuonOptimizer::update(Stream& s, StepStack& stack, const OptimizerStepArgs& args) {
  update_by_adamw(s, spec_, others_.tensors(), args);
  if (matrices_.empty()) return;
  StackScope scope(stack);
  const Workspace work{.valid_1 = valid(s, stack, args.scale_1),
                       .whole_n = stack.alloc({scratch_.matrix}, DType::f32),
                       .arrived_n = stack.alloc({scratch_.matrix}, DType::f32),
                       .newton_schulz = stack.alloc({scratch_.newton_schulz_bytes}, DType::u8)};
  const std::vector<TrainedParams::OfPart> parts = matrices_.parts();
  const std::vector<Batch> batches = batches_of(parts);
  for (const Batch batch : batches) add_momentum(s, batch, work, args);
  sharding_.gather_gradients(s, is_of_matrices);
  for (const Batch batch : batches) orthogonalise(s, batch, work, args);
}

std::vector<MuonOptimizer::Batch> MuonOptimizer::batches_of(const std::vector<TrainedParams::OfPart>& parts) {
  std::vector<Batch> all;
  const Batch rest(parts);
  for (size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
    for (end = begin + 1; end < parts.size() && follows(parts[end - 1], parts[end]);) ++end;
    end = begin +
          static_cast<size_t>(matrices_at_once(parts[begin].part->shape.numel(), static_cast<int64_t>(end - begin)));
    all.push_back(rest.subspan(begin, end - begin));
  }
  return all;
}

// Two steps of SGD give u, of a weight that begins at 0: the first adds momentum m to it, the second g.
void MuonOptimizer::add_momentum(Stream& s, Batch batch, const Workspace& work, const OptimizerStepArgs& args) const {
  const UpdatedTensor& first = batch.front().tensor;
  // A part has draws of its own if m is rounded stochastically. Otherwise all parts are one tensor.
  std::vector<UpdatedTensor> with_m;
  int64_t n = 0;
  for (const TrainedParams::OfPart& part : batch) {
    const Tensor u_n = work.whole_n.rows(n, n + part.owned.count);
    with_m.push_back({.param_n = u_n,
                      .master_n = u_n,
                      .m_n = part.tensor.m_n,
                      .grad_n = part.tensor.grad_n,
                      .draws = part.tensor.draws,
                      .m_scale_b = part.tensor.m_scale_b});
    n += part.owned.count;
  }
  const Tensor u_n = work.whole_n.rows(0, n), grad_n = extended(first.grad_n, n);
  if (first.m_n.dtype == DType::f32)
    with_m = {{.param_n = u_n, .master_n = u_n, .m_n = extended(first.m_n, n), .grad_n = grad_n}};
  const UpdatedTensor without{.param_n = u_n, .master_n = u_n, .grad_n = grad_n};
  const auto momentum = static_cast<float>(spec_.momentum);
  fill_zero(s, u_n);
  sgd(s, {.tensors = with_m,
          .scale_1 = args.scale_1,
          .lr_and_step_2 = args.lr_and_step_2,
          .lr = -momentum,
          .momentum = momentum,
          .step = args.train_step,
          .reads_lr = false});
  sgd(s, {.tensors = std::span(&without, 1), .scale_1 = args.scale_1, .lr = -1});
  copy(s, grad_n, u_n);
}

void MuonOptimizer::orthogonalise(Stream& s, Batch batch, const Workspace& work, const OptimizerStepArgs& args) const {
  const Shape& shape = batch.front().part->shape;
  const int64_t count = std::ssize(batch), n = shape.numel();
  const Shape all{count, shape[0], shape[1]};
  const Tensor o_BMN = work.whole_n.rows(0, count * n).view(all);
  std::vector<WholeMatrix> matrices;
  Tensor u_BMN;
  for (int64_t i = 0; i < count; ++i) {
    const TrainedParams::OfPart& part = batch[static_cast<size_t>(i)];
    matrices.emplace_back(mesh_, part, work.arrived_n.rows(i * n, (i + 1) * n));
    const Tensor u_MN =
        matrices.back().gather(s, part_of(part.param->dw, *part.part), work.whole_n.rows(i * n, (i + 1) * n));
    if (i == 0) u_BMN = extended(u_MN, count * n).view(all);
  }
  newton_schulz(
      s, {.o_BMN = o_BMN,
          .u_BMN = u_BMN,
          .scratch = work.newton_schulz,
          .factor = static_cast<float>(kUpdateSize * std::sqrt(static_cast<double>(std::max(shape[0], shape[1])))),
          .compute = batch.front().param->spec.dtype});
  std::vector<UpdatedTensor> tensors;
  for (int64_t i = 0; i < count; ++i) {
    const TrainedParams::OfPart& part = batch[static_cast<size_t>(i)];
    const Tensor o_MN = o_BMN.rows(i, i + 1).view(shape);
    UpdatedTensor& t = tensors.emplace_back(part.tensor);
    t.m_n = t.m_scale_b = {};
    t.grad_n = matrices[static_cast<size_t>(i)].own(s, o_MN).rows(part.owned.begin, part.owned.end());
  }
  sgd(s, {.tensors = tensors,
          .scale_1 = work.valid_1,
          .lr_and_step_2 = args.lr_and_step_2,
          .lr = static_cast<float>(args.lr),
          .step = args.train_step});
}

std::vector<OptimizerState> MuonOptimizer::state() const {
  std::vector<OptimizerState> all = matrices_.state();
  const std::vector<OptimizerState> others = others_.state();
  all.insert(all.end(), others.begin(), others.end());
  std::map<const Param*, size_t> place;
  for (const Param& p : table_.all()) place.emplace(&p, place.size());
  std::stable_sort(all.begin(), all.end(), [&](const OptimizerState& a, const OptimizerState& b) {
    return place.at(a.param) < place.at(b.param);
  });
  return all;
}

}  // namespace moebius
