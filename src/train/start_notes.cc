#include "train/start_notes.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "config/check/expert_rows_bound.h"
#include "model/gpu_products.h"
#include "train/notes/block_states_note.h"
#include "train/precision_note.h"

namespace moebius {
namespace {

bool is_balanced(const BalanceSpec& b) {
  return b.aux || b.seq_aux || b.global_aux || b.bias || b.sinkhorn || b.force_balance;
}

// Returns a note about Hugging Face's coefficient of the balance loss in the config.json, which has no effect here.
std::string unused_coefficient(const ModelSpec& model) {
  const char* key = "router_aux_loss_coef";
  if (!model.source || !model.source->contains(key)) return "";
  return fmt::format(" ({} = {} of the config.json is not used)", key, model.source->at(key).dump());
}

std::optional<StartNote> balance_note(const RunSpec& run) {
  if (run.model.num_moe_layers() == 0 || is_balanced(run.moe)) return std::nullopt;
  return StartNote{fmt::format("moe.balance = \"none\": no loss or bias balances the load of the experts{}",
                               unused_coefficient(run.model))};
}

std::optional<StartNote> saves_note(const RunSpec& run) {
  if (run.checkpoint.every > 0) return std::nullopt;
  return StartNote{
      "checkpoint.every = 0: saved only after the last step and on SIGTERM; a run that is killed starts over"};
}

std::optional<StartNote> rate_note(const RunSpec& run) {
  if (run.train.steps > 1 || run.optimizer.lr_at(1, 1) > 0) return std::nullopt;
  return StartNote{"train.steps = 1: the last step has the learning rate optimizer.min_lr = 0, so no weight changes",
                   /*is_warning=*/true};
}

std::optional<StartNote> dispatcher_note(const RunSpec& run, const DispatcherChoice& choice) {
  if (run.model.num_moe_layers() == 0) return std::nullopt;
  return StartNote{fmt::format("dispatcher {}: {}", choice.name, choice.reason)};
}

std::optional<StartNote> machine_note(const RunSpec& run, const DispatcherChoice& choice) {
  const std::string text = unused_machine_text(run, choice);
  return text.empty() ? std::nullopt : std::optional(StartNote{text, /*is_warning=*/true});
}

std::optional<StartNote> rows_note(const RunSpec& run) {
  const std::string text = expert_rows_text(run);
  return text.empty() ? std::nullopt : std::optional(StartNote{text});
}

std::optional<StartNote> kernels_note(const RunSpec& run, const GpusFound& gpus) {
  if (run.device != DeviceKind::cuda || gpus.visible.empty()) return std::nullopt;
  std::string text;
  for (const int gpu : distinct_gpus(gpus))
    if (why_not_usable(gpus, gpu).empty()) text += (text.empty() ? "" : "; ") + kernels_text(gpus, gpu, run.kernels);
  return StartNote{fmt::format("run.kernels = \"{}\": {}", name_of(run.kernels), text)};
}

// Returns whether backward recomputes the pre-activations of every layer.
bool keeps_no_pre_activation(const RunSpec& run) {
  const ModelSpec& m = run.model;
  for (int64_t layer = 0; layer < m.num_layers_and_mtp(); ++layer) {
    const RecomputeSpec r = run.memory.recompute.of(layer);
    const bool is_moe = m.moe_layers[std::min(layer, m.num_layers - 1)];  // the last layer's for multi-token prediction
    const bool has_shared = is_moe && m.shared_intermediate_size > 0;
    if (!r.covers(is_moe ? &RecomputeSpec::expert_up : &RecomputeSpec::mlp)) return false;
    if (has_shared && !r.covers(&RecomputeSpec::shared_expert)) return false;
  }
  return true;
}

std::optional<StartNote> activations_note(const RunSpec& run, const std::vector<std::string>& quantised) {
  if (run.precision.activations != PrecisionChoice::recipe) return std::nullopt;
  const auto is_down = [](const std::string& name) { return name.find("down_proj") != std::string::npos; };
  std::string why;
  if (std::ranges::none_of(quantised, is_down))
    why = "precision.keep names every down_proj, so no pre-activation is kept in the recipe's format";
  else if (keeps_no_pre_activation(run))
    why =
        "memory.recompute names the pre-activations of every layer, so forward keeps none, and backward only rounds "
        "what it recomputed";
  if (why.empty()) return std::nullopt;
  return StartNote{fmt::format("precision.activations = \"recipe\" saves no memory: {}; set it to \"compute\"", why),
                   /*is_warning=*/true};
}

// Notes about the recipe's products on the GPUs of this machine.
std::vector<std::optional<StartNote>> recipe_notes(const RunSpec& run, const GpusFound& gpus, int64_t num_ranks) {
  if (run.precision.recipe == PrecisionRecipe::none) return {};
  RunSpec here = run;
  set_f8_kernels(here, gpus, num_ranks);
  const std::vector<std::string> quantised = quantised_products(run);
  if (quantised.empty())
    return {StartNote{fmt::format("precision.recipe = \"{}\" quantises nothing: precision.keep names every product; "
                                  "remove the recipe, or patterns of precision.keep",
                                  name_of(run.precision.recipe)),
                      /*is_warning=*/true}};
  const PrecisionRecipe recipe = run.precision.recipe;
  if (run.device == DeviceKind::cpu && (recipe == PrecisionRecipe::mxfp8 || recipe == PrecisionRecipe::nvfp4))
    return {StartNote{fmt::format("precision.recipe = \"{}\" is emulated: operands are quantised, and multiplied in {}",
                                  name_of(recipe), name_of(run.precision.compute))}};
  const std::string products = gpu_products_text(here, !gpus.visible.empty());
  return {precision_note(here), products.empty() ? std::nullopt : std::optional(StartNote{products}),
          activations_note(run, quantised)};
}

std::string times_text(const std::string& what, double times) { return fmt::format("{} {:.2f} times", what, times); }

// Returns how often each dataset is read, in their order.
std::vector<double> times_read(const RunSpec& run, const DatasetOrder& order) {
  double weights = 0;
  for (const DatasetSpec& d : run.data.train) weights += d.weight;
  std::vector<double> times;
  for (int i = 0; i < order.num_datasets(); ++i) {
    const auto samples = static_cast<double>(run.train.steps * run.train.global_batch);
    times.push_back(samples * run.data.train[i].weight / weights / static_cast<double>(order.samples_per_epoch(i)));
  }
  return times;
}

// Says how many documents of the datasets that are read by whole documents are longer than a sequence; empty for none.
std::string cut_documents_text(const RunSpec& run, const DatasetOrder& order) {
  int64_t cut = 0, all = 0;
  for (int i = 0; i < order.num_datasets(); ++i) {
    if (!order.is_packed(i)) continue;
    const auto& begins = order.dataset(i).document_begins();
    all += std::ssize(begins) - 1;
    for (size_t d = 0; d + 1 < begins.size(); ++d) cut += begins[d + 1] - begins[d] > run.train.seq_len + 1;
  }
  if (cut == 0) return "";
  return fmt::format(
      "; {} of {} longer than train.seq_len + 1 = {} tokens and {} cut: later parts do not see the earlier ones", cut,
      counted(all, "document") + (cut == 1 ? " is" : " are"), run.train.seq_len + 1, cut == 1 ? "is" : "are");
}

}  // namespace

std::vector<StartNote> start_notes(const RunSpec& run, const DispatcherChoice& dispatcher, const GpusFound& gpus,
                                   int64_t num_ranks) {
  std::vector<StartNote> notes;
  const auto add = [&](const std::optional<StartNote>& note) {
    if (note) notes.push_back(*note);
  };
  add(kernels_note(run, gpus));
  for (const auto& note : recipe_notes(run, gpus, num_ranks)) add(note);
  for (const auto& note : {dispatcher_note(run, dispatcher), machine_note(run, dispatcher), rows_note(run),
                           balance_note(run), saves_note(run), rate_note(run)})
    add(note);
  for (const RunNote& note : run_notes(run, num_ranks)) notes.push_back(note);
  add(block_states_note(run));
  return notes;
}

StartNote random_weights_note(const RunSpec& run) {
  const std::string text = fmt::format("weights are random (run.seed = {}): model.init_from is not set", run.seed);
  if (run.model_hf.empty()) return {text};
  return {fmt::format("{}; model.hf gives only the shape: for its weights set model.init_from = \"{}\"", text,
                      run.model_hf),
          /*is_warning=*/true};
}

std::string data_text(const RunSpec& run, const DatasetOrder& order) {
  constexpr size_t kMaxNamed = 4;
  const std::vector<double> times = times_read(run, order);
  std::vector<std::string> named;
  for (size_t i = 0; i < std::min(times.size(), kMaxNamed); ++i)
    named.push_back(times_text(run.data.train[i].prefix, times[i]));
  if (times.size() > kMaxNamed) {
    const auto [least, most] = std::minmax_element(times.begin(), times.end());
    named = {fmt::format("each of {} datasets {:.2f} to {:.2f} times", times.size(), *least, *most)};
  }
  return fmt::format("data: {} tokens per step; {} {} {}{}", run.train.global_batch * run.train.seq_len,
                     counted(run.train.steps, "step"), run.train.steps == 1 ? "reads" : "read", fmt::join(named, ", "),
                     cut_documents_text(run, order));
}

}  // namespace moebius
