// Options that several commands share, and the printing of results.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/parse/arguments.h"
#include "config/run_spec.h"
#include "core/log.h"
#include "core/tensor.h"

namespace moebius {

struct AddedAdapter;

void add_device_option(Command& command, std::string& device);  // --device
void add_dtype_option(Command& command, std::string& dtype);    // --dtype
void add_threads_option(Command& command, int& threads);        // --threads, 0: all that the process may use
void add_json_option(Command& command, bool& json);             // --json
void add_shard_bytes_option(Command& command, int64_t& bytes);  // --shard-bytes
void check_shard_bytes(int64_t bytes);                          // throws Error{usage} unless it is at least 1
// --adapter, whose help ends with `more`, and --any-base
void add_adapter_options(Command& command, AddedAdapter& adapter, const std::string& more);
// Adds an example to the end of the command's help: a line that a user can type.
void add_example(Command& command, const std::string& line);

// --set parallel.KEY=VALUE, --ranks and --timeout, for commands that run on any layout.
struct LayoutOptions {
  std::vector<std::string> overrides;
  int64_t ranks = 1;
  std::optional<double> timeout_s;
};
void add_layout_options(Command& command, LayoutOptions& options);
// Adds --ranks and --timeout only.
void add_ranks_options(Command& command, int64_t& ranks, std::optional<double>& timeout_s);
// Returns the layout that --set gives. Only keys of [parallel] may be set; Error{usage} for others. run:
// the rest of the recipe.
ParallelSpec parallel_of(const std::string& command, const std::vector<std::string>& overrides, RunSpec run);

// Throws Error{usage} if there is no GPU, or this build has no CUDA backend.
DeviceKind device_kind(const std::string& device);
DType compute_dtype(const std::string& dtype);  // "f32" or "bf16"; Error{usage} for others
int num_threads(int asked);

void warn_if_any(Log& log, const std::string& warning);  // warns unless the text is empty

// Prints one object on one line of standard output. Bytes that are not UTF-8 become U+FFFD.
void print_json(const nlohmann::ordered_json& object);

}  // namespace moebius
