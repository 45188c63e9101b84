// The planner's model of a machine: rates and sizes of a rank's device and of its links, and shares. A share is the
// part of a rate that kernels reach. A machine is a TOML file; machines/ has some, and `moebius bench machine` writes
// one. Every figure has its source next to it:
//   bf16_tflops = { is = 989, from = "NVIDIA's data sheet, without sparsity" }
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "config/exchange_rates.h"

namespace moebius {

// The software that is predicted: Moebius, or Megatron Core, to compare with its published runs.
enum class PlanSystem : int { moebius, megatron };
inline constexpr int kNumSystems = 2;
const char* name_of(PlanSystem system);

// The shares of a machine's rates that are fitted: at most one for each kernel class and machine.
enum class Share : int {
  products,            // dense products, relative to bf16_tflops
  experts,             // grouped products, relative to bf16_tflops
  low_precision,       // products and experts in 8 bits, relative to fp8_tflops
  attention_forward,   // relative to bf16_tflops
  attention_backward,  // relative to bf16_tflops
  memory,              // kernels bound by memory, relative to memory_tb_s
  inside,              // communication inside a domain, relative to inside_gb_s
  across,              // communication between domains, relative to across_gb_s
};
inline constexpr int kNumShares = 8;
// The range of a share. It can be above 1, since a card may run faster than its data sheet says.
inline constexpr double kMinShare = 0.001, kMaxShare = 1.5;
const char* name_of(Share share);
using Shares = std::array<double, kNumShares>;

struct PlanMachine {
  std::string name;
  bool is_gpu = true;
  int capability = 0;  // compute capability of the GPU, 10 * major + minor; 0: not given
  // The rates of a rank's device. fp8_tflops, nvfp4_tflops: 0 where it has none.
  double bf16_tflops = 0, fp8_tflops = 0, nvfp4_tflops = 0, memory_gb = 0, memory_tb_s = 0;
  double exponentials_t_s = 0;  // 1e12 exponentials a second; 0: included in the shares of attention, as on a CPU
  double f32_tflops = 0;        // rate of scalar arithmetic; 0: included in the shares of attention
  double multiprocessors = 0;   // number of multiprocessors of a GPU
  double portable = 1;          // rate of portable kernels relative to the share of products
  double threads = 0;           // CPU threads that the rates and the memory are for; 0: a GPU
  double kernel_us = 0;         // from the end of a kernel to the start of the next one's work
  double spread = 0;            // standard deviation of the speeds of ranks, relative to their mean
  double domain_ranks = 1;      // ranks of a domain, which fast links join
  double inside_gb_s = 0, across_gb_s = 0;  // of each rank and direction, inside a domain and between two
  double inside_us = 0, across_us = 0;      // latency of a collective call
  double layer_us = 0;                      // host time of a pass of a layer that is exposed without a CUDA graph
  double link_gb_s = 0;                     // between a rank's device and its host, in each of both directions at once
  double link_one_way_gb_s = 0;             // the same for copies in one direction alone; 0: link_gb_s
  double host_memory_gb = 0;                // memory of a host, for all of its ranks
  double read_gb_s = 0, write_gb_s = 0;     // rates of the drives of a host
  double host_ranks = 1;                    // ranks of a host, which share its memory and drives
  std::array<Shares, kNumSystems> shares{};
  std::array<bool, kNumSystems> has_shares{};
  std::map<std::string, std::string> sources;  // "rank.bf16_tflops", "share.moebius.memory": where it is from

  const Shares& of(PlanSystem system) const { return shares[static_cast<size_t>(system)]; }
  Shares& of(PlanSystem system) { return shares[static_cast<size_t>(system)]; }
  double memory_bytes() const { return memory_gb * 1e9; }
  // Returns the bytes per second of copies between a rank's device and its host while none go the other way.
  double one_way_link() const { return 1e9 * (link_one_way_gb_s > 0 ? link_one_way_gb_s : link_gb_s); }
  // Returns whether memory is counted for the kernels of Hopper GPUs, which need other scratch. Without a capability
  // they may run, except on a GPU with products in 4 bits, which no Hopper GPU has.
  bool counts_for_hopper() const { return capability == 90 || (capability == 0 && nvfp4_tflops == 0); }
  // Returns whether this is a GPU that runs the kernels for Hopper. fp8_tflops is their rate in 8 bits, and does not
  // decide whether they run: `moebius bench machine` writes 0.
  bool has_hopper_kernels() const { return is_gpu && counts_for_hopper(); }
  // Returns the bytes of the host's memory for each of its ranks. The program and the system need the rest, a tenth.
  double host_memory_of_rank() const { return 0.9 * host_memory_gb * 1e9 / host_ranks; }
  // Returns the machine for ranks of `threads_of_rank` threads: a smaller share of this CPU, with more ranks on a host.
  // A GPU belongs to one rank, and its machine is returned unchanged.
  PlanMachine of_rank(int64_t threads_of_rank) const;
  // Returns how many ranks can write to each other's memory: those of a domain that are on one host.
  int64_t ranks_of_windows() const;
  // Returns whether the source of a value, such as "links.across_gb_s", says that it was not measured.
  bool is_assumed(const std::string& key) const;
  // Returns the rates of the links that Moebius reaches.
  ExchangeRates exchange_rates() const;
  // Returns the values of [rank], [links] and [host] that were not measured or whose measurement was noisy, each as
  // "rank.kernel_us: its source".
  std::vector<std::string> assumed_figures() const;
};

// An entry of a machine file: its table and key, its value, its source, and the range of valid values.
struct MachineFigure {
  const char* table;
  const char* key;
  double PlanMachine::*value;
  double min, max;
  bool is_optional = false;  // a file may lack it, and its value is then 0
};
const std::vector<MachineFigure>& machine_figures();

// Reads a machine file's text, TOML or the same as JSON; `name` is the file in messages.
// Throws Error{usage} with file, table and key for a figure that is missing, is not a number, has no source or is out
// of range. Throws it also for an unknown key, with the nearest known one.
PlanMachine parse_machine(const std::string& text, const std::string& name);
// Loads machines/NAME.toml below `folder`, or the file at a path.
// Throws Error{usage} with the known names if there is neither. Throws Error{io} if the file cannot be read.
PlanMachine load_machine(const std::string& name_or_path, const std::string& folder);
std::vector<std::string> known_machines(const std::string& folder);

// Returns the text of a machine file. REQUIRES: every value has a source.
std::string to_toml(const PlanMachine& machine);

}  // namespace moebius
