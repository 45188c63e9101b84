#include "train/diagnose.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/transport/threads.h"
#include "train/testing.h"

namespace moebius {
namespace {

using ::testing::HasSubstr;

// Returns what the diagnosis finds when one norm's weight is so large that the norm's output is not
// finite. The weight itself is finite, so the first value that is not comes after it.
std::string diagnosis(const ParallelSpec& layout, int num_ranks, const std::string& large) {
  const TestDir dir;
  RunSpec run = testing::tiny_run();
  run.model.num_layers = 4;
  run.model.moe_layers.assign(4, true);
  run.parallel = layout;
  const std::vector<DatasetSpec> data = {{.prefix = testing::write_dataset(dir, "data", 300)}};
  std::string text;
  run_threads(num_ranks, {.timeout_s = 30}, [&](Transport& world) {
    EngineSpec spec = training_engine_spec(run, mesh_shape(layout, num_ranks));
    spec.world = &world;
    spec.threads = 1;
    Engine engine(spec);
    Control control(world);
    Loader loader(data, run, /*shuffle=*/true, engine.data_share());
    Stream s = engine.stream();
    engine.model().params().init(s, 7);
    for (const Param& p : engine.model().params().all()) {
      if (p.spec.name != large) continue;
      for (int64_t i = 0; i < p.w.numel(); ++i) p.w.ptr<float>()[i] = 3e38f;
    }
    loader.begin_step(1);
    const std::string found = find_first_nonfinite(engine, loader, control);
    if (control.is_root()) text = found;
  });
  return text;
}

// The stages are on ranks 0, 1, 0, 1. The first value that is wrong is not on the first rank that
// finds one.
TEST(Diagnose, FindsTheFirstWrongValueInPipelineOrder) {
  const std::string large = "model.layers.1.input_layernorm.weight";
  EXPECT_THAT(diagnosis({}, 1, large), HasSubstr("layer 1 attention norm output"));
  const std::string cut = diagnosis({.pp = 2, .vpp = 2}, 2, large);
  EXPECT_THAT(cut, HasSubstr("layer 1 attention norm output"));
  EXPECT_THAT(cut, HasSubstr(" on rank 1 in the forward pass of micro-batch 0"));
}

}  // namespace
}  // namespace moebius
