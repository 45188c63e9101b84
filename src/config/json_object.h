// A JSON object that copies and compares by value. This header needs only the name of
// nlohmann::json: most files include a model's spec and never look into the config.json that
// it came from.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

namespace moebius {

class JsonObject {
 public:
  JsonObject() = default;  // none
  // Copies share the object, which is immutable. Throws Error{internal} for another value.
  JsonObject(const nlohmann::json& object);
  explicit operator bool() const { return value_ != nullptr; }
  // REQUIRES: the object is not empty.
  const nlohmann::json& operator*() const { return *value_; }
  const nlohmann::json* operator->() const { return value_.get(); }
  bool operator==(const JsonObject& other) const;

 private:
  std::shared_ptr<const nlohmann::json> value_;
};

}  // namespace moebius
