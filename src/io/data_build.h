// Text files to a token dataset: PREFIX.bin and PREFIX.idx, and PREFIX.json beside them with what the tokens mean.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/tokenizer.h"

namespace moebius {

struct DataBuild {
  std::vector<std::string> inputs;  // read in this order (io/text_input.h)
  std::string out_prefix;
  bool append_eod = true;  // the tokenizer's end-of-document id after each document
};

// The contents of PREFIX.json.
struct DatasetInfo {
  std::string tokenizer;
  int64_t vocab_size = 0;
  bool append_eod = true;
  int64_t documents = 0;   // empty ones are left out
  int64_t tokens = 0;      // with the end-of-document ids
  int64_t text_bytes = 0;  // what bits per byte divides by
};

// Error{input} when there is no text at all. Nothing appears under the prefix unless all of it was read.
DatasetInfo build_dataset(const DataBuild& build, const Tokenizer& tokenizer);

// Nothing when PREFIX.json is missing, as for datasets built elsewhere; Error{input} when it is there and wrong.
std::optional<DatasetInfo> read_dataset_info(const std::string& prefix);

}  // namespace moebius
