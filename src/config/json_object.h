// A JSON object that copies and compares as one. Most of the program includes the description of a model and never
// looks into the config.json that it came from: this header needs the name of nlohmann::json alone.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

namespace moebius {

class JsonObject {
 public:
  JsonObject() = default;  // none
  // Copies share the object, and nobody changes it. Error{internal} for another value.
  JsonObject(const nlohmann::json& object);
  explicit operator bool() const { return value_ != nullptr; }
  // REQUIRES: there is one.
  const nlohmann::json& operator*() const { return *value_; }
  const nlohmann::json* operator->() const { return value_.get(); }
  bool operator==(const JsonObject& other) const;

 private:
  std::shared_ptr<const nlohmann::json> value_;
};

}  // namespace moebius
