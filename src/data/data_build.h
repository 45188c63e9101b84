// Builds a token dataset from text files. It writes up to four files:
// - PREFIX.bin and PREFIX.idx, the same as Megatron-LM's preprocessing writes;
// - PREFIX.targets, if the loss is on completions only;
// - PREFIX.json, which says what the tokens mean.
#pragma once

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

#include "core/stopped.h"
#include "tokenizer/tokenizer.h"

namespace moebius {

struct DataBuild {
  std::vector<std::string> inputs;  // read in this order (data/text_input.h)
  std::string out_prefix;
  bool append_eod = true;       // adds the tokenizer's end-of-document id after each text that has tokens
  bool replace = false;         // replaces a dataset of the same prefix
  int threads = 1;              // the dataset is the same for any number
  int64_t seq_len = 0;          // > 0: counts the documents that training with this train.seq_len cuts
  std::tm now = {};             // the time that chat templates print
  ShouldStop should_stop = {};  // asked before and after each block of text
};

// The contents of PREFIX.json, and a notice, which is not written there.
struct DatasetInfo {
  std::string tokenizer;
  std::string tokenizer_hash;  // tokenizer_hash(tokenizer); empty in datasets built before there was a hash
  int64_t vocab_size = 0;
  bool append_eod = true;
  int64_t documents = 0;
  int64_t tokens = 0;         // with the end-of-document ids
  int64_t target_tokens = 0;  // the tokens with a loss: all, or only those of completions
  int64_t text_bytes = 0;     // bytes of the text of the targets; bits per byte are divided by it
  int64_t largest_id = -1;    // -1: unknown, in datasets built before it was kept
  // From build_dataset only.
  int64_t longest = 0;      // tokens of the longest document
  int64_t num_cut = 0;      // documents that are longer than DataBuild::seq_len + 1 tokens
  std::string notice = {};  // a warning about texts that spell out special tokens, and about chats without targets
};

// Builds the dataset and returns what PREFIX.json says.
// A document is the ids of its text, or those of its prompt and then its completion, each encoded
// separately. Ids that an input gives are used as they are, and no id is added after them. Nor is one
// added after the ids of a chat (data/chat_ids.h), whose template is that of the tokenizer's folder.
// Memory: some ten MiB per thread, and what the writer keeps (data/token_data.h). A file that is
// not jsonl is one document, which is held in memory whole.
// Throws Error{input} if the inputs have no text. Files appear under the prefix only after all input was read.
// Throws Error{usage} when a file of such a dataset exists and `replace` is off.
DatasetInfo build_dataset(const DataBuild& build, const Tokenizer& tokenizer);

// Returns nothing when PREFIX.json is missing, as for datasets built elsewhere. Throws Error{input}
// when the file exists and is wrong.
std::optional<DatasetInfo> read_dataset_info(const std::string& prefix);

// Returns a name that distinguishes tokenizers, wherever their folders are. It is "bytes", or a
// hash of the contents of DIR/tokenizer.json, whatever their layout. It is empty when there is
// no such file.
std::string tokenizer_hash(const std::string& name);

// Throws Error{input} "WHO: ..." when PREFIX.json says that another tokenizer than `name` made the
// dataset. Does nothing when one of the two hashes is unknown.
void check_tokenizer(const std::string& prefix, const std::string& name, const std::string& who);

// Throws Error{input} "WHO: ..." when PREFIX.json says that the dataset has an id outside [0, vocab_size).
void check_vocabulary(const std::string& prefix, int64_t vocab_size, const std::string& who);

}  // namespace moebius
