// What a run will need, before it runs: the engine is built on the null device,
// which plans everything and allocates nothing.
//
//   usage: memory_of_a_recipe RECIPE.toml
#include <cstdio>

#include "engine/engine.h"

using namespace moebius;

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: %s RECIPE.toml\n", argv[0]), 2;
  try {
    const RunSpec run = load_run_spec(argv[1], {});
    run.check(/*world_size=*/1);
    EngineSpec spec = training_engine_spec(run);
    spec.device = DeviceKind::null;
    const Engine engine(spec);
    std::printf("%.1f million parameters\n%s", run.model.num_parameters() / 1e6, engine.plan().table().c_str());
    return 0;
  } catch (const Error& e) {
    return std::fprintf(stderr, "%s\n", e.what()), static_cast<int>(e.kind());
  }
}
