#include "config/json_object.h"

#include <nlohmann/json.hpp>

namespace moebius {

JsonObject::JsonObject(nlohmann::json object) : value_(std::make_shared<const nlohmann::json>(std::move(object))) {}

bool JsonObject::operator==(const JsonObject& other) const {
  if (!value_ || !other.value_) return value_ == other.value_;
  return *value_ == *other.value_;
}

}  // namespace moebius
