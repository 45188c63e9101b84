#include "config/hf/rope.h"

#include <array>

namespace moebius {

using nlohmann::json;

namespace {

struct RopeName {
  const char* name;
  RopeType type;
};
constexpr std::array<RopeName, 4> kTypes{{{"default", RopeType::plain},
                                          {"linear", RopeType::linear},
                                          {"llama3", RopeType::llama3},
                                          {"yarn", RopeType::yarn}}};

// One table of a config.json. Its values are checked as they are read.
class RopeTableReader {
 public:
  RopeTableReader(const HfReader& r, const char* key) : r_(r), key_(key), table_(r.get(key, json::object())) {}

  const char* key() const { return key_; }
  bool empty() const { return table_.empty(); }
  bool has(const char* name) const { return table_.contains(name) && !table_.at(name).is_null(); }
  double number(const char* name, double fallback, const ValueRule& rule) const {
    if (!has(name)) return fallback;
    if (!rule.accepts(table_.at(name))) r_.fail("{}.{} must be {}; got {}", key_, name, rule.expects, value(name));
    return table_.at(name).get<double>();
  }
  // transformers takes a null for false.
  bool flag(const char* name, bool fallback) const {
    if (!has(name)) return fallback && !table_.contains(name);
    if (!table_.at(name).is_boolean()) r_.fail("{}.{} must be true or false; got {}", key_, name, value(name));
    return table_.at(name).get<bool>();
  }
  void require(const char* name) const {
    if (!has(name)) r_.fail("{}.{} must be given for RoPE of type {}", key_, name, shown(type_value()));
  }
  // Some keys have no meaning for null: transformers fails to compute with it.
  void refuse_null(const char* name) const {
    if (table_.contains(name) && !has(name)) r_.fail("{}.{} must not be null; give it, or remove the key", key_, name);
  }
  [[noreturn]] void refuse_mscale() const {
    r_.fail("{}.mscale_all_dim must be 0 for RoPE of type {}, which scales no attention here; got {}", key_,
            shown(type_value()), value("mscale_all_dim"));
  }
  // A table without a factor has the one that follows from the two lengths.
  void require_stretch(double factor, const ModelSpec& m, int64_t original) const {
    if (factor >= 1) return;
    if (has("factor"))
      r_.fail(
          "{}.factor must be at least 1 for RoPE of type {}, which stretches the positions to factor * "
          "original_max_position_embeddings; got {}",
          key_, shown(type_value()), value("factor"));
    r_.fail(
        "{} has no factor, and RoPE of type {} takes max_position_embeddings / original_max_position_embeddings = "
        "{} / {} = {}, which must be at least 1; correct them, or give the factor",
        key_, shown(type_value()), m.max_position_embeddings, original, factor);
  }
  void require_order(const char* low_name, double low, const char* high_name, double high) const {
    if (high <= low) r_.fail("{}.{} must be above {} = {}; got {}", key_, high_name, low_name, low, high);
  }
  RopeType type() const {
    for (const RopeName& each : kTypes) {
      if (type_value() == each.name) return each.type;
    }
    r_.fail("{} of type {} is not computed; expected \"default\", \"linear\", \"llama3\" or \"yarn\"", key_,
            shown(type_value()));
  }
  void refuse_the_rest() const {
    if (table_.value("partial_rotary_factor", json(1.0)) != 1.0) r_.fail("{}.partial_rotary_factor must be 1", key_);
    refuse_null("rope_theta");
    refuse_null("original_max_position_embeddings");
    for (const auto& [name, entry] : table_.items()) {
      if (entry.is_object()) r_.fail("{}.{} gives RoPE per kind of layer; expected one for all layers", key_, name);
    }
  }

 private:
  json type_value() const { return table_.value("rope_type", table_.value("type", json("default"))); }
  std::string value(const char* name) const { return shown(table_.at(name)); }

  const HfReader& r_;
  const char* key_;
  json table_;
};

// Returns the value in the table, or the one in the config itself.
int64_t original_positions(const HfReader& r, const RopeTableReader& t, const ModelSpec& m) {
  const char* name = "original_max_position_embeddings";
  const int64_t alone = r.get(name, int64_t{0});
  const auto in_table = static_cast<int64_t>(t.number(name, 0, positive_count()));
  if (alone != 0 && in_table != 0 && alone != in_table)
    r.fail("{} {} and {}.{} {} contradict each other; keep one", name, alone, t.key(), name, in_table);
  if (in_table != 0) return in_table;
  return alone != 0 ? alone : m.max_position_embeddings;
}

RopeScaling read_scaling(const HfReader& r, const RopeTableReader& t, const ModelSpec& m) {
  RopeScaling s{.type = t.type()};
  t.refuse_the_rest();
  if (s.type == RopeType::plain) return s;
  const ValueRule positive = number_above(0), any = number_at_least(0);
  if (s.type != RopeType::linear) s.original_positions = original_positions(r, t, m);
  // The classes of latent attention would scale its softmax for every type but "default".
  if (s.type != RopeType::yarn && t.number("mscale_all_dim", 0, any) != 0) t.refuse_mscale();
  // YaRN may leave the factor to the two lengths.
  const double by_length = s.type == RopeType::yarn ? double(m.max_position_embeddings) / s.original_positions : 0;
  if (s.type != RopeType::yarn) t.require("factor");
  s.factor = t.number("factor", by_length, positive);
  if (s.type == RopeType::yarn) t.require_stretch(s.factor, m, s.original_positions);
  if (s.type == RopeType::llama3) {
    for (const char* name : {"low_freq_factor", "high_freq_factor"}) t.require(name);
    s.low_freq_factor = t.number("low_freq_factor", 0, positive);
    s.high_freq_factor = t.number("high_freq_factor", 0, positive);
    t.require_order("low_freq_factor", s.low_freq_factor, "high_freq_factor", s.high_freq_factor);
  }
  if (s.type == RopeType::yarn) {
    s.beta_fast = t.number("beta_fast", s.beta_fast, positive);
    s.beta_slow = t.number("beta_slow", s.beta_slow, positive);
    t.require_order("beta_slow", s.beta_slow, "beta_fast", s.beta_fast);
    s.truncate = t.flag("truncate", s.truncate);
    s.attention_factor = t.number("attention_factor", 0, positive);
    s.mscale = t.number("mscale", 0, any);
    s.mscale_all_dim = t.number("mscale_all_dim", 0, any);
  }
  return s;
}

double read_theta(const HfReader& r, const RopeTableReader& t, double fallback) {
  const double in_table = t.number("rope_theta", 0, find_hf_key("rope_theta")->rule);
  const double alone = r.get("rope_theta", 0.0);
  if (in_table != 0 && alone != 0 && in_table != alone)
    r.fail("rope_theta {} and {}.rope_theta {} contradict each other; keep one", alone, t.key(), in_table);
  return in_table != 0 ? in_table : alone != 0 ? alone : fallback;
}

void read_table(const HfReader& r, const RopeTableReader& t, ModelSpec& m) {
  m.rope_scaling = read_scaling(r, t, m);
  m.rope_theta = read_theta(r, t, m.rope_theta);
}

json known_values(const RopeScaling& s) {
  json table{{"factor", s.factor}};
  if (s.type != RopeType::linear) table["original_max_position_embeddings"] = s.original_positions;
  if (s.type == RopeType::llama3) {
    table["low_freq_factor"] = s.low_freq_factor;
    table["high_freq_factor"] = s.high_freq_factor;
  }
  if (s.type == RopeType::yarn) {
    table["beta_fast"] = s.beta_fast;
    table["beta_slow"] = s.beta_slow;
    table["truncate"] = s.truncate;
    if (s.attention_factor != 0) table["attention_factor"] = s.attention_factor;
    if (s.mscale != 0) table["mscale"] = s.mscale;
    if (s.mscale_all_dim != 0) table["mscale_all_dim"] = s.mscale_all_dim;
  }
  return table;
}

}  // namespace

void read_rope(const HfReader& r, ModelSpec& m) {
  const RopeTableReader v4(r, "rope_scaling"), v5(r, "rope_parameters");
  if (v4.empty() && !r.has("rope_parameters")) {  // there is no table
    r.read("rope_theta", m.rope_theta);
    if (m.rope_scaling.type != RopeType::plain)
      r.read("original_max_position_embeddings", m.rope_scaling.original_positions);
    return;
  }
  ModelSpec by_v4 = m;
  read_table(r, v4, by_v4);
  read_table(r, v5, m);
  if (v4.empty()) return;
  const bool same = by_v4.rope_scaling == m.rope_scaling && by_v4.rope_theta == m.rope_theta;
  if (!v5.empty() && !same) r.fail("rope_scaling and rope_parameters contradict each other; keep one");
  m = by_v4;
}

std::vector<std::string> rope_table_keys() {
  return {"rope_theta",
          "rope_type",
          "type",
          "factor",
          "original_max_position_embeddings",
          "low_freq_factor",
          "high_freq_factor",
          "beta_fast",
          "beta_slow",
          "truncate",
          "attention_factor",
          "mscale",
          "mscale_all_dim",
          "partial_rotary_factor"};
}

json rope_scaling_value(const ModelSpec& m) {
  // The class of gpt_oss takes a missing table for YaRN.
  const bool writes_default = m.family == "gpt_oss";
  if (m.rope_scaling.type == RopeType::plain) return writes_default ? json{{"rope_type", "default"}} : json();
  json table = json::object();
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (m.source && m.source->contains(key) && m.source->at(key).is_object()) table.update(m.source->at(key));
  }
  for (const std::string& known : rope_table_keys()) table.erase(known);
  table.update(known_values(m.rope_scaling));
  for (const RopeName& each : kTypes) {
    if (each.type == m.rope_scaling.type) table["rope_type"] = each.name;
  }
  table["type"] = table["rope_type"];  // the key that DeepSeek's own code and older readers look for
  return table;
}

}  // namespace moebius
