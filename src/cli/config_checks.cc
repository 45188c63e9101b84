#include "cli/config_checks.h"

#include <fmt/format.h>

#include <filesystem>
#include <functional>

#include "cli/count_text.h"
#include "config/check/hopper_check.h"
#include "config/check/hopper_notes.h"
#include "core/error.h"
#include "data/token_data.h"
#include "train/host_memory.h"
#include "train/loader.h"
#include "weights/load.h"

namespace moebius {

namespace {

// The free memory of a GPU of each size, once a context is made. That of an H100 and of an H200 was read in a run: 1.65
// and 1.4 GiB less than nvidia-smi gives in all, 81559 and 143771 MiB. The others are estimated in the same way: 1.65
// GiB less than published outputs of nvidia-smi give (24576, 24564, 32607, 40960, 46068, 81920 and 183359 MiB), in
// whole GiB. A card that drives a display has less.
struct KnownGpu {
  const char* name;
  int64_t free_gib;
  bool is_hopper = false;
};
constexpr KnownGpu kKnownGpus[] = {{"an RTX 3090", 22},      {"an RTX 4090", 22},    {"an RTX 5090", 30},
                                   {"an A100 of 40 GB", 38}, {"an L40S", 43},        {"an H100", 78, true},
                                   {"an A100 of 80 GB", 78}, {"an H200", 139, true}, {"a B200", 177}};

// "; 57.70 GiB of its host's memory are pinned, 128.00 GiB are available here".
std::string pinned_text(const PinnedMemory& pinned, int64_t available) {
  if (pinned.bytes == 0) return "";
  const std::string here = bytes_text(available);
  const std::string text =
      pinned.num_ranks == 1
          ? fmt::format("; {} of the memory of its host are pinned in addition, and {} are available here",
                        bytes_text(pinned.bytes), here)
          : fmt::format(
                "; the {} ranks of a machine (--ranks-per-machine) pin {} of the memory of their host together, "
                "and {} are available here",
                pinned.num_ranks, bytes_text(pinned.bytes), here);
  return pinned.bytes <= available ? text : text + ": this host has too little memory for it, with any GPU";
}

// Returns why a GPU of this kind ends the run before its first step; empty if it does not.
std::string why_refused(const RunSpec& run, const AcceleratorInfo& gpu) {
  try {
    check_hopper_needs(hopper_needs(run), gpu.capability_major, gpu.capability_minor);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

MemoryCheck check_gpu_memory(Engine& engine, const RunSpec& run, int64_t num_ranks, const PinnedMemory& pinned,
                             int64_t available, const std::optional<AcceleratorInfo>& gpu) {
  MemoryCheck v{.needed_bytes = needed_of_gpu(engine)};
  v.text = fmt::format("{} of each GPU are needed{}", bytes_text(v.needed_bytes),
                       num_ranks == 1 ? "" : " by a rank that does not share it");
  if (gpu) {
    const std::string refused = why_refused(run, *gpu);
    v.fits = refused.empty() && v.needed_bytes <= gpu->free_bytes && pinned.bytes <= available;
    v.text = fmt::format("{}: {}, {} are free of the first GPU here, {}", *v.fits ? "yes" : "no", v.text,
                         bytes_text(gpu->free_bytes), gpu->name);
    v.text += pinned_text(pinned, available);
    if (!refused.empty()) v.text += "; this GPU refuses the recipe: " + refused;
    return v;
  }
  std::optional<int64_t> of_others;
  if (hopper_notes(run).empty()) of_others = needed_of_other_gpu(engine);
  if (of_others && bytes_text(*of_others) != bytes_text(v.needed_bytes))
    v.text += fmt::format(", {} of one that is not Hopper's", bytes_text(*of_others));
  v.text += known_gpus_text(v.needed_bytes, of_others);
  if (!of_others) v.text += "; GPUs that are not Hopper's refuse this recipe";
  v.text += "; no GPU is here to ask" + pinned_text(pinned, available);
  if (pinned.bytes > available) v.fits = false;
  return v;
}

bool is_there(const std::string& prefix) {
  std::error_code unreadable;
  return std::filesystem::exists(prefix + ".idx", unreadable) && std::filesystem::exists(prefix + ".bin", unreadable);
}

// Each dataset of a blend is drawn by its share of the weights.
std::string dataset_line(const DatasetSpec& d, double weights, double tokens) {
  const TokenDataset data = TokenDataset::open(d.prefix);
  const auto held = static_cast<double>(data.num_tokens());
  const double times = tokens * (d.weight / weights) / held;
  // Whole documents do not fill each sequence. `train` packs them, and prints the number.
  return fmt::format("{}: {} tokens, read {}{:.{}f} times", d.prefix, count_text(static_cast<int64_t>(held)),
                     data.has_targets() ? "at most " : "", times, times < 10 ? 2 : 0);
}

}  // namespace

int64_t needed_of_gpu(const Engine& engine) {
  const DeviceMemory gpu = engine.device_memory();
  return gpu.plan_bytes + gpu.workspace_bytes + kDeviceReserveBytes;
}

int64_t needed_of_other_gpu(const Engine& engine) { return needed_of_gpu(Engine(on_other_gpu(engine.spec()))); }

std::string known_gpus_text(int64_t needed_of_hopper, const std::optional<int64_t>& needed_of_others) {
  std::string text;
  for (const bool fits : {true, false}) {
    std::string list;
    for (const KnownGpu& gpu : kKnownGpus) {
      const std::optional<int64_t> needed = gpu.is_hopper ? needed_of_hopper : needed_of_others;
      if (!needed || (*needed <= gpu.free_gib << 30) != fits) continue;
      list +=
          fmt::format("{} {} ({}{})", list.empty() ? "" : ",", gpu.name, gpu.free_gib, list.empty() ? " GiB free" : "");
    }
    if (!list.empty()) text += fmt::format("{} {}{}", text.empty() ? ":" : ";", fits ? "fits" : "does not fit", list);
  }
  return text;
}

std::string sharing_text(const DeviceMemory& of_rank, int64_t num_ranks, int64_t num_gpus) {
  if (num_ranks == 1) return "";
  const std::string alone = ", for each rank that has a GPU of its own";
  if (num_gpus == 0 || num_ranks <= num_gpus) return alone;
  const int64_t sharing = div_ceil(num_ranks, num_gpus);
  return fmt::format(
      "{}; on this machine alone {} ranks would share a GPU and take up to {} of it together, plus their contexts, "
      "which are not predicted",
      alone, sharing, bytes_text(of_rank.times(sharing).total_bytes()));
}

PinnedMemory pinned_of_machine(const MeshShape& mesh, const std::vector<int64_t>& of_stage, int64_t ranks_per_machine) {
  PinnedMemory most;
  for (int64_t first = 0; first < mesh.world(); first += ranks_per_machine) {
    PinnedMemory here{.num_ranks = std::min(ranks_per_machine, mesh.world() - first)};
    for (int64_t rank = first; rank < first + here.num_ranks; ++rank)
      here.bytes += of_stage[static_cast<size_t>(place_of(mesh, static_cast<int>(rank)).pp)];
    if (first == 0 || here.bytes > most.bytes) most = here;
  }
  return most;
}

MemoryCheck check_rank_memory(Engine& engine, const RunSpec& run, int64_t num_ranks, const PinnedMemory& pinned,
                              int64_t available, const std::optional<AcceleratorInfo>& gpu) {
  if (run.device == DeviceKind::cuda) return check_gpu_memory(engine, run, num_ranks, pinned, available, gpu);
  const HostMemory host = host_memory(engine, run.checkpoint.async_save);
  MemoryCheck v{.needed_bytes = pinned.num_ranks * (host.plan_bytes + host.snapshot_bytes)};
  v.fits = v.needed_bytes <= available;
  const std::string by = pinned.num_ranks < num_ranks
                             ? fmt::format(" by the {} of a machine", counted(pinned.num_ranks, "rank"))
                         : num_ranks > 1 ? fmt::format(" by {} ranks", num_ranks)
                                         : "";
  v.text = fmt::format("{}: {} are needed{}, {} are available on this machine", *v.fits ? "yes" : "no",
                       bytes_text(v.needed_bytes), by, bytes_text(available));
  if (!*v.fits) v.text += "; docs/design/memory.md lists settings that need less";
  return v;
}

std::vector<std::string> data_lines(const RunSpec& run) {
  const int64_t step = run.train.global_batch * run.train.seq_len;
  const double tokens = static_cast<double>(step) * static_cast<double>(run.train.steps);
  std::vector<std::string> lines{fmt::format("{} tokens per step, {} in {} steps", count_text(step),
                                             count_text(static_cast<int64_t>(std::min(tokens, 9e18))),
                                             run.train.steps)};
  double weights = 0;
  for (const DatasetSpec& d : run.data.train) weights += d.weight;
  for (const DatasetSpec& d : run.data.train) {
    if (is_there(d.prefix)) lines.push_back(dataset_line(d, weights, tokens));
  }
  return lines;
}

void check_init(const RunSpec& run) {
  const bool resumes = run.checkpoint.resume && std::filesystem::exists(run.dir + "/checkpoints");
  if (!run.init_from.empty() && !resumes) check_weights(run.init_from, run.model);
}

std::vector<std::string> missing_to_train(const RunSpec& run) {
  std::vector<std::string> lines;
  const auto check = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& e) {
      lines.emplace_back(e.what());
    }
  };
  check([&] { run.check_trainable(); });
  for (const auto* datasets : {&run.data.train, &run.data.valid})
    for (const DatasetSpec& d : *datasets) {
      if (is_there(d.prefix))
        check([&] { check_dataset(d.prefix, run, ""); });
      else
        lines.push_back(
            fmt::format("no dataset at {} (.bin and .idx); moebius data build --input FILE... --tokenizer {} "
                        "--out {} makes it",
                        d.prefix, run.data.tokenizer, d.prefix));
    }
  check([&] { check_init(run); });
  return lines;
}

std::string export_text(const ModelSpec& model) {
  if (model.family != "moebius") return fmt::format("to Hugging Face as {}", model.family);
  return "no: model_type \"moebius\" is Moebius' own, and Hugging Face has no class for it; name a family to export";
}

}  // namespace moebius
