// Folders of runs for tests.
#pragma once

#include <fmt/format.h>

#include <string>

#include "io/files.h"
#include "io/testing.h"

namespace moebius {

// Returns a train record of two MoE layers with 4 experts, and of two ranks. The loss falls with the step.
inline std::string train_line(int64_t step, double loss) {
  return fmt::format(
      R"({{"kind":"train","step":{0},"loss":{1},"aux_loss":0.02,"z_loss":0.0,"grad_norm":{2},"lr":0.001,"tokens":128,)"
      R"("step_time_s":0.05,"tokens_per_s":2560.0,"model_tflops_per_rank":0.5,"expert_load_max_over_mean":1.5,)"
      R"("dropped_tokens":0,"memory_peak_bytes":31551488,"moe":[)"
      R"({{"layer":1,"load_max_over_mean":2.0,"aux_loss":0.01,"z_loss":0.0,"entropy":1.2,"dropped":0,"load":[16,8,8,0]}},)"
      R"({{"layer":2,"load_max_over_mean":1.0,"aux_loss":0.01,"z_loss":0.0,"entropy":1.3,"dropped":0,"load":[8,8,8,8]}}],)"
      R"("ranks":{{"load_s":[0.001,0.001],"passes_s":[0.03,0.03],"optimizer_s":[0.01,0.01],"waiting_s":[0.001,0.02]}},)"
      R"("comm":{{"ep":{{"sent_bytes":4096,"exposed_s":0.02,"rank_s":[0.001,0.02]}}}}}})",
      step, loss, step % 2 == 0 ? 0.5 : 1.5);
}

inline std::string eval_line(int64_t step, double loss) {
  return fmt::format(R"({{"kind":"eval","step":{},"loss":{},"tokens":64,"bits_per_byte":{}}})", step, loss, loss * 1.5);
}

inline constexpr char kTestRecipe[] = "[run]\ndir = \"run\"\n[train]\nsteps = 20\n[optimizer]\nclip = 1.0\n";

// Writes the metrics, events and recipe of a run of `steps` steps that was started twice.
inline void write_run(const std::string& dir, int64_t steps, const std::string& after = "") {
  std::filesystem::create_directories(dir + "/checkpoints/step-00000002");
  std::string lines;
  for (int64_t step = 1; step <= steps; ++step) {
    lines += train_line(step, 5.0 / static_cast<double>(step)) + "\n";
    if (step % 4 == 0) lines += eval_line(step, 6.0 / static_cast<double>(step)) + "\n";
  }
  write_file_atomic(dir + "/metrics.jsonl", lines + after);
  write_file_atomic(dir + "/recipe.resolved.toml", kTestRecipe);
  write_file_atomic(dir + "/checkpoints/step-00000002/manifest.json", "{}");
  write_file_atomic(
      dir + "/events.jsonl",
      R"({"kind":"start","time":1000.5,"step":0,"ranks":2,"memory_predicted_bytes":31000000,"memory_bytes":{"param":1000000,"grad":2000000}})"
      "\n"
      R"({"kind":"checkpoint","time":1010.5,"step":2})"
      "\n"
      R"({"kind":"start","time":1030.5,"step":2,"ranks":2,"memory_predicted_bytes":31000000,"memory_bytes":{"param":1000000,"grad":2000000}})"
      "\n");
}

}  // namespace moebius
