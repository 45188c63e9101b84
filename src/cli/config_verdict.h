// What `moebius config` says of a recipe beside its values: whether it fits, how often it reads its data, what it
// lacks, what can become of the model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/run_spec.h"
#include "engine/engine.h"

namespace moebius {

struct MemoryVerdict {
  int64_t needed_bytes = 0;  // of the host, of all ranks together; or of each GPU beside its context
  std::optional<bool> fits;  // here; none: there is no GPU to ask
  std::string text;          // "yes: 324.2 MiB are needed, 18.20 GiB are available on this machine"
};

// The end of a sentence that gives the memory of one rank on its GPU: that it holds for a rank with a GPU of its own, and
// what a GPU of this machine holds if the run has more ranks than the machine has GPUs. Empty for one rank.
std::string sharing_text(const DeviceMemory& of_rank, int64_t num_ranks, int64_t num_gpus);

// Of the rank that needs the most. The ranks of a run on the CPU count as if all were on this machine.
// available: of the host, for a run on the CPU.
MemoryVerdict memory_verdict(Engine& engine, const RunSpec& run, int64_t num_ranks, int64_t available);

// A line each: the tokens of the run, and how often it reads each dataset of data.train that is there.
std::vector<std::string> data_lines(const RunSpec& run);

// What `train` would refuse before anything else, a line each: keys that are not given, datasets that are not there.
std::vector<std::string> missing_to_train(const RunSpec& run);

// "to Hugging Face as qwen3_moe", or why not.
std::string export_text(const ModelSpec& model);

}  // namespace moebius
