#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench/machine_file.h"
#include "cli/command.h"
#include "cli/config_checks.h"
#include "cli/count_text.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "config/check/expert_rows_bound.h"
#include "config/check/hopper_notes.h"
#include "config/check/run_notes.h"
#include "config/dispatcher_choice.h"
#include "config/recipe/reference.h"
#include "config/run_print.h"
#include "device/accelerator.h"
#include "engine/engine.h"
#include "model/device_support.h"
#include "model/gpu_products.h"
#include "ops/attention/attention_scratch.h"
#include "parallel/optim/kept_states.h"
#include "parallel/optim/optimizer.h"
#include "plan/memory/chosen_memory.h"
#include "plan/memory/state_buffer.h"
#include "train/host_memory.h"
#include "train/notes/block_states_note.h"

namespace moebius {
namespace {

struct Options {
  std::string recipe, machine;
  std::vector<std::string> overrides;
  int64_t ranks = 1, ranks_per_machine = 8;
  bool json = false, changed = false, keys = false;
};

struct Resolved {
  RunSpec run;
  MeshShape mesh;
  DispatcherChoice dispatcher;
  bool knows_gpus = false;  // those of this machine; else of no machine
  GpuKinds gpus;            // the kinds that its ranks use
  std::string fit;          // what was chosen about memory; empty if nothing was
  // The rank that needs the most memory; on the null device.
  int rank = 0;
  std::unique_ptr<Transport> world;
  std::unique_ptr<Engine> engine;
  bool has_states_on_host = false;       // optimizer.offload: any rank has masters or moments there
  std::vector<int64_t> pinned_of_stage;  // bytes of host memory that a rank of each pipeline stage pins
  int64_t ranks_per_machine = 8;
};

// A recipe that has only a model may leave out the batch. It then counts as one sequence of
// the model's context.
RunSpec counted_run(RunSpec run, int64_t ranks_of_machine) {
  if (run.train.micro_batch == 0) run.train.micro_batch = 1;
  if (run.train.seq_len == 0) run.train.seq_len = run.model.max_position_embeddings;
  // The ranks of a machine share its CPUs, as they do in `train`.
  if (run.threads == 0 && run.device == DeviceKind::cpu)
    run.threads = std::max<int64_t>(1, num_available_cpus() / ranks_of_machine);
  return run;
}

EngineSpec counted_engine_spec(const RunSpec& asked, const MeshShape& mesh, int64_t ranks_of_machine) {
  const RunSpec run = counted_run(asked, ranks_of_machine);
  EngineSpec spec = training_engine_spec(run, mesh);
  spec.device = DeviceKind::null;
  check_device(spec.model, spec.target, {.batch = spec.shape.batch, .tp = mesh.tp});
  check_quantised_products(spec.model, spec.precision, spec.lora, spec.target);
  return spec;
}

// Returns what decides whether a rank fits: on a GPU the memory of the host is not part of it.
int64_t needed_bytes(const Engine& engine) {
  return engine.spec().target == DeviceKind::cuda ? engine.device_memory().total_bytes() : engine.plan().total_bytes();
}

bool has_states_on_host(const Engine& engine) {
  const OptimizerSpec& optimizer = engine.spec().optimizer.value();
  const auto is_on_host = [&](const Param& p) {
    return p.has_grad && !p.keeps_states && states_bytes(optimizer, states_of(p)) > 0;
  };
  return optimizer.offload && std::ranges::any_of(engine.model().params().all(), is_on_host);
}

enum class GpuKind { hopper, other };

// Counts the memory of a rank on one kind of GPU, and keeps its engine in r if it needs more than the engine that r
// has. Returns the bytes of host memory that the rank pins.
int64_t keep_if_more_loaded(Resolved& r, int rank, GpuKind gpu) {
  auto world = make_dry_run_transport(rank, static_cast<int>(r.mesh.world()));
  EngineSpec spec = counted_engine_spec(r.run, r.mesh, std::min(r.mesh.world(), r.ranks_per_machine));
  if (gpu == GpuKind::other) spec = on_other_gpu(std::move(spec));
  spec.dispatcher = r.dispatcher.kind;
  spec.world = world.get();
  auto engine = std::make_unique<Engine>(spec);
  const int64_t pinned = engine->plan().bytes(Life::host);
  r.has_states_on_host = r.has_states_on_host || has_states_on_host(*engine);
  if (r.engine && needed_bytes(*engine) <= needed_bytes(*r.engine)) return pinned;
  r.engine = std::move(engine);  // before the world that the old engine uses
  r.world = std::move(world);
  r.rank = rank;
  return pinned;
}

// The ranks of a pipeline stage hold the same, unless tp does not divide the vocabulary: then the
// last ranks have more rows. Any of them may be on each kind of GPU.
void find_most_loaded(Resolved& r) {
  const bool uneven = r.run.model.vocab_size % r.mesh.tp != 0;
  for (int64_t stage = 0; stage < r.mesh.pp; ++stage) {
    const int rank = rank_in_dense_view(r.mesh, {.tp = uneven ? r.mesh.tp - 1 : 0, .pp = stage});
    int64_t pinned = 0;
    if (r.gpus.hopper) pinned = keep_if_more_loaded(r, rank, GpuKind::hopper);
    if (r.gpus.others) pinned = std::max(pinned, keep_if_more_loaded(r, rank, GpuKind::other));
    r.pinned_of_stage.push_back(pinned);
  }
}

nlohmann::ordered_json groups_json(const MeshShape& mesh) {
  nlohmann::ordered_json groups;
  for (int i = 0; i < kNumAxes; ++i) {
    const auto axis = static_cast<Axis>(i);
    const int64_t size = group_size(mesh, axis);
    groups[std::string(name_of(axis))] = {
        {"size", size}, {"groups", mesh.world() / size}, {"carries", purpose_of(axis)}};
  }
  return groups;
}

// Chooses what the recipe leaves open about memory, and notes in `provenance` what decided it.
void set_memory(Resolved& r, int64_t num_ranks) {
  if (!chooses_memory(r.run)) return;
  RunSpec run = r.run;
  run.parallel.dispatcher = r.dispatcher.kind;
  FitMachines machines = fit_machine(r.run.device, num_ranks);
  machines.gpus = r.gpus;
  // memory.fit may be for other machines, so it alone counts.
  if (r.run.memory.fit_bytes == 0) machines.gpu_bytes = gpu_bytes_here(std::min(num_ranks, r.ranks_per_machine));
  const ChosenMemory chosen =
      choose_memory(counted_run(run, std::min(num_ranks, r.ranks_per_machine)), num_ranks, machines);
  if (chosen.text.empty()) return;
  const bool chooses = r.run.memory.automatic, offloads = chosen.run.memory.offload != r.run.memory.offload;
  chosen.apply(r.run);
  if (chooses) r.run.provenance["memory.recompute"] = "memory.fit";
  if (chooses && offloads)
    r.run.provenance["memory.offload"] = r.run.provenance["memory.offload_fraction"] = "memory.fit";
  if (!chosen.buffer_limit.empty()) r.run.provenance["optimizer.offload_buffer"] = chosen.buffer_limit;
  r.fit = chosen.text;
}

Resolved resolve(const Options& o) {
  Resolved r{.run = load_run_spec(o.recipe, o.overrides), .ranks_per_machine = o.ranks_per_machine};
  r.run.check(o.ranks);
  r.run.machine = o.machine;
  set_machine_rates(r.run);
  if (r.run.device == DeviceKind::cuda) {
    const GpusFound gpus = gpus_found();
    const int64_t ranks_here = std::min(o.ranks, o.ranks_per_machine);
    set_f8_kernels(r.run, gpus, ranks_here);
    r.gpus = gpu_kinds(gpus, ranks_here);
    r.knows_gpus = !gpus.visible.empty();
  }
  r.mesh = mesh_shape(r.run.parallel, o.ranks);
  r.dispatcher =
      dispatcher_choice(r.run, reach_on_machines(r.run.parallel, r.mesh.world(), o.ranks_per_machine,
                                                 fmt::format("--ranks-per-machine {}", o.ranks_per_machine)));
  set_memory(r, o.ranks);
  find_most_loaded(r);
  return r;
}

// Returns the memory that the plan does not count.
nlohmann::ordered_json beside_json(const Resolved& r) {
  const HostMemory host = host_memory(*r.engine, r.run.checkpoint.async_save);
  nlohmann::ordered_json json{{"host_pinned", host.pinned_bytes}, {"checkpoint_snapshot", host.snapshot_bytes}};
  if (r.engine->plan().spill_bytes() > 0) json["host_expert_rows_at_worst"] = r.engine->plan().spill_bytes();
  if (r.engine->spec().target != DeviceKind::cuda) return json;
  const DeviceMemory gpu = r.engine->device_memory();
  json.update({{"gpu_workspaces", gpu.workspace_bytes},
               {"gpu_kernels", gpu.code_bytes},
               {"gpu_predicted_peak", gpu.total_bytes()}});
  return json;
}

std::string unplanned_memory_text(const Resolved& r) {
  const HostMemory host = host_memory(*r.engine, r.run.checkpoint.async_save);
  if (r.engine->spec().target != DeviceKind::cuda)
    return host.text() + "; a run also holds the program and the indices of its data";
  return fmt::format("{}{}; {}; {}", r.engine->device_memory().text(),
                     sharing_text(r.engine->device_memory(), r.mesh.world(), Accelerator::count()),
                     planned_cudnn_text(gpu_kernels(r.engine->spec())), host.text());
}

nlohmann::ordered_json memory_json(const MemoryPlan& plan) {
  nlohmann::ordered_json lives;
  for (int i = 0; i < kNumLives; ++i)
    lives[std::string(name_of(static_cast<Life>(i)))] = plan.bytes(static_cast<Life>(i));
  lives["total"] = plan.total_bytes();
  return lives;
}

// The bytes of one trained parameter. Masters and moments are counted for its owner: each rank of the group
// that shares a parameter owns a part of it.
struct ParameterBytes {
  int64_t weight, gradient, master;
  double state;
  double total() const { return static_cast<double>(weight + gradient + master) + state; }
};

ParameterBytes parameter_bytes(const RunSpec& run) {
  // These are the weights of quantised products, where they are held in 8 bits.
  const bool is_held = run.precision.weights == PrecisionChoice::recipe;
  const DType weights = is_held ? DType::f8_e4m3 : run.precision.compute;
  const double in_f32 = block_states(run).share_in_f32();
  const auto moments = static_cast<double>(num_moments(run.optimizer));
  return {.weight = size_of(weights),
          .gradient = run.optimizer.grad == GradFormat::bf16 ? 2 : 4,
          .master = master_bytes(run.optimizer, weights),
          .state = state_bytes(run.optimizer) * (1 - in_f32) + 4.0 * moments * in_f32};
}

// has_states_on_host: of some parameter.
std::string offload_text(const OptimizerSpec& o, bool has_states_on_host) {
  if (!has_states_on_host) return o.offload_grad ? "; the gradient is in host memory" : "";
  const std::string text =
      fmt::format("; {} in host memory", o.offload_grad ? "gradient, master and state are" : "master and state are");
  if (o.offload_buffer.value_or(0) == 0) return text;
  return fmt::format("{}, except {} GiB of master and state (optimizer.offload_buffer) on the GPU", text,
                     *o.offload_buffer);
}

std::string parameter_text(const Resolved& r) {
  const RunSpec& run = r.run;
  const ParameterBytes b = parameter_bytes(run);
  return fmt::format(
      "{:.4g} bytes: weight {} and gradient {}, and on the rank that owns it master {} and state {:.4g}{}{}", b.total(),
      b.weight, b.gradient, b.master, b.state, offload_text(run.optimizer, r.has_states_on_host),
      run.offload_weights ? "; the weights of layers are in host memory" : "");
}

nlohmann::ordered_json parameter_json(const RunSpec& run) {
  const ParameterBytes b = parameter_bytes(run);
  return {{"weight", b.weight}, {"gradient", b.gradient}, {"master", b.master}, {"state", b.state}};
}

nlohmann::ordered_json estimates_json(const ExchangeEstimates& estimates) {
  nlohmann::ordered_json json;
  for (const DispatcherKind kind : {DispatcherKind::allgather, DispatcherKind::alltoall, DispatcherKind::two_level}) {
    const ExchangeEstimate& e = estimates.of(kind);
    json[name_of(kind)] = {{"across_bytes", e.across_bytes}, {"inside_bytes", e.inside_bytes}, {"seconds", e.seconds}};
  }
  json["rates"] = estimates.rates;
  return json;
}

MemoryCheck memory_check(const Resolved& r) {
  const PinnedMemory pinned = pinned_of_machine(r.mesh, r.pinned_of_stage, r.ranks_per_machine);
  std::optional<AcceleratorInfo> gpu;
  if (r.run.device == DeviceKind::cuda && Accelerator::count() > 0) gpu = Accelerator::describe(0);
  return check_rank_memory(*r.engine, r.run, r.mesh.world(), pinned, available_memory_bytes(), gpu);
}

std::vector<std::string> notes(const Resolved& r) {
  std::vector<std::string> texts;
  for (const RunNote& note : run_notes(r.run, r.mesh.world())) texts.push_back(note.text);
  if (const auto note = block_states_note(r.run)) texts.push_back(note->text);
  for (const std::string& note : hopper_notes(r.run)) texts.push_back(note);
  if (chooses_buffer(r.run))
    texts.emplace_back(
        "optimizer.offload_buffer = \"auto\" counts as 0 here, since the memory of the GPU is not known; `train` chooses "
        "it for the GPU that it finds; set memory.fit to choose it here");
  if (const std::string products = gpu_products_text(r.run, r.knows_gpus); !products.empty()) texts.push_back(products);
  return texts;
}

nlohmann::ordered_json memory_check_json(const Resolved& r) {
  const MemoryCheck check = memory_check(r);
  nlohmann::ordered_json json{{"needed_bytes", check.needed_bytes}, {"text", check.text}};
  if (check.fits) json["fits"] = *check.fits;
  return json;
}

void print_resolved_json(const Resolved& r) {
  const ModelSpec& m = r.run.model;
  const ModelCatalog catalog = r.engine->model().whole_catalog();
  nlohmann::ordered_json provenance(r.run.provenance);
  nlohmann::ordered_json object{{"recipe", to_toml(r.run, /*with_provenance=*/false)},
                                {"provenance", provenance},
                                {"parameters", m.num_parameters()},
                                {"active_parameters", m.num_active_parameters()},
                                {"trained_parameters", catalog.num_trained()},
                                {"frozen_parameters", catalog.num_frozen()},
                                {"train_flops_per_token", m.train_flops_per_token(r.run.train.seq_len)},
                                {"mesh",
                                 {{"tp", r.mesh.tp},
                                  {"cp", r.mesh.cp},
                                  {"dp", r.mesh.dp},
                                  {"pp", r.mesh.pp},
                                  {"etp", r.mesh.etp},
                                  {"ep", r.mesh.ep},
                                  {"edp", r.mesh.edp}}}};
  object["dispatcher"] = r.dispatcher.name;
  object["dispatcher_reason"] = r.dispatcher.reason;
  if (r.dispatcher.estimates) object["dispatcher_estimates"] = estimates_json(*r.dispatcher.estimates);
  object["groups"] = groups_json(r.mesh);
  object["memory_bytes"] = memory_json(r.engine->plan());
  object["memory_beside_bytes"] = beside_json(r);
  object["parameter_bytes"] = parameter_json(r.run);
  object["memory_rank"] = r.rank;
  object["memory_scratch_of"] = name_of(r.engine->spec().target);
  object["memory_cudnn"] = r.engine->spec().target == DeviceKind::cuda && plans_cudnn(gpu_kernels(r.engine->spec()));
  object["memory_verdict"] = memory_check_json(r);
  if (!r.fit.empty()) object["memory_fit"] = r.fit;
  object["notes"] = notes(r);
  object["exportable"] = m.family != "moebius";
  object["missing_to_train"] = missing_to_train(r.run);
  print_json(object);
}

void print_comment(const std::string& text) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    fmt::print("# {}\n", text.substr(begin, end - begin));
    begin = end + 1;
  }
}

// Prints whether the recipe can be trained on this machine. It is printed last, so that it is seen.
void print_memory_check(const Resolved& r) {
  for (const std::string& line : data_lines(r.run)) print_comment("data       " + line);
  print_comment("export     " + export_text(r.run.model));
  print_comment("fits       " + memory_check(r).text);
  if (!r.fit.empty()) print_comment("chosen     " + r.fit);
  for (const std::string& note : notes(r)) print_comment("note       " + note);
  for (const std::string& line : missing_to_train(r.run)) print_comment("to train   " + line);
}

// Prints a recipe that reads back; all else is in comments.
void print_resolved(const Resolved& r, bool changed) {
  const ModelSpec& m = r.run.model;
  fmt::print("{}\n", changed ? changed_toml(r.run) : to_toml(r.run, /*with_provenance=*/true));
  fmt::print("# model      {} parameters, {} active per token; {:.3f} GFLOP per training token at sequence length {}\n",
             count_text(m.num_parameters()), count_text(m.num_active_parameters()),
             m.train_flops_per_token(r.run.train.seq_len) / 1e9, r.run.train.seq_len);
  const ModelCatalog catalog = r.engine->model().whole_catalog();
  if (const int64_t trained = catalog.num_trained(), frozen = catalog.num_frozen(); frozen > 0)
    fmt::print("# trained    {} parameters{}, {:.3f} % of all; {} are frozen\n", count_text(trained),
               r.run.lora.is_on() ? " of adapters" : "",
               100.0 * static_cast<double>(trained) / static_cast<double>(trained + frozen), count_text(frozen));
  if (r.mesh.world() == 1) {
    fmt::print("# mesh       one rank\n");
  } else {
    print_comment(layout_table(r.mesh));
  }
  print_comment(fmt::format("dispatcher {}: {}", r.dispatcher.name, r.dispatcher.reason));
  if (const std::string unused = unused_machine_text(r.run, r.dispatcher); !unused.empty()) print_comment(unused);
  if (const std::string rows = expert_rows_text(r.run); !rows.empty()) print_comment("rows       " + rows);
  if (r.mesh.world() > 1) fmt::print("# memory     of rank {}, which needs the most\n", r.rank);
  print_comment(r.engine->plan().table());
  print_comment("parameter  " + parameter_text(r));
  print_comment("memory     " + unplanned_memory_text(r));
  print_memory_check(r);
}

int run(const Options& o) {
  if (o.keys) {
    o.json ? print_json(recipe_reference_json()) : fmt::print("{}", recipe_reference());
    return 0;
  }
  MOEBIUS_CHECK(usage, !o.recipe.empty(), "config: expected a recipe, or --keys for what one may hold; got neither");
  MOEBIUS_CHECK(usage, o.ranks >= 1, "--ranks: expected at least 1; got {}", o.ranks);
  MOEBIUS_CHECK(usage, o.ranks_per_machine >= 1, "--ranks-per-machine: expected at least 1; got {}",
                o.ranks_per_machine);
  const Resolved r = resolve(o);
  o.json ? print_resolved_json(r) : print_resolved(r, o.changed);
  return 0;
}

}  // namespace

void add_config(Cli& cli) {
  Command* command = cli.program.add_subcommand(
      "config",
      "prints the resolved recipe with the origin of each value, the model's size, the mesh and the memory plan");
  const auto o = std::make_shared<Options>();
  command->add_option("RECIPE", o->recipe, "the recipe, a TOML file");
  command->add_option("--set", o->overrides, "SECTION.KEY=VALUE, instead of the recipe's value; may be repeated")
      ->repeatable();
  command->add_option("--ranks", o->ranks, "number of ranks of the run")->capture_default_str();
  command->add_option("--ranks-per-machine", o->ranks_per_machine, "number of ranks that start on each machine")
      ->capture_default_str();
  command->add_option("--machine", o->machine, kMachineOptionText);
  command->add_flag("--changed", o->changed, "print only the values that are given, not the defaults");
  command->add_flag("--keys", o->keys,
                    "print every key of a recipe and what it does, as Markdown (docs/reference/recipe.md)");
  add_json_option(*command, o->json);
  add_example(*command, "moebius config recipes/qwen3_30b_a3b.toml --ranks 16 --set parallel.ep=8");
  command->callback([&cli, o] { cli.run = [o] { return run(*o); }; });
}

}  // namespace moebius
