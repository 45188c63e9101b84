#include "cli/bench/options.h"

#include <algorithm>

#include "bench/shapes.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "device/accelerator.h"

namespace moebius {
namespace {

using Names = std::vector<std::string>;
const Names kWorkloads{"attention", "experts",     "gemm", "moe-layer", "dispatch",
                       "announce",  "collectives", "step", "precision", "machine"};
const Names kRouted{"experts", "moe-layer", "dispatch", "announce"},
    kShaped{"attention", "experts", "moe-layer", "dispatch", "announce", "machine"};

// The options that only some workloads accept. All workloads accept the others.
const std::pair<const char*, Names> kTakenBy[] = {
    {"--runs", {"attention", "experts", "gemm", "moe-layer", "dispatch", "announce", "precision", "machine"}},
    {"--shape", kShaped},
    {"--routing", kRouted},
    {"--zipf", kRouted},
    {"--operands", {"experts", "moe-layer"}},
    {"--micro-batches", {"moe-layer"}},
    {"--threads",
     {"attention", "experts", "gemm", "moe-layer", "dispatch", "announce", "step", "precision", "machine"}},
    {"--recipe", {"step", "precision"}},
    {"--set", {"step", "precision"}},
    {"--steps", {"step"}},
    {"--head-dim", {"attention"}},
    {"--window", {"attention"}},
    {"--documents", {"attention"}},
    {"--sequences", {"attention", "announce"}},
    {"--length", {"attention"}},
    {"--paths", {"attention"}},
    {"--kernels", {"attention", "experts", "moe-layer", "dispatch"}},
    {"--under-load", {"attention", "experts", "gemm", "moe-layer", "precision"}},
    {"--profile", {"moe-layer", "step"}},
    {"--first-micro-batch", {"moe-layer"}},
    {"--hash", {"step"}},
    {"--ranks", {"dispatch", "announce", "collectives", "step", "machine"}},
    {"--etp", {"dispatch"}},
    {"--ranks-per-node", {"dispatch"}},
    {"--sms", {"dispatch"}},
    {"--dispatcher", {"dispatch"}}};
constexpr double kLargestExponent = 100;  // popularity is a double, and 128^-100 still is above 0

// "a, b and c".
std::string listed(const Names& names, const char* last) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : fmt::format(" {} ", last)) + names[i];
  return text;
}

bool is_among(const std::string& name, const Names& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void check_taken(const Command& command, const std::string& workload) {
  for (const auto& [option, takers] : kTakenBy) {
    MOEBIUS_CHECK(usage, command.count(option) == 0 || is_among(workload, takers),
                  "bench {}: expected no {}, an option of {} only; leave it out", workload, option,
                  listed(takers, "and"));
  }
}

BenchRouting::Kind routing_kind(const std::string& name) {
  MOEBIUS_CHECK(usage, name == "balanced" || name == "zipf" || name == "uneven",
                "--routing: expected balanced, zipf or uneven; got \"{}\"", name);
  if (name == "uneven") return BenchRouting::Kind::uneven;
  return name == "zipf" ? BenchRouting::Kind::zipf : BenchRouting::Kind::balanced;
}

PrecisionRecipe operands_of(const std::string& name) {
  if (name == "bf16") return PrecisionRecipe::none;
  for (const auto recipe : {PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor})
    if (name == name_of(recipe)) return recipe;
  MOEBIUS_FAIL(usage, "--operands: expected bf16, fp8_block or fp8_tensor; got \"{}\"", name);
}

KernelChoice kernel_choice(const std::string& name) {
  for (const auto& [known, choice] : kKernelChoiceNames)
    if (name == known) return choice;
  MOEBIUS_FAIL(usage, "--kernels: expected auto or portable; got \"{}\"", name);
}

// Without --device a workload that takes --kernels runs on the CPU, which has no such choice.
void check_kernels(const BenchOptions& o) {
  MOEBIUS_CHECK(
      usage,
      o.spec.kernels == KernelChoice::automatic || device_kind(o.device.empty() ? "cpu" : o.device) == DeviceKind::cuda,
      "--kernels: portable kernels are a GPU's, and this benchmark runs on the CPU; add --device cuda, or leave "
      "--kernels out");
}

// The clocks of a CPU do not fall like those of a GPU, so its runs never rest.
void check_under_load(const BenchOptions& o) {
  const std::string device = !o.device.empty() ? o.device : o.name == "precision" ? "cuda" : "cpu";
  MOEBIUS_CHECK(
      usage, !o.spec.under_load || device_kind(device) == DeviceKind::cuda,
      "--under-load: only a GPU rests between runs, and this benchmark runs on the CPU; add --device cuda, or "
      "leave --under-load out");
}

}  // namespace

void add_bench_options(Command& command, BenchOptions& o) {
  command
      .add_option(
          "NAME", o.name,
          "the workload: gemm, attention, experts, moe-layer, dispatch, announce, collectives, step, precision or "
          "machine")
      ->required();
  command.add_option("--runs", o.runs,
                     "all but step and collectives: number of timed runs, whose median is printed; "
                     "default 7, on a GPU by their length");
  command.add_option("--device", o.device, "cpu or cuda; default: for step and precision the recipe's, else cpu");
  command.add_option(
      "--shape", o.shape,
      "attention, experts, moe-layer, dispatch, announce, machine: bench-cpu, mixtral-8x7b, qwen3-30b-a3b, "
      "deepseek-v3-8-local, olmoe or gpt-oss-20b; the default is bench-cpu on a CPU, qwen3-30b-a3b on a GPU");
  command.add_option("--routing", o.routing, "experts, moe-layer, dispatch, announce: balanced, zipf or uneven")
      ->capture_default_str();
  command.add_option("--zipf", o.spec.routing.exponent, "the exponent of --routing zipf")->capture_default_str();
  command
      .add_option("--operands", o.operands,
                  "experts: bf16, fp8_block or fp8_tensor; operands are quantised before kernels are timed; "
                  "moe-layer: times the layer in bf16 and quantised by this recipe, in turns")
      ->capture_default_str();
  command
      .add_option("--micro-batches", o.spec.micro_batches,
                  "moe-layer with --operands: micro-batches of a step, which quantises the weights once")
      ->between(1, 1 << 20)
      ->capture_default_str();
  add_threads_option(command, o.spec.threads);
  command.add_option(
      "--recipe", o.recipe,
      "step, precision: the recipe; default recipes/bench_cpu.toml, on a GPU bench_qwen3_30b_a3b_8layers");
  command.add_option("--set", o.overrides, "step, precision: SECTION.KEY=VALUE")->repeatable();
  command.add_option("--steps", o.steps, "step: timed steps; they follow one warm-up step, on a GPU three")
      ->capture_default_str();
  command.add_option("--head-dim", o.spec.head_dim, "attention: width of every head; 0: the widths of the shape")
      ->capture_default_str();
  command
      .add_option("--window", o.spec.mask.window, "attention: number of keys that a query attends to; 0: all before it")
      ->capture_default_str();
  command.add_option("--documents", o.spec.mask.documents, "attention: documents per sequence")->capture_default_str();
  command.add_option("--sequences", o.spec.sequences, "attention, announce: sequences; 0: those of --shape")
      ->capture_default_str();
  command.add_option("--length", o.spec.length, "attention: tokens of a sequence; 0: those of --shape")
      ->capture_default_str();
  command.add_flag("--paths", o.spec.paths,
                   "attention on a Hopper GPU: time each way in which our kernels can compute the backward pass");
  command
      .add_option("--kernels", o.kernels,
                  "attention, experts, moe-layer, dispatch on a GPU: auto or portable, like run.kernels")
      ->capture_default_str();
  command.add_flag("--under-load", o.spec.under_load,
                   "attention, experts, gemm, moe-layer, precision on a GPU: time after a second of the same work and "
                   "without rests, at the clocks of a long run");
  command.add_flag("--profile", o.profile,
                   "step, moe-layer: time, rate and share of every op; steps on a GPU then run eagerly");
  command.add_flag("--first-micro-batch", o.spec.first_micro_batch,
                   "moe-layer: gradients of weights are stored, as in the first micro-batch of a step; else they "
                   "are added");
  command.add_flag("--hash", o.hash, "step: print the XXH3-128 hash of the master weights at the end");
  command
      .add_option("--ranks", o.ranks,
                  "dispatch, collectives, step, machine: number of ranks, started as threads; mpirun starts processes; "
                  "announce: ep ranks, whose memory is all on one device")
      ->capture_default_str();
  command.add_option("--etp", o.etp, "dispatch: ranks that share each expert; ep is the rest")->capture_default_str();
  command
      .add_option("--ranks-per-node", o.ranks_per_node,
                  "dispatch: number of consecutive ranks of one machine that form a node")
      ->between(1, 8)
      ->capture_default_str();
  command
      .add_option("--sms", o.sms,
                  "dispatch on a GPU: multiprocessors for the copies of direct; 0: all that they can use")
      ->between(0, 1 << 16)
      ->capture_default_str();
  command.add_option("--dispatcher", o.dispatcher, "dispatch: auto, allgather, alltoall, direct or two_level")
      ->capture_default_str();
  add_json_option(command, o.json);
  add_example(command, "moebius bench moe-layer --shape qwen3-30b-a3b --device cuda");
}

void check_bench_options(const Command& command, BenchOptions& o) {
  MOEBIUS_CHECK(usage, is_among(o.name, kWorkloads), "bench: expected {}; got \"{}\"", listed(kWorkloads, "or"),
                o.name);
  check_taken(command, o.name);
  MOEBIUS_CHECK(usage, !o.runs || *o.runs >= 1, "--runs: expected at least 1; got {}; leave it out for the default",
                *o.runs);
  o.spec.routing.kind = routing_kind(o.routing);
  o.spec.kernels = kernel_choice(o.kernels);
  check_kernels(o);
  check_under_load(o);
  o.spec.operands = operands_of(o.operands);
  MOEBIUS_CHECK(
      usage, o.spec.operands == PrecisionRecipe::none || o.shape.empty() || !bench_shape(o.shape).expert_biases,
      "--operands: FP8 kernels take no experts with biases or another activation than SwiGLU; got --shape {}; "
      "leave --operands out, or choose another shape",
      o.shape);
  MOEBIUS_CHECK(
      usage, command.count("--micro-batches") == 0 || o.spec.operands != PrecisionRecipe::none,
      "--micro-batches: expected --operands fp8_block or fp8_tensor, whose weights are quantised once a step; "
      "got --operands {}",
      o.operands);
  MOEBIUS_CHECK(usage, command.count("--zipf") == 0 || o.routing == "zipf",
                "--zipf: expected --routing zipf, since this is its exponent; got --routing {}", o.routing);
  const double exponent = o.spec.routing.exponent;
  MOEBIUS_CHECK(usage, exponent >= 0 && exponent <= kLargestExponent,
                "--zipf: expected 0 (all experts are equally popular) to {}; got {}; leave it out for 1",
                kLargestExponent, exponent);
}

std::string bench_machine(DeviceKind device, int threads) {
  const std::string cpu = machine_line(this_machine());
  if (device == DeviceKind::cpu) return threads == 0 ? cpu : fmt::format("{}; {} threads", cpu, threads);
  const AcceleratorInfo gpu = Accelerator().info();
  return fmt::format("{}, CUDA {}, driver {}; {}", gpu.name, gpu.runtime, gpu.driver, cpu);
}

}  // namespace moebius
