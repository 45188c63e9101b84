#include "config/json_object.h"

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace moebius {

JsonObject::JsonObject(const nlohmann::json& object) : value_(std::make_shared<const nlohmann::json>(object)) {
  MOEBIUS_CHECK(internal, object.is_object(), "JsonObject: expected an object; got {}", object.type_name());
}

bool JsonObject::operator==(const JsonObject& other) const {
  if (!value_ || !other.value_) return value_ == other.value_;
  return *value_ == *other.value_;
}

}  // namespace moebius
