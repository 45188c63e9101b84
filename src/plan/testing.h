// The planner's tests share these: the machines and recipes of this repository, and the texts of refusals.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "config/run_spec.h"
#include "core/error.h"
#include "plan/machine.h"

namespace moebius {

inline const std::string kSource = MOEBIUS_SOURCE_DIR;
inline const std::string kRecipes = kSource + "/recipes/";

inline PlanMachine machine(const char* name) { return load_machine(name, kSource + "/machines"); }

inline RunSpec recipe(const char* name, std::vector<std::string> set = {}) {
  return load_run_spec(kRecipes + name, set);
}

// Returns the text of the error that the call throws.
inline std::string refused(const std::function<void()>& call, ErrorKind kind = ErrorKind::usage) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind);
    return e.what();
  }
  return "not refused";
}

}  // namespace moebius
