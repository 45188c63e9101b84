// The lines that `moebius config` prints about a recipe besides its values. They say whether the run
// fits, how often it reads its data, what the recipe lacks, and whether the model can be exported.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/run_spec.h"
#include "device/accelerator.h"
#include "engine/engine.h"

namespace moebius {

struct MemoryCheck {
  // On CPUs the host memory of the ranks of a machine; on GPUs the memory of one rank's GPU, without its context.
  int64_t needed_bytes = 0;
  // It is true if the GPU or the CPU here can run it in this memory. None: there is no GPU here, and the host suffices.
  std::optional<bool> fits;
  std::string text;  // "yes: 324.2 MiB are needed, 18.20 GiB are available on this machine"
};

// The host memory that ranks pin for their GPUs, on the machine whose ranks pin the most.
struct PinnedMemory {
  int64_t bytes = 0, num_ranks = 1;
};
// of_stage: bytes that a rank of each pipeline stage pins. Machines have ranks with consecutive numbers.
PinnedMemory pinned_of_machine(const MeshShape& mesh, const std::vector<int64_t>& of_stage, int64_t ranks_per_machine);

// Returns the bytes of a GPU that check_device_memory() requires of an engine on the null device that counts for a GPU.
int64_t needed_of_gpu(const Engine& engine);
// Returns the same for a GPU that is not Hopper's. It may need less scratch or more: its own kernels need less, cuDNN's
// attention may need more, and so do the emulated products of fp8_tensor.
int64_t needed_of_other_gpu(const Engine& engine);

// Returns the end of a sentence about a rank that needs these bytes of a Hopper GPU or of another one: which GPUs of a
// table have them free. needed_of_others: nothing if other GPUs refuse the run; then only Hopper GPUs are named.
//   ": fits an H200 (139 GiB free), a B200 (177); does not fit an RTX 4090 (22 GiB free), ..."
std::string known_gpus_text(int64_t needed_of_hopper, const std::optional<int64_t>& needed_of_others);

// Returns the end of a sentence about the memory of one rank on its GPU. It says that the value is for a rank with its
// own GPU. If the run has more ranks than this machine has GPUs, it gives the sum on a shared GPU as well. It is empty
// for one rank.
std::string sharing_text(const DeviceMemory& of_rank, int64_t num_ranks, int64_t num_gpus);

// Checks the memory of the rank that needs the most. available: bytes of host memory here. A run on GPUs compares
// `pinned` with it, as `train` does when it starts; a run on the CPU compares what the ranks of one machine need,
// pinned.num_ranks of them. gpu: the first GPU here, if there is one. A run does not
// fit a GPU that lacks kernels that it needs.
MemoryCheck check_rank_memory(Engine& engine, const RunSpec& run, int64_t num_ranks, const PinnedMemory& pinned,
                              int64_t available, const std::optional<AcceleratorInfo>& gpu);

// Returns one line with the tokens of the run, and one for each existing dataset of data.train that says how often it
// is read.
std::vector<std::string> data_lines(const RunSpec& run);

// Checks the weights that a run starts from, before memory for the model is allocated. A run that resumes reads
// only its checkpoints.
void check_init(const RunSpec& run);

// Returns a line for each thing that `train` would refuse at once: a key that is not given, a dataset that
// does not exist or that the run cannot read, weights that are not those of the model.
std::vector<std::string> missing_to_train(const RunSpec& run);

// Returns "to Hugging Face as qwen3_moe", or the reason why not.
std::string export_text(const ModelSpec& model);

}  // namespace moebius
