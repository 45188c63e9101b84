#include "memory/activation_offload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "memory/saved_tensor.h"

namespace moebius {
namespace {

// Layers of one rank that keep two tensors each, for so many micro-batches in flight.
class Layers {
 public:
  Layers(int64_t num_layers, size_t num_sets, const OffloadSpec& offload = {.tensors = {.qkv = true}})
      : plan_({}, offload) {
    for (int64_t i = 0; i < num_layers; ++i) slots_.push_back(offload_.next_slot());
    sets_.resize(num_sets);
    for (auto& set : sets_) {
      set.resize(static_cast<size_t>(num_layers));
      for (size_t i = 0; i < set.size(); ++i) declare(set[i], slots_[i], static_cast<int64_t>(i));
    }
    plan_.bind(DeviceKind::cpu, 0);
    offload_.prepare(s_);
    offload_.begin();
  }

  // Writes values that name the pass. A GPU would run this later, in order.
  void forward(size_t set, size_t i, bool with_open = true, bool with_park = true) {
    if (with_open) offload_.open(s_, sets_[set][i].on_host);
    for (const SavedTensor* t : sets_[set][i].all()) std::fill_n(t->ptr<float>(), t->numel(), value_of(set, i));
    if (with_park) offload_.park(s_, sets_[set][i].on_host);
  }
  void fetch(size_t set, size_t i) { offload_.fetch(s_, sets_[set][i].on_host); }
  void ready(size_t set, size_t i) { offload_.ready(s_, sets_[set][i].on_host); }
  // Returns whether the tensors have the values of their forward pass.
  bool is_here(size_t set, size_t i) const {
    for (const SavedTensor* t : sets_[set][i].all())
      for (int64_t k = 0; k < t->numel(); ++k)
        if (t->ptr<float>()[k] != value_of(set, i)) return false;
    return true;
  }
  // The backward passes of a micro-batch, each of which fetches for the next one.
  void backward(size_t set, bool prefetches) {
    for (size_t i = slots_.size(); i-- > 0;) {
      ready(set, i);
      if (prefetches && i > 0) fetch(set, i - 1);
      EXPECT_TRUE(is_here(set, i)) << "set " << set << " layer " << i;
    }
  }
  void forward_all(size_t set) {
    for (size_t i = 0; i < slots_.size(); ++i) forward(set, i);
  }
  void end() { offload_.end(s_); }
  int64_t bytes_to_host() const { return offload_.bytes_to_host(); }
  const MemoryPlan& plan() const { return plan_; }

 private:
  struct Layer {
    SavedTensor large, small, device;
    OffloadedLayer on_host;
    std::vector<const SavedTensor*> all() const { return {&large, &small}; }
  };
  static float value_of(size_t set, size_t i) { return static_cast<float>(1 + 100 * set + i); }
  // Later layers are larger.
  void declare(Layer& layer, int slot, int64_t i) {
    layer.on_host.slot = slot;
    plan_.offload_to(&layer.on_host);
    layer.large.declare(plan_, "large", {256 * (1 + i)}, DType::f32, &RecomputeSpec::qkv);
    layer.small.declare(plan_, "small", {3}, DType::f32, &RecomputeSpec::qkv);
    layer.device.declare(plan_, "device", {256}, DType::f32, &RecomputeSpec::attention);
    plan_.offload_to(nullptr);
  }

  ThreadPool pool_{1};
  Stream s_{DeviceKind::cpu, pool_};
  MemoryPlan plan_;
  ActivationOffload offload_;
  std::vector<int> slots_;
  std::vector<std::vector<Layer>> sets_;
};

// The device has the two largest layers of each slot; the host has every layer of every micro-batch.
TEST(ActivationOffload, DeviceHoldsTwoLayersAndHostHoldsAll) {
  const Layers layers(5, 3);
  EXPECT_EQ(layers.plan().bytes(Life::offload_even), 1024 * (5 + 1));
  EXPECT_EQ(layers.plan().bytes(Life::offload_odd), 1024 * (4 + 1));
  EXPECT_EQ(layers.plan().bytes(Life::host), 3 * 1024 * (1 + 2 + 3 + 4 + 5 + 5));
  EXPECT_EQ(layers.plan().offloaded_bytes(), layers.plan().bytes(Life::host));
  EXPECT_EQ(layers.plan().bytes(Life::saved), 3 * 5 * 1024);
  EXPECT_EQ(layers.plan().device_bytes(), 1024 * (6 + 5 + 15));
}

TEST(ActivationOffload, RestoresWhatForwardWrote) {
  for (const bool prefetches : {false, true}) {
    Layers layers(5, 1);
    for (int step = 0; step < 3; ++step) {
      layers.forward_all(0);
      layers.backward(0, prefetches);
      layers.end();
    }
    EXPECT_EQ(layers.bytes_to_host(), 3 * (1024 * (1 + 2 + 3 + 4 + 5) + 5 * 12));
  }
}

// In 1F1B the backward pass of a micro-batch comes after the forward passes of later ones.
TEST(ActivationOffload, KeepsMicroBatchesInFlightSeparate) {
  for (const int64_t num_layers : {1, 2, 3, 4}) {
    Layers layers(num_layers, 3);
    layers.forward_all(0);
    layers.forward_all(1);
    for (size_t m = 2; m < 6; ++m) {
      layers.forward_all(m % 3);
      layers.backward((m - 2) % 3, true);
    }
    layers.backward(1, true);
    layers.backward(2, true);
    layers.end();
  }
}

// A weight pass by itself reads what the pass before it had read.
TEST(ActivationOffload, FetchesAgainForASeparateWeightPass) {
  Layers layers(4, 2);
  layers.forward_all(0);
  layers.backward(0, true);
  layers.forward_all(1);
  layers.backward(0, true);
  layers.backward(1, true);
}

// Tensors that are still in their slot are not copied: they need not have been on the host at all.
TEST(ActivationOffload, DoesNotFetchLayersOnTheDevice) {
  Layers layers(4, 1);
  for (size_t i = 0; i < 4; ++i) layers.forward(0, i, /*with_open=*/true, /*with_park=*/i < 2);
  layers.backward(0, true);
}

// Copies run as late as they may, so that each call that a pass leaves out changes numbers on a CPU too.
TEST(ActivationOffload, AMissingCallIsDetected) {
  Layers without_open(3, 1);
  for (size_t i = 0; i < 3; ++i) without_open.forward(0, i, /*with_open=*/i < 2);
  without_open.ready(0, 0);
  EXPECT_FALSE(without_open.is_here(0, 0)) << "layer 2 took the slot of layer 0 before that was copied";

  Layers without_ready(3, 1);
  without_ready.forward_all(0);
  without_ready.fetch(0, 0);
  EXPECT_FALSE(without_ready.is_here(0, 0)) << "nothing waited for the copy";
  without_ready.ready(0, 0);
  EXPECT_TRUE(without_ready.is_here(0, 0));

  Layers without_park(3, 1);
  for (size_t i = 0; i < 3; ++i) without_park.forward(0, i, /*with_open=*/true, /*with_park=*/i > 0);
  without_park.ready(0, 0);
  EXPECT_FALSE(without_park.is_here(0, 0));
}

// ceil(fraction * n) layers, spread evenly from the first.
TEST(OffloadSpec, ChoosesLayersEvenly) {
  const auto moved = [](double fraction, int64_t n) {
    const OffloadSpec spec{.layer_input = true, .fraction = fraction};
    std::string text;
    for (int64_t i = 0; i < n; ++i) text += spec.moves(i, n) ? 'x' : '.';
    return text;
  };
  EXPECT_EQ(moved(1.0, 4), "xxxx");
  EXPECT_EQ(moved(0.5, 6), "x.x.x.");
  EXPECT_EQ(moved(0.5, 5), "x.x.x");
  EXPECT_EQ(moved(0.25, 8), "x...x...");
  EXPECT_EQ(moved(0.75, 4), "xxx.");
  EXPECT_EQ(moved(0.1, 30), "x.........x.........x.........");
  EXPECT_EQ(moved(0.01, 3), "x..");
  EXPECT_EQ(moved(1.0 / 3, 3), "x..");
  EXPECT_FALSE(OffloadSpec{}.moves(0, 4)) << "nothing is named";
}

// A recomputed tensor is not kept, so it is not on the host either; and what is not named is on the device.
TEST(ActivationOffload, MovesOnlyNamedTensorsThatAreNotRecomputed) {
  MemoryPlan plan({.qkv = true}, {.layer_input = true, .tensors = {.qkv = true, .attention = true}});
  OffloadedLayer layer;
  SavedTensor input, qkv, attention, mlp, outside;
  plan.offload_to(&layer);
  input.declare_layer_input(plan, "input", {256}, DType::f32);
  qkv.declare(plan, "qkv", {256}, DType::f32, &RecomputeSpec::qkv);
  attention.declare(plan, "attention", {256}, DType::f32, &RecomputeSpec::attention);
  mlp.declare(plan, "mlp", {256}, DType::f32, &RecomputeSpec::mlp);
  plan.offload_to(nullptr);
  outside.declare(plan, "outside", {256}, DType::f32, &RecomputeSpec::attention);
  EXPECT_EQ(layer.tensors.size(), 2u);
  EXPECT_EQ(plan.bytes(Life::host), 2 * 1024);
  EXPECT_EQ(plan.bytes(Life::saved), 2 * 1024);
  plan.bind(DeviceKind::cpu, 0);
  EXPECT_TRUE(attention.kept().empty()) << "the slot may have another layer's";
  EXPECT_FALSE(mlp.kept().empty());
  EXPECT_NE(plan.table().find("offload_even"), std::string::npos) << plan.table();
}

}  // namespace
}  // namespace moebius
