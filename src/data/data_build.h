// Text files to a token dataset: PREFIX.bin and PREFIX.idx as Megatron-LM's preprocessing writes them, PREFIX.targets
// when the loss is on completions alone, and PREFIX.json beside them with what the tokens mean.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace moebius {

struct DataBuild {
  std::vector<std::string> inputs;  // read in this order (data/text_input.h)
  std::string out_prefix;
  bool append_eod = true;  // the tokenizer's end-of-document id after each document of text that has tokens
  bool replace = false;    // what stands under the prefix
  int threads = 1;         // the dataset is the same for any number
};

// The contents of PREFIX.json, but for the notice.
struct DatasetInfo {
  std::string tokenizer;
  std::string tokenizer_hash;  // tokenizer_hash(tokenizer); empty in datasets that were built before there was one
  int64_t vocab_size = 0;
  bool append_eod = true;
  int64_t documents = 0;
  int64_t tokens = 0;         // with the end-of-document ids
  int64_t target_tokens = 0;  // those that the loss is on: tokens, or the completions' alone
  int64_t text_bytes = 0;     // of the text that the targets stand for: what bits per byte divides by
  std::string notice = {};    // of build_dataset alone, for a warning: texts that spell out special tokens
};

// A document is the ids of its text, or of its prompt and then of its completion, each encoded alone; ids that are
// given are taken as they are, with nothing behind them. Memory: some ten MiB a thread, and what the writer keeps
// (data/token_data.h); a file that is no jsonl is one document and held whole. Error{input} when there is no text at all.
// Nothing appears under the prefix unless all of it was read. Error{usage} when a file of a dataset of this name is
// there and is not to be replaced.
DatasetInfo build_dataset(const DataBuild& build, const Tokenizer& tokenizer);

// Nothing when PREFIX.json is missing, as for datasets built elsewhere; Error{input} when it is there and wrong.
std::optional<DatasetInfo> read_dataset_info(const std::string& prefix);

// Tells tokenizers apart, wherever their folders lie: "bytes", or a hash of what DIR/tokenizer.json says, however it is
// laid out. Empty when there is no such file.
std::string tokenizer_hash(const std::string& name);

// Error{input} "WHO: ..." when PREFIX.json says that another tokenizer than `name` made the dataset. Nothing happens
// when one of the two hashes is unknown.
void check_tokenizer(const std::string& prefix, const std::string& name, const std::string& who);

}  // namespace moebius
