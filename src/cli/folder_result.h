// The result that import and export print of the folder that they made.
#pragma once

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <string>

#include "cli/options.h"
#include "memory/plan.h"
#include "weights/not_finite.h"

namespace moebius {

// done: "imported" or "exported". Result has num_tensors, num_shards, bytes, num_files,
// not_finite and notices.
template <class Result>
void print_folder_result(Log& log, const char* done, const Result& r, const std::string& out, bool json) {
  warn_if_any(log, not_finite_warning(out, r.not_finite));
  for (const std::string& notice : r.notices) warn_if_any(log, notice);
  if (json) {
    print_json({{"tensors", r.num_tensors}, {"shards", r.num_shards}, {"bytes", r.bytes}, {"files", r.num_files}});
  } else {
    fmt::print("{} {}, {}, in {}, and {} to {}\n", done, counted(r.num_tensors, "tensor"), bytes_text(r.bytes),
               counted(r.num_shards, "shard"), counted(r.num_files, "other file"), out);
  }
}

}  // namespace moebius
