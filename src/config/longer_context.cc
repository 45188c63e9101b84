#include "config/longer_context.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace moebius {

using nlohmann::json;

namespace {

constexpr const char *kPositions = "max_position_embeddings", *kTrained = "original_max_position_embeddings",
                     *kTheta = "rope_theta", *kTable = "rope_scaling";
constexpr const char* kTables[] = {"rope_parameters", kTable};

// Returns the entry of the old tables, or of the config itself; null where there is none.
json old_value(const json& config, const char* name) {
  for (const char* table : kTables) {
    const auto found = config.find(table);
    if (found != config.end() && found->is_object() && found->contains(name)) return found->at(name);
  }
  return config.value(name, json());
}

void set_theta(json& config, const json& theta) {
  for (const char* table : kTables)
    if (config.contains(table) && config[table].is_object()) config[table].erase(kTheta);
  config[kTheta] = theta;
}

bool needs_trained_positions(const json& table) {
  const json type = table.value("rope_type", table.value("type", json()));
  return (type == "yarn" || type == "llama3") && !table.contains(kTrained);
}

void set_table(json& config, json table) {
  const json theta = old_value(config, kTheta), trained = old_value(config, kTrained);
  if (needs_trained_positions(table)) {
    if (!trained.is_null())
      table[kTrained] = trained;
    else if (config.contains(kPositions))
      table[kTrained] = config[kPositions];
  }
  config.erase(kTrained);
  for (const char* name : kTables) config.erase(name);
  if (!theta.is_null()) config[kTheta] = theta;
  config[kTable] = std::move(table);
}

}  // namespace

bool extends_context(const std::string& hf_key) { return hf_key == kPositions || hf_key == kTheta || hf_key == kTable; }

json with_longer_context(json config, const json& changes) {
  if (changes.contains(kTable)) set_table(config, changes[kTable]);
  if (changes.contains(kTheta)) set_theta(config, changes[kTheta]);
  if (changes.contains(kPositions)) config[kPositions] = changes[kPositions];
  return config;
}

}  // namespace moebius
