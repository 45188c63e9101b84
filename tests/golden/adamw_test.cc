// Compares the optimizer with torch.optim.AdamW with clipping by global norm, for five steps. The
// data is tests/golden/data/adamw.safetensors.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "io/safetensors.h"
#include "ops/optimizer/optimizer.h"

namespace moebius {
namespace {

class Reference {
 public:
  Reference() : file_(SafetensorsFile::open(MOEBIUS_SOURCE_DIR "/tests/golden/data/adamw.safetensors")) {}
  std::vector<float> read(const std::string& name) const {
    const SafetensorsEntry& entry = file_.at(name);
    std::vector<float> values(entry.bytes / sizeof(float));
    file_.read(entry, values.data());
    return values;
  }
  float constant(const std::string& name) const { return read(name).at(0); }

 private:
  SafetensorsFile file_;
};

Tensor vector_of(std::vector<float>& values) { return tensor_of(values.data(), {static_cast<int64_t>(values.size())}); }

// Both sides round each product and quotient of f32 once. The difference is a few units in the last
// place for each step.
void expect_close(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], want[i], 2e-6 * std::abs(want[i]) + 1e-8) << what << "[" << i << "]";
}

struct Updated {
  std::vector<float> master, m, v;
};

TEST(GoldenAdamw, FiveStepsWithClipping) {
  const Reference ref;
  ThreadPool pool(2);
  Stream s(DeviceKind::cpu, pool);
  std::map<std::string, Updated> state;
  for (const char* name : {"matrix", "vector", "scalar"}) {
    Updated& u = state[name];
    u.master = ref.read(std::string("param.0.") + name);
    u.m.assign(u.master.size(), 0.0f);
    u.v = u.m;
  }
  const std::vector<float> lr = ref.read("lr"), want_norm = ref.read("grad_norm");
  for (int64_t step = 1; step <= 5; ++step) {
    double sum = 0;
    float norm = 0, scale = 0;
    std::map<std::string, std::vector<float>> grads;
    for (auto& [name, u] : state) {
      std::vector<float>& grad = grads[name] = ref.read(fmt::format("grad.{}.{}", step, name));
      const Tensor x = vector_of(grad);
      std::vector<double> partial(SumSquares::num_partials(x));
      sum_squares(s, {.sum_1 = tensor_of(&sum, {1}),
                      .partial_P = tensor_of(partial.data(), {static_cast<int64_t>(partial.size())}),
                      .x = {&x, 1}});
    }
    clip_scale(s, {.norm_1 = tensor_of(&norm, {1}),
                   .scale_1 = tensor_of(&scale, {1}),
                   .sum_squares_1 = tensor_of(&sum, {1}),
                   .clip = ref.constant("clip")});
    EXPECT_NEAR(norm, want_norm[step - 1], 1e-6 * want_norm[step - 1]);
    for (auto& [name, u] : state) {
      const UpdatedTensor t{.param_n = vector_of(u.master),
                            .master_n = vector_of(u.master),
                            .m_n = vector_of(u.m),
                            .v_n = vector_of(u.v),
                            .grad_n = vector_of(grads[name]),
                            .weight_decay = ref.constant("weight_decay." + name)};
      adamw(s, {.tensors = {&t, 1},
                .scale_1 = tensor_of(&scale, {1}),
                .lr = lr[step - 1],
                .beta1 = ref.constant("beta1"),
                .beta2 = ref.constant("beta2"),
                .eps = ref.constant("eps"),
                .step = step});
      expect_close(u.master, ref.read(fmt::format("param.{}.{}", step, name)),
                   fmt::format("{} after step {}", name, step));
    }
  }
  for (const auto& [name, u] : state) {
    expect_close(u.m, ref.read("exp_avg." + name), name + " exp_avg");
    expect_close(u.v, ref.read("exp_avg_sq." + name), name + " exp_avg_sq");
  }
}

}  // namespace
}  // namespace moebius
