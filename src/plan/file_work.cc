#include "plan/file_work.h"

#include <algorithm>

#include "data/token_data.h"
#include "parallel/optim/optimizer.h"

namespace moebius {

int64_t token_bytes(const ModelSpec& model) { return token_type_for_vocab(model.vocab_size) == TokenType::u16 ? 2 : 4; }

double checkpoint_bytes(const OptimizerSpec& optimizer) {
  return (optimizer.master == MasterFormat::bf16_stochastic ? 2 : 4) + state_bytes(optimizer);
}

FileWork file_work(const RunSpec& run, const PlanMachine& machine, int64_t ranks, double saved_numel,
                   double owned_numel, double tokens, double step_s) {
  const double of_element = checkpoint_bytes(run.optimizer);
  FileWork w{.data_bytes = tokens * static_cast<double>(token_bytes(run.model)),
             .checkpoint_bytes = saved_numel * of_element};
  const double beside = std::min(static_cast<double>(ranks), machine.host_ranks);
  const double of_host = owned_numel * of_element * beside;
  w.save_s = of_host / (machine.write_gb_s * 1e9);
  w.load_s = of_host / (machine.read_gb_s * 1e9);
  const int64_t every = run.checkpoint.every, steps = run.train.steps;
  if (steps > 0) w.saves = (every > 0 ? steps / every : 0) + (every > 0 && steps % every == 0 ? 0 : 1);
  if (!run.checkpoint.async_save) {
    w.stall_s = w.save_s;
    return w;
  }
  w.stall_s = owned_numel * of_element / machine.one_way_link();
  // The save before this one must have ended.
  if (every > 0) w.stall_s += std::max(0.0, w.save_s - static_cast<double>(every) * step_s);
  return w;
}

}  // namespace moebius
