#include "memory/plan.h"

#include <algorithm>
#include <utility>

#include "memory/alignment.h"

namespace moebius {

std::string_view name_of(Life life) {
  constexpr std::string_view names[kNumLives] = {"param",   "master",       "grad",        "layer_grad", "optimizer",
                                                 "state",   "batch",        "saved",       "rows",       "comm",
                                                 "metrics", "offload_even", "offload_odd", "host",       "stack"};
  return names[static_cast<int>(life)];
}

void MemoryPlan::declare_rows(Tensor& view, std::string name, Shape shape, DType dtype, int64_t near_rows) {
  MOEBIUS_ASSERT(!bound_ && near_rows <= shape[0]);
  view = Tensor{.shape = shape, .dtype = dtype, .device = DeviceKind::null};
  const int64_t near_bytes = shape[0] == 0 ? 0 : view.num_bytes() / shape[0] * near_rows;
  entries_.push_back({.name = std::move(name), .view = &view, .life = Life::rows, .near_bytes = near_bytes});
  place(entries_.back());
}

void MemoryPlan::declare(Tensor& view, std::string name, Shape shape, DType dtype, Life life) {
  MOEBIUS_ASSERT(!bound_ && life != Life::stack && life != Life::rows);
  view = Tensor{.shape = shape, .dtype = dtype, .device = DeviceKind::null};
  const bool reuses = std::exchange(reused_[static_cast<int>(life)], false);
  entries_.push_back({.name = std::move(name), .view = &view, .life = life, .reuses = reuses});
  place(entries_.back());
}

void MemoryPlan::place_rows(Entry& e) {
  constexpr int64_t kAlignBytes = SpillBuffer::kAlignBytes;
  e.offset = rows_extent_;
  rows_extent_ += div_ceil(e.view->num_bytes(), kAlignBytes) * kAlignBytes;
  bytes_[static_cast<int>(Life::rows)] += div_ceil(e.near_bytes, kAlignBytes) * kAlignBytes;
}

SpillBuffer MemoryPlan::rows_buffer(DeviceKind device) const {
  std::vector<SpillBuffer::Range> near;
  for (const Entry& e : entries_)
    if (e.life == Life::rows) near.push_back({.begin = e.offset, .num_bytes = e.near_bytes});
  return SpillBuffer(device, rows_extent_, near);
}

void MemoryPlan::place(Entry& e) {
  if (e.life == Life::rows) return place_rows(e);
  int64_t& used = used_[static_cast<int>(e.life)];
  int64_t& bytes = bytes_[static_cast<int>(e.life)];
  if (e.reuses) used = 0;
  const int64_t align = e.is_joined ? kAlign * size_of(e.view->dtype) : align_bytes(e.view->dtype);
  e.offset = div_ceil(used, align) * align;
  used = e.offset + div_ceil(e.view->num_bytes(), align) * align + e.free_bytes;
  bytes = std::max(bytes, used);
}

int64_t MemoryPlan::joined_numel(const std::vector<const Tensor*>& views, int64_t multiple) {
  int64_t numel = 0;
  for (const Tensor* view : views) numel += div_ceil(view->numel(), kAlign) * kAlign;
  return div_ceil(numel, multiple) * multiple;
}

void MemoryPlan::join(const std::vector<const Tensor*>& views, int64_t multiple) {
  MOEBIUS_ASSERT(!bound_ && !views.empty() && multiple % kAlign == 0);
  std::deque<Entry> joined;
  for (const Tensor* view : views) {
    const auto found = entry_of(*view);
    MOEBIUS_ASSERT(view->dtype == views[0]->dtype);
    joined.push_back(std::move(*found));
    joined.back().is_joined = true;
    entries_.erase(found);
  }
  const int64_t held = joined_numel(views, kAlign);
  joined.back().free_bytes = (joined_numel(views, multiple) - held) * size_of(views[0]->dtype);
  std::move(joined.begin(), joined.end(), std::back_inserter(entries_));
  place_all();
}

void MemoryPlan::withdraw(const Tensor& view) {
  MOEBIUS_ASSERT(!bound_);
  entries_.erase(entry_of(view));
  place_all();
}

std::deque<MemoryPlan::Entry>::iterator MemoryPlan::entry_of(const Tensor& view) {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.view == &view; });
  MOEBIUS_ASSERT(found != entries_.end());
  return found;
}

void MemoryPlan::place_all() {
  used_ = bytes_ = {};
  rows_extent_ = 0;
  for (Entry& e : entries_) place(e);
}

void MemoryPlan::declare_recomputed(Tensor& view, Shape shape, DType dtype) {
  view = Tensor{.shape = shape, .dtype = dtype, .device = DeviceKind::null};
  recomputed_bytes_ += view.num_bytes();
}

void MemoryPlan::offload_to(OffloadedLayer* to) {
  offloaded_ = to;
  if (to) reuse(to->slot == 0 ? Life::offload_even : Life::offload_odd);
}

void MemoryPlan::declare_offloaded(Tensor& view, std::string name, Shape shape, DType dtype) {
  MOEBIUS_ASSERT(offloaded_ != nullptr);
  OffloadedTensor& moved = offloaded_->tensors.emplace_back(OffloadedTensor{.on_device = &view});
  declare(view, name, shape, dtype, offloaded_->slot == 0 ? Life::offload_even : Life::offload_odd);
  const int64_t before = bytes(Life::host);
  declare(moved.on_host, std::move(name), shape, dtype, Life::host);
  offloaded_bytes_ += bytes(Life::host) - before;
}

void MemoryPlan::bind(DeviceKind device, int64_t stack_bytes) {
  MOEBIUS_ASSERT(!bound_);
  bound_ = true;
  bytes_[static_cast<int>(Life::stack)] = stack_bytes;
  for (int life = 0; life < kNumLives; ++life) {
    if (static_cast<Life>(life) == Life::comm && shares_comm_)
      comm_ = PeerMemory(device, bytes_[life]);
    else if (static_cast<Life>(life) == Life::rows)
      rows_ = rows_buffer(device);
    else if (static_cast<Life>(life) == Life::host && device != DeviceKind::null)
      host_ = HostBuffer(device, bytes_[life]);
    else
      buffers_[life] = Buffer(device, bytes_[life]);
  }
  for (Entry& e : entries_) {
    e.view->device = device;
    if (device != DeviceKind::null) e.view->data = static_cast<char*>(base(e.life)) + e.offset;
  }
  stack_ = StepStack(device, buffers_[static_cast<int>(Life::stack)].data(), stack_bytes);
}

void* MemoryPlan::base(Life life) const {
  if (life == Life::rows) return rows_.data();
  if (life == Life::host) return host_.data();
  return life == Life::comm && shares_comm_ ? comm_.data() : buffers_[static_cast<int>(life)].data();
}

int64_t MemoryPlan::bytes(Life life) const { return bytes_[static_cast<int>(life)]; }

int64_t MemoryPlan::total_bytes() const {
  int64_t total = 0;
  for (int64_t b : bytes_) total += b;
  return total;
}

int64_t MemoryPlan::device_bytes() const { return total_bytes() - bytes(Life::host); }

namespace {

// Lives that most plans do not have.
bool is_rare(Life life) {
  return life == Life::layer_grad || life == Life::offload_even || life == Life::offload_odd || life == Life::host;
}

}  // namespace

std::string MemoryPlan::table() const {
  std::string text = "memory plan\n";
  const int width = bytes(Life::offload_even) > 0 ? 12 : 10;  // the width of the longest name
  for (int life = 0; life < kNumLives; ++life) {
    if (is_rare(static_cast<Life>(life)) && bytes_[life] == 0) continue;
    int64_t count = 0;
    const Entry* largest = nullptr;
    for (const Entry& e : entries_) {
      if (static_cast<int>(e.life) != life) continue;
      ++count;
      if (!largest || e.view->num_bytes() > largest->view->num_bytes()) largest = &e;
    }
    text += fmt::format("  {:<{}} {:>11}  {:>5} tensors{}\n", name_of(static_cast<Life>(life)), width,
                        bytes_text(bytes_[life]), count,
                        largest ? fmt::format(", largest {} {}", largest->name, to_string(*largest->view)) : "");
  }
  text += fmt::format("  {:<{}} {:>11}\n", "total", width, bytes_text(total_bytes()));
  if (spill_bytes() > 0)
    text += fmt::format("  beyond: {} of host memory where tokens choose more rows than are planned\n",
                        bytes_text(spill_bytes()));
  if (bytes(Life::host) > 0)
    text +=
        fmt::format("  {:<{}} {:>11}  without what is kept in host memory\n", "", width, bytes_text(device_bytes()));
  if (recomputed_bytes_ > 0)
    text += fmt::format("  not kept: {} that backward recomputes\n", bytes_text(recomputed_bytes_));
  return text;
}

std::string bytes_text(int64_t bytes) {
  if (bytes >= int64_t{1} << 30) return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
  if (bytes >= 1 << 20) return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
  if (bytes >= 1 << 10) return fmt::format("{:.1f} KiB", static_cast<double>(bytes) / (1 << 10));
  return fmt::format("{} B", bytes);
}

}  // namespace moebius
