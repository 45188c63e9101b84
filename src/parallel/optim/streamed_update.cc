#include "parallel/optim/streamed_update.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <utility>

namespace moebius {
namespace {

// A piece is cut at multiples of this, so that it begins with a block of codes and with a whole vector.
constexpr int64_t kCut = 4096;
// Addresses in a slot are those in host memory, modulo this.
constexpr int64_t kAlignBytes = 256;
constexpr int64_t kMinSlot = int64_t{128} << 10, kUnit = int64_t{64} << 10;
// A slot of this size has copies at the rate of the bus, and its first and last copies cost little.
constexpr int64_t kMaxSlot = int64_t{64} << 20;
constexpr int64_t kMinPieces = 8;

// The tensors of an update that may be in host memory. All but the last are changed, or stay as they
// are if the norm of gradients is not finite. So weights are copied both ways, also those that have a master apart.
constexpr std::array kFields{&UpdatedTensor::master_n,  &UpdatedTensor::param_n, &UpdatedTensor::remainder_n,
                             &UpdatedTensor::m_n,       &UpdatedTensor::v_n,     &UpdatedTensor::m_scale_b,
                             &UpdatedTensor::v_scale_b, &UpdatedTensor::grad_n};
constexpr size_t kNumChanged = 7;

}  // namespace

int64_t streamed_slot_bytes(int64_t states_bytes) {
  if (states_bytes == 0) return 0;
  return std::clamp(div_ceil(div_ceil(states_bytes, kMinPieces), kUnit) * kUnit, kMinSlot, kMaxSlot);
}

int64_t streamed_bytes(const OptimizerSpec& spec, DType weights, int64_t count) {
  if (!spec.offload || spec.kind == OptimizerKind::muon) return 0;
  const auto of_block =
      static_cast<int64_t>(kCodeBlock * (static_cast<double>(master_bytes(spec, weights)) + state_bytes(spec)));
  return div_ceil(count * of_block, int64_t{kCodeBlock});
}

bool needs_slots(const OptimizerSpec& spec, int64_t bytes, bool keeps_states, bool sums_apart) {
  return bytes > 0 && (!keeps_states || (spec.offload_grad && sums_apart));
}

std::unique_ptr<StreamedUpdate> StreamedUpdate::make(const OptimizerContext& context, const TrainedParams& params,
                                                     Rule rule) {
  int64_t bytes = 0;
  bool needs_any = false;
  for (const Param& p : context.params.all()) {
    const int64_t each = p.has_grad ? streamed_bytes(context.spec, p.w.dtype, p.owned.count) : 0;
    bytes += each;
    needs_any = needs_any || needs_slots(context.spec, each, p.keeps_states, p.sums_apart());
  }
  if (!needs_any) return nullptr;
  return std::make_unique<StreamedUpdate>(context, params, streamed_slot_bytes(bytes), std::move(rule));
}

StreamedUpdate::StreamedUpdate(const OptimizerContext& context, const TrainedParams& params, int64_t slot_bytes,
                               Rule rule)
    : plan_(context.plan),
      table_(context.params),
      params_(params),
      rule_(std::move(rule)),
      slot_bytes_(slot_bytes),
      slots_(kStreamedSlots) {
  for (size_t i = 0; i < slots_.size(); ++i)
    context.plan.declare(slots_[i], fmt::format("streamed_states{}", i), {slot_bytes}, DType::u8, Life::optimizer);
  context.plan.declare(lr_and_step_2_, "streamed_lr_and_step", {2}, DType::f64, Life::optimizer);
}

bool StreamedUpdate::is_on_host(const Tensor& t) const {
  const char* begin = static_cast<const char*>(plan_.base(Life::host));
  const char* at = static_cast<const char*>(t.data);
  return !t.empty() && at >= begin && at < begin + plan_.bytes(Life::host);
}

// Scales of codes count as a byte, which is more than they have.
int64_t StreamedUpdate::bytes_of_element(const UpdatedTensor& t) const {
  int64_t bytes = 0;
  for (const auto field : kFields) {
    const Tensor& each = t.*field;
    if (field == &UpdatedTensor::param_n && t.param_n.data == t.master_n.data)
      continue;  // weights are their own masters
    if (is_on_host(each)) bytes += each.numel() == t.param_n.numel() ? size_of(each.dtype) : 1;
  }
  return bytes;
}

// Adds a tensor to the last piece, and its rest to new ones.
void StreamedUpdate::add(std::vector<Piece>& pieces, const UpdatedTensor& tensor) const {
  // A copy may begin anywhere in kAlignBytes.
  constexpr int64_t kSlack = 2 * kAlignBytes * static_cast<int64_t>(kFields.size());
  const int64_t n = tensor.param_n.numel(), each = bytes_of_element(tensor);
  for (int64_t begin = 0; begin < n;) {
    if (pieces.empty()) pieces.emplace_back();
    Piece& last = pieces.back();
    const int64_t left = std::max<int64_t>(slot_bytes_ - last.num_bytes - kSlack, 0);
    int64_t count = n - begin;
    if (count * each > left) count = left / each / kCut * kCut;
    if (!last.tensors.empty() && count < n - begin && count * each < slot_bytes_ / kMinPieces) {
      pieces.emplace_back();
      continue;
    }
    last.tensors.push_back(rows_of(tensor, begin, begin + count));
    last.num_bytes += count * each + kSlack;
    begin += count;
  }
}

// Gives the tensors of a piece their places in the slot. What is contiguous in host memory is one copy.
StreamedJob StreamedUpdate::job_of(Piece& piece, int slot) {
  StreamedJob job{.slot = slot};
  char* to = static_cast<char*>(slots_[static_cast<size_t>(slot)].data);
  int64_t used = 0;
  for (size_t f = 0; f < kFields.size(); ++f) {
    std::vector<SideCopies::Copy> copies;
    for (UpdatedTensor& each : piece.tensors) {
      Tensor& t = each.*kFields[f];
      if (!is_on_host(t)) continue;
      char* host = static_cast<char*>(t.data);
      const bool follows = !copies.empty() && static_cast<char*>(copies.back().host) + copies.back().num_bytes == host;
      if (!follows) {
        used = div_ceil(used, kAlignBytes) * kAlignBytes +
               static_cast<int64_t>(reinterpret_cast<uintptr_t>(host) % kAlignBytes);
        copies.push_back({.device = to + used, .host = host, .num_bytes = 0});
      }
      if (each.param_n.data == t.data) each.param_n.data = to + used;  // weights that are their own masters
      t.data = to + used;
      used += t.num_bytes();
      copies.back().num_bytes += t.num_bytes();
    }
    job.in.insert(job.in.end(), copies.begin(), copies.end());
    if (f < kNumChanged) job.out.insert(job.out.end(), copies.begin(), copies.end());
  }
  MOEBIUS_ASSERT(used <= slot_bytes_);
  job.work = [this, tensors = std::move(piece.tensors)](Stream& s) { rule_(s, tensors, args_); };
  return job;
}

// Host memory is known when the plan is bound.
void StreamedUpdate::prepare(const Stream& s) {
  if (work_) return;
  MOEBIUS_ASSERT(!s.capture());
  std::vector<Piece> pieces;
  std::map<const Param*, OfParam> found;
  for (const TrainedParams::OfParam& of : params_.of_params()) {
    OfParam& param = found[of.param];
    for (const UpdatedTensor& tensor : of.tensors) is_here(tensor) ? param.here.push_back(tensor) : add(pieces, tensor);
    if (param.here.size() < of.tensors.size()) param.num_jobs = std::ssize(pieces);
  }
  for (const Param& p : table_.all()) of_params_.push_back(found[&p]);
  for (size_t i = 0; i < pieces.size(); ++i) jobs_.push_back(job_of(pieces[i], static_cast<int>(i % slots_.size())));
  work_ = StreamedWork::make(s, kStreamedSlots, std::ssize(jobs_));
}

void StreamedUpdate::start(Stream& s, const OptimizerStepArgs& args) {
  if (s.device() == DeviceKind::null) return rule_(s, params_.tensors(), args);
  prepare(s);
  args_ = args;
  for (OfParam& param : of_params_) param.is_waited = false;
  work_->begin(s, jobs_);
}

OptimizerStepArgs StreamedUpdate::kept(Stream& s, const OptimizerStepArgs& args) const {
  copy_to_device(s, lr_and_step_2_.data, args.lr_and_step_2.data, lr_and_step_2_.num_bytes());
  return {.scale_1 = args.scale_1, .lr_and_step_2 = lr_and_step_2_};
}

void StreamedUpdate::wait(Stream& s, std::span<const size_t> params) {
  if (!work_) return;
  std::vector<UpdatedTensor> here;
  int64_t num_jobs = 0;
  for (const size_t i : params) {
    OfParam& param = of_params_[i];
    if (std::exchange(param.is_waited, true)) continue;
    here.insert(here.end(), param.here.begin(), param.here.end());
    num_jobs = std::max(num_jobs, param.num_jobs);
  }
  if (!here.empty()) rule_(s, here, args_);
  work_->wait(s, num_jobs);
}

void StreamedUpdate::finish(Stream& s) {
  if (!work_) return;
  std::vector<size_t> all(of_params_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  wait(s, all);
  work_->end(s);
}

}  // namespace moebius
