#include "config/recipe/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <type_traits>
#include <utility>

#include "config/dispatcher_choice.h"
#include "config/hf/config.h"
#include "config/hf/families.h"
#include "config/hf/keys.h"
#include "config/recipe/memory_keys.h"

namespace moebius {

using nlohmann::json;

namespace {

using enum Resume;

template <class T>
using Names = std::type_identity_t<std::vector<std::pair<std::string, T>>>;

// Makes the keys of one section. get(spec) is the struct that holds its fields, for a const and for
// a mutable RunSpec.
template <class Get>
struct Section {
  std::string name;
  Get get;

  // The value is the field.
  template <class T, class Spec>
  RecipeKey key(const std::string& key, T Spec::*field, ValueRule rule, Resume resume = fixed) const {
    return {name + "." + key, std::move(rule), [g = get, field](RunSpec& s, const json& v) { v.get_to(g(s).*field); },
            [g = get, field](const RunSpec& s) { return json(g(s).*field); }, resume};
  }

  // The value is the name of the field's value.
  template <class T, class Spec>
  RecipeKey named(const std::string& key, T Spec::*field, Names<T> names, Resume resume = fixed) const {
    std::vector<std::string> known;
    for (const auto& [text, value] : names) known.push_back(text);
    const auto read = [g = get, field, names](RunSpec& s, const json& v) {
      for (const auto& [text, value] : names) {
        if (v == text) g(s).*field = value;
      }
    };
    const auto write = [g = get, field, names](const RunSpec& s) {
      for (const auto& [text, value] : names) {
        if (g(s).*field == value) return json(text);
      }
      return json("a value without a name");  // which the rule refuses
    };
    return {name + "." + key, one_of(known), read, write, resume};
  }
};
template <class Get>
Section(const char*, Get) -> Section<Get>;

template <class Get>
Section(std::string, Get) -> Section<Get>;  // clang 14 does not deduce aggregates

RecipeKey required(RecipeKey key) {
  key.required = true;
  return key;
}

// Returns a text that is not printed if it is empty.
template <class Spec, class Get>
RecipeKey optional_text(const std::string& name, std::string Spec::*field, Get get, Resume resume) {
  return {name, any_text(), [get, field](RunSpec& s, const json& v) { v.get_to(get(s).*field); },
          [get, field](const RunSpec& s) { return (get(s).*field).empty() ? json() : json(get(s).*field); }, resume};
}

Names<DispatcherKind> dispatcher_names() {
  Names<DispatcherKind> names;
  for (const DispatcherKind kind : kDispatcherKinds) names.emplace_back(name_of(kind), kind);
  return names;
}

std::vector<RecipeKey> run_keys() {
  const Section run{"run", [](auto& s) -> decltype(auto) { return (s); }};
  return {
      run.key("dir", &RunSpec::dir, any_text(), free),
      run.key("seed", &RunSpec::seed, integer_in(0, INT64_MAX)),
      run.named("device", &RunSpec::device, {{"cpu", DeviceKind::cpu}, {"cuda", DeviceKind::cuda}}, free),
      run.key("threads", &RunSpec::threads, integer_in(0, 1 << 16), free),
      run.key("graph", &RunSpec::graph, any_boolean(), free),
      run.named("kernels", &RunSpec::kernels, {std::begin(kKernelChoiceNames), std::end(kKernelChoiceNames)}, free),
  };
}

bool is_json_object(const json& text) {
  return text.is_string() && json::parse(text.get<std::string>(), nullptr, false).is_object();
}

// Returns the text of the whole config.json that the model came from.
RecipeKey model_config_key() {
  return {"model.config",
          {"the text of a JSON object", is_json_object},
          [](RunSpec& s, const json& v) { s.model.source = json::parse(v.get<std::string>()); },
          [](const RunSpec& s) {
            return s.model.source
                       ? json(hf_from_model_spec(s.model).dump(-1, ' ', false, json::error_handler_t::replace))
                       : json();
          },
          free};
}

// TOML has no null, and a key that is missing has the default of the family. So queries without a latent are written as
// 0 if the default is a latent.
json written_value(const ModelSpec& model, const std::string& key) {
  for (const auto& [name, value] : hf_values(model)) {
    if (name != key) continue;
    const bool is_none = key == "q_lora_rank" && value.is_null();
    return is_none && find_family(model.family)->defaults.q_lora_rank > 0 ? json(0) : value;
  }
  return json();
}

void add_to_source(ModelSpec& model, const std::string& key, const json& value) {
  json source = model.source ? *model.source : json::object();
  source[key] = value;
  model.source = std::move(source);
}

std::vector<RecipeKey> model_keys() {
  const auto run = [](auto& s) -> decltype(auto) { return (s); };
  std::vector<RecipeKey> keys = {optional_text("model.hf", &RunSpec::model_hf, run, free), model_config_key(),
                                 optional_text("model.init_from", &RunSpec::init_from, run, fixed)};
  for (const HfKey& hf : hf_keys()) {
    keys.push_back({"model." + hf.name, hf.rule,
                    [name = hf.name](RunSpec& s, const json& v) { add_to_source(s.model, name, v); },
                    [name = hf.name](const RunSpec& s) { return written_value(s.model, name); }});
  }
  return keys;
}

bool is_dataset(const json& v) {
  if (v.is_string()) return !v.get<std::string>().empty();
  if (!v.is_object() || !v.contains("prefix") || !v["prefix"].is_string() || v["prefix"] == "") return false;
  return v.size() == 1 || (v.size() == 2 && v.contains("weight") && number_above(0).accepts(v["weight"]));
}

DatasetSpec read_dataset(const json& v) {
  if (v.is_string()) return {.prefix = v.get<std::string>()};
  return {.prefix = v["prefix"].get<std::string>(), .weight = v.value("weight", 1.0)};
}

RecipeKey datasets(const std::string& name, std::vector<DatasetSpec> DataSpec::*field, Resume resume) {
  ValueRule rule{"a list of \"PREFIX\" or {prefix = \"PREFIX\", weight = W}, W above 0",
                 [](const json& v) { return v.is_array() && std::all_of(v.begin(), v.end(), is_dataset); }};
  const auto read = [field](RunSpec& s, const json& v) {
    (s.data.*field).clear();
    for (const json& dataset : v) (s.data.*field).push_back(read_dataset(dataset));
  };
  const auto write = [field](const RunSpec& s) {
    json list = json::array();
    for (const DatasetSpec& d : s.data.*field) list.push_back({{"prefix", d.prefix}, {"weight", d.weight}});
    return list;
  };
  return {name, std::move(rule), read, write, resume};
}

std::vector<RecipeKey> data_keys() {
  const Section data{"data", [](auto& s) -> decltype(auto) { return (s.data); }};
  return {
      datasets("data.train", &DataSpec::train, fixed),
      datasets("data.valid", &DataSpec::valid, free),
      data.key("tokenizer", &DataSpec::tokenizer, any_text()),
      data.key("separate_documents", &DataSpec::separate_documents, any_boolean()),
      data.key("pack_documents", &DataSpec::pack_documents, any_boolean()),
      data.key("order_by_cost", &DataSpec::order_by_cost, any_boolean()),
  };
}

// Returns the hint for a text in place of a list of patterns: "q_proj, v_proj" of other software too.
std::string list_hint(const json& v) {
  if (!v.is_string()) return "";
  const auto text = v.get<std::string>();
  if (text == "all-linear" || text == "all") return "; write [\"*\"] for all matrices that can have an adapter";
  json list = json::array();
  for (size_t at = 0; at < text.size();) {
    const size_t begin = text.find_first_not_of(", ", at);
    if (begin == text.npos) break;
    at = std::min(text.find_first_of(", ", begin), text.size());
    list.push_back(text.substr(begin, at - begin));
  }
  return list.empty() ? "" : "; write " + list.dump();
}

ValueRule name_patterns() {
  return {"a list of name patterns",
          [](const json& v) {
            return v.is_array() && std::all_of(v.begin(), v.end(), [](const json& each) {
                     return each.is_string() && !each.get<std::string>().empty();
                   });
          },
          list_hint};
}

std::vector<RecipeKey> train_keys() {
  const Section train{"train", [](auto& s) -> decltype(auto) { return (s.train); }};
  return {
      required(train.key("steps", &LoopSpec::steps, positive_count(), free)),
      required(train.key("global_batch", &LoopSpec::global_batch, positive_count())),
      required(train.key("micro_batch", &LoopSpec::micro_batch, positive_count())),
      required(train.key("seq_len", &LoopSpec::seq_len, positive_count())),
      train.key("eval_every", &LoopSpec::eval_every, count_or_zero(), free),
      train.key("eval_batches", &LoopSpec::eval_batches, count_or_zero(), free),
      train.key("freeze", &LoopSpec::freeze, name_patterns()),
      train.key("mtp_coeff", &LoopSpec::mtp_coeff, float_or_zero()),
  };
}

std::vector<RecipeKey> optimizer_keys() {
  const Section optimizer{"optimizer", [](auto& s) -> decltype(auto) { return (s.optimizer); }};
  return {
      optimizer.named("name", &OptimizerSpec::kind,
                      {{"adamw", OptimizerKind::adamw}, {"sgd", OptimizerKind::sgd}, {"muon", OptimizerKind::muon}}),
      optimizer.named("state", &OptimizerSpec::state,
                      {{"f32", StateFormat::f32}, {"bf16", StateFormat::bf16}, {"8bit", StateFormat::blocks_8bit}},
                      free),
      optimizer.named("master", &OptimizerSpec::master,
                      {{"f32", MasterFormat::f32},
                       {"bf16_remainder", MasterFormat::bf16_remainder},
                       {"bf16_stochastic", MasterFormat::bf16_stochastic}},
                      free),
      optimizer.named("grad", &OptimizerSpec::grad, {{"f32", GradFormat::f32}, {"bf16", GradFormat::bf16}}, free),
      optimizer.key("offload", &OptimizerSpec::offload, any_boolean(), free),
      offload_buffer_key(),
      optimizer.key("offload_grad", &OptimizerSpec::offload_grad, any_boolean(), free),
      optimizer.key("fuse_grad", &OptimizerSpec::fuse_grad, any_boolean(), free),
      required(optimizer.key("lr", &OptimizerSpec::lr, float_above_zero())),
      optimizer.key("min_lr", &OptimizerSpec::min_lr, float_or_zero()),
      optimizer.key("warmup_steps", &OptimizerSpec::warmup_steps, count_or_zero()),
      optimizer.key("decay_steps", &OptimizerSpec::decay_steps, count_or_zero()),
      optimizer.named("schedule", &OptimizerSpec::schedule,
                      {{"constant", LrSchedule::constant},
                       {"cosine", LrSchedule::cosine},
                       {"linear", LrSchedule::linear},
                       {"wsd", LrSchedule::wsd}}),
      optimizer.key("weight_decay", &OptimizerSpec::weight_decay, float_or_zero()),
      optimizer.key("beta1", &OptimizerSpec::beta1, float_in_unit()),
      optimizer.key("beta2", &OptimizerSpec::beta2, float_in_unit()),
      optimizer.key("eps", &OptimizerSpec::eps, float_above_zero()),
      optimizer.key("momentum", &OptimizerSpec::momentum, float_in_unit()),
      optimizer.key("clip", &OptimizerSpec::clip, float_or_zero()),
      optimizer.key("qk_clip", &OptimizerSpec::qk_clip, float_or_zero()),
  };
}

struct Balance {
  std::string name;
  bool BalanceSpec::*flag;
};

const std::vector<Balance>& balances() {
  static const std::vector<Balance> all = {{"aux", &BalanceSpec::aux},
                                           {"seq_aux", &BalanceSpec::seq_aux},
                                           {"global_aux", &BalanceSpec::global_aux},
                                           {"bias", &BalanceSpec::bias},
                                           {"sinkhorn", &BalanceSpec::sinkhorn}};
  return all;
}

bool is_balance_name(const json& v) {
  return std::any_of(balances().begin(), balances().end(), [&](const Balance& b) { return v == b.name; });
}

bool is_balance(const json& v) {
  if (!v.is_array()) return v == "none" || is_balance_name(v);
  const std::set<json> once(v.begin(), v.end());
  return !v.empty() && once.size() == v.size() && std::all_of(v.begin(), v.end(), is_balance_name);
}

void read_balance(RunSpec& s, const json& v) {
  const json names = v.is_array() ? v : json::array({v});
  for (const Balance& b : balances()) s.moe.*b.flag = std::find(names.begin(), names.end(), b.name) != names.end();
}

json write_balance(const RunSpec& s) {
  json names = json::array();
  for (const Balance& b : balances()) {
    if (s.moe.*b.flag) names.push_back(b.name);
  }
  if (names.size() > 1) return names;
  return names.empty() ? json("none") : names[0];
}

std::vector<RecipeKey> moe_keys() {
  const Section moe{"moe", [](auto& s) -> decltype(auto) { return (s.moe); }};
  const std::string expects =
      "\"none\", or one or a list without repeats of \"aux\", \"seq_aux\", \"global_aux\", \"bias\", \"sinkhorn\"";
  return {
      {"moe.balance", {expects, is_balance}, read_balance, write_balance},
      moe.key("aux_coeff", &BalanceSpec::aux_coeff, float_or_zero()),
      moe.key("z_coeff", &BalanceSpec::z_coeff, float_or_zero()),
      moe.key("bias_rate", &BalanceSpec::bias_rate, float_or_zero()),
      // A far lower value already gives an expert the capacity for every token.
      moe.key("capacity_factor", &BalanceSpec::capacity_factor, float_or_zero(1e6)),
      moe.key("rank_rows_factor", &BalanceSpec::rank_rows_factor, float_or_zero(1e6), free),
      moe.named("drop_policy", &BalanceSpec::drop_policy,
                {{"probs", DropPolicy::probs}, {"position", DropPolicy::position}}),
      moe.key("jitter", &BalanceSpec::jitter, float_in_unit()),
      moe.named("router_dtype", &BalanceSpec::router_f32, {{"f32", true}, {"compute", false}}),
      moe.key("force_balance", &BalanceSpec::force_balance, any_boolean()),
  };
}

Names<CpComm> cp_comm_names() {
  return {{"allgather", CpComm::allgather},
          {"ring", CpComm::ring},
          {"alltoall", CpComm::alltoall},
          {"hierarchical", CpComm::hierarchical}};
}

// Without a value it is cp_comm.
RecipeKey cp_comm_window_key() {
  std::vector<std::string> names;
  for (const auto& [name, comm] : cp_comm_names()) names.push_back(name);
  const auto read = [](RunSpec& s, const json& v) {
    for (const auto& [name, comm] : cp_comm_names()) {
      if (v == name) s.parallel.cp_comm_window = comm;
    }
  };
  const auto write = [](const RunSpec& s) {
    for (const auto& [name, comm] : cp_comm_names()) {
      if (s.parallel.cp_comm_window == comm) return json(name);
    }
    return json();
  };
  return {"parallel.cp_comm_window", one_of(names), read, write, free};
}

// A shard on one rank would be whole, so 1 is no value.
ValueRule shard_ranks() {
  const ValueRule count = count_or_zero();
  return {fmt::format("0, or a whole number from 2 to {}", kMaxCount),
          [count](const nlohmann::json& v) { return count.accepts(v) && v != 1; }};
}

std::vector<RecipeKey> parallel_keys() {
  const Section parallel{"parallel", [](auto& s) -> decltype(auto) { return (s.parallel); }};
  return {
      parallel.key("tp", &ParallelSpec::tp, positive_count(), free),
      parallel.key("cp", &ParallelSpec::cp, positive_count(), free),
      parallel.named("cp_comm", &ParallelSpec::cp_comm, cp_comm_names(), free),
      cp_comm_window_key(),
      parallel.key("cp_inner", &ParallelSpec::cp_inner, positive_count(), free),
      parallel.key("dynamic_cp", &ParallelSpec::dynamic_cp, any_boolean(), free),
      parallel.key("pp", &ParallelSpec::pp, positive_count(), free),
      parallel.key("vpp", &ParallelSpec::vpp, positive_count(), free),
      parallel.key("ep", &ParallelSpec::ep, positive_count(), free),
      parallel.key("etp", &ParallelSpec::etp, positive_count(), free),
      parallel.key("layout", &ParallelSpec::layout, any_text(), free),
      parallel.named("schedule", &ParallelSpec::schedule,
                     {{name_of(PipelineSchedule::one_f_one_b), PipelineSchedule::one_f_one_b},
                      {name_of(PipelineSchedule::zb_h1), PipelineSchedule::zb_h1}},
                     free),
      parallel.named("dispatcher", &ParallelSpec::dispatcher, dispatcher_names(), free),
      parallel.key("ranks_per_node", &ParallelSpec::ranks_per_node, integer_in(1, 8), free),
      parallel.named(
          "expert_overlap", &ParallelSpec::expert_overlap,
          {{"none", ExpertOverlap::none}, {"layer", ExpertOverlap::layer}, {"batch_split", ExpertOverlap::batch_split}},
          free),
      parallel.named("sums", &ParallelSpec::sums, {{"ranks", RankSums::ranks}, {"nccl", RankSums::nccl}}, free),
      parallel.key("fsdp", &ParallelSpec::fsdp, any_boolean(), free),
      parallel.key("fsdp_shard", &ParallelSpec::fsdp_shard, shard_ranks(), free),
      parallel.key("shard_gradients", &ParallelSpec::shard_gradients, any_boolean(), free),
      parallel.key("overlap", &ParallelSpec::overlap, any_boolean(), free),
  };
}

Names<PrecisionRecipe> recipe_names() { return {std::begin(kPrecisionRecipeNames), std::end(kPrecisionRecipeNames)}; }

Names<PrecisionChoice> precision_choices() {
  return {std::begin(kPrecisionChoiceNames), std::end(kPrecisionChoiceNames)};
}

std::vector<RecipeKey> policy_keys() {
  const Section precision{"precision", [](auto& s) -> decltype(auto) { return (s.precision); }};
  return {
      precision.named("compute", &PrecisionSpec::compute, {{"f32", DType::f32}, {"bf16", DType::bf16}}),
      precision.named("recipe", &PrecisionSpec::recipe, recipe_names(), free),
      precision.named("weight_gradients", &PrecisionSpec::weight_gradients,
                      {std::begin(kWeightGradientPrecisionNames), std::end(kWeightGradientPrecisionNames)}, free),
      precision.named("weights", &PrecisionSpec::weights, precision_choices(), free),
      precision.key("weight_copies", &PrecisionSpec::weight_copies, any_boolean(), free),
      precision.named("dispatch", &PrecisionSpec::dispatch, precision_choices(), free),
      precision.named("activations", &PrecisionSpec::activations, precision_choices(), free),
      precision.key("keep", &PrecisionSpec::keep, name_patterns(), free),
      recompute_key(),
      fit_key(),
      offload_key(),
      offload_fraction_key(),
      expert_rows_key(),
  };
}

std::vector<RecipeKey> lora_keys() {
  const Section lora{"lora", [](auto& s) -> decltype(auto) { return (s.lora); }};
  return {
      lora.key("rank", &LoraSpec::rank, integer_in(0, 1 << 16)),
      lora.key("alpha", &LoraSpec::alpha, float_above_zero()),
      lora.key("dropout", &LoraSpec::dropout, float_in_unit()),
      lora.key("targets", &LoraSpec::targets, name_patterns()),
      optional_text("lora.init_from", &LoraSpec::init_from, lora.get, fixed),
      lora.named("base", &LoraSpec::base,
                 {{"compute", LoraBase::compute}, {"fp8_block", LoraBase::fp8_block}, {"mxfp4", LoraBase::mxfp4}}),
  };
}

std::vector<RecipeKey> record_keys() {
  const Section checkpoint{"checkpoint", [](auto& s) -> decltype(auto) { return (s.checkpoint); }};
  const Section log{"log", [](auto& s) -> decltype(auto) { return (s.log); }};
  return {
      checkpoint.key("every", &CheckpointSpec::every, count_or_zero(), free),
      checkpoint.key("keep", &CheckpointSpec::keep, count_or_zero(), free),
      checkpoint.key("async", &CheckpointSpec::async_save, any_boolean(), free),
      checkpoint.key("resume", &CheckpointSpec::resume, any_boolean(), free),
      log.key("every", &LogSpec::every, positive_count(), free),
      log.key("tensorboard", &LogSpec::tensorboard, any_boolean(), free),
      log.key("precision", &LogSpec::precision, any_boolean(), free),
      log.key("trace", &LogSpec::trace, any_text(), free),
  };
}

std::vector<RecipeKey> make_table() {
  std::vector<RecipeKey> table;
  for (auto make : {run_keys, model_keys, data_keys, train_keys, optimizer_keys, moe_keys, parallel_keys, policy_keys,
                    lora_keys, record_keys}) {
    std::vector<RecipeKey> keys = make();
    std::move(keys.begin(), keys.end(), std::back_inserter(table));
  }
  return table;
}

}  // namespace

const std::vector<RecipeKey>& recipe_table() {
  static const std::vector<RecipeKey> table = make_table();
  return table;
}

const std::vector<RetiredKey>& retired_keys() {
  static const std::vector<RetiredKey> all = {
      {"run.deterministic", true, "every run is deterministic"},
  };
  return all;
}

std::string section_of(const std::string& name) { return name.substr(0, name.find('.')); }

}  // namespace moebius
