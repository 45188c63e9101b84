#include "model/moe/direct_window.h"

#include <algorithm>

#include "model/moe/dispatcher.h"

namespace moebius {
namespace {

constexpr int64_t kAlignBytes = 256;

}  // namespace

PeerReach peer_reach(Stream& s, const Mesh& mesh, const std::function<int64_t(DispatcherKind)>& bytes_of) {
  Group& world = mesh.group(Axis::world);
  const auto why_not = [&](Group& group, DispatcherKind kind) {
    return why_no_peer_access(s, group, world, bytes_of ? bytes_of(kind) : 0);
  };
  const std::string apart = why_not(group_of_experts(mesh), DispatcherKind::direct);
  if (!apart.empty()) {
    const MeshShape& shape = mesh.shape();
    return {.why = apart,
            .in_nodes = has_nodes(shape.ep, shape.etp, shape.ranks_per_node) &&
                        why_not(mesh.node_of_experts(), DispatcherKind::two_level).empty()};
  }
  return {.all = true,
          .why = fmt::format("the {} ranks that share experts are on one machine and can access each other's memory",
                             group_of_experts(mesh).size())};
}

DirectWindow::DirectWindow(MemoryPlan& plan, const Mesh& mesh, const DirectSizes& sizes)
    : plan_(plan),
      ranks_(sizes.two_level ? mesh.node_of_experts() : group_of_experts(mesh)),
      shares_gpus_(group_of_experts(mesh).stages_gpu_memory()),
      num_bytes_(PeerWindow::control_bytes(ranks_.size())) {
  const MeshShape& shape = mesh.shape();
  const int64_t T = sizes.max_tokens, K = sizes.top_k, D = sizes.width, W = shape.etp * shape.ep;
  const int64_t L = std::min(K, sizes.num_experts / shape.ep);
  const int64_t ep = ranks_.size() / shape.etp, nodes = W / ranks_.size();
  const int64_t N = W * T, B = nodes * T * std::min(K, ep) * shape.etp;
  counts_ = take({W, ep}, DType::i32);
  routes_ = take({N, 2 * L}, DType::i32);
  tokens_ = take({N, D}, sizes.dtype);
  back_ = take({B, D}, sizes.dtype);
  grads_ = take({sizes.training ? N : 0, D}, sizes.dtype);
  back_weights_ = take({sizes.training ? B : 0, L}, DType::f32);
  plan.share_comm();
  plan.declare(window_, "dispatch_window", {num_bytes_}, DType::u8, Life::comm);
}

DirectWindow::Array DirectWindow::take(Shape shape, DType dtype) {
  const Array array{.offset = num_bytes_, .shape = shape, .dtype = dtype};
  num_bytes_ += div_ceil(shape.numel() * size_of(dtype), kAlignBytes) * kAlignBytes;
  return array;
}

Tensor DirectWindow::here(const Array& array) const {
  auto* begin = static_cast<std::byte*>(window_.data);
  return {.data = begin ? begin + array.offset : nullptr,
          .shape = array.shape,
          .dtype = array.dtype,
          .device = window_.device};
}

void DirectWindow::connect(Stream& s) {
  if (!peers_ && s.device() != DeviceKind::null) peers_.emplace(s, ranks_, plan_.peer_memory(), window_, shares_gpus_);
}

Tensor DirectWindow::bases_W() const {
  if (peers_) return peers_->bases_W();
  return {.shape = {ranks_.size()}, .dtype = DType::i64, .device = DeviceKind::null};
}

std::vector<std::byte*> DirectWindow::windows() const { return peers_ ? peers_->windows() : std::vector<std::byte*>{}; }

Tensor DirectWindow::sent_1() const {
  if (peers_) return peers_->sent_1();
  return {.shape = {1}, .dtype = DType::i64, .device = DeviceKind::null};
}

void DirectWindow::round(Stream& s, const RoundPlace& place) {
  if (s.device() != DeviceKind::null) peers_->round(s, place);
}

std::unique_ptr<DirectWindow> make_direct_window(MemoryPlan& plan, const Mesh& mesh, const DirectSizes& sizes,
                                                 DispatcherKind dispatcher, int64_t num_moe_layers) {
  const MeshShape& shape = mesh.shape();
  const bool two_level = dispatcher == DispatcherKind::two_level;
  const bool sends = (dispatcher == DispatcherKind::direct || two_level) && shape.ep * shape.etp > 1;
  if (!sends || num_moe_layers == 0) return nullptr;
  if (two_level) check_nodes(shape.ep, shape.etp, shape.ranks_per_node);
  DirectSizes of_kind = sizes;
  of_kind.two_level = two_level;
  return std::make_unique<DirectWindow>(plan, mesh, of_kind);
}

}  // namespace moebius
