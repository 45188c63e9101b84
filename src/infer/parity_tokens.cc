#include "core/error.h"
#include "infer/parity.h"
#include "io/safetensors.h"

namespace moebius {
namespace {

// Reads a [B, S] tensor of ids, i32 or i64, each in [0, limit).
std::vector<int32_t> read_ids(const SafetensorsFile& file, const SafetensorsEntry& entry, int64_t limit) {
  const std::string who = fmt::format("{}: {}", file.path(), entry.name);
  MOEBIUS_CHECK(input, entry.dtype == DType::i32 || entry.dtype == DType::i64,
                "{}: expected I32 or I64; got {}; write it as I32", who, safetensors_name(entry.dtype));
  const int64_t n = entry.shape[0] * entry.shape[1];
  std::vector<int64_t> ids(n);
  if (entry.dtype == DType::i64) {
    file.read(entry, ids.data());
  } else {
    std::vector<int32_t> narrow_ids(n);
    file.read(entry, narrow_ids.data());
    ids.assign(narrow_ids.begin(), narrow_ids.end());
  }
  for (int64_t i = 0; i < n; ++i) {
    MOEBIUS_CHECK(input, ids[i] >= 0 && ids[i] < limit, "{}: expected values in [0, {}); got {} at [{}, {}]", who,
                  limit, ids[i], i / entry.shape[1], i % entry.shape[1]);
  }
  return {ids.begin(), ids.end()};
}

// Each document is a run of tokens that begins at its doc_start.
void check_doc_start(const ParityTokens& t, const std::string& path) {
  for (int64_t i = 0; i < t.batch * t.seq; ++i) {
    const int64_t at = i % t.seq, start = t.doc_start[i];
    const bool starts = start == at, continues = at > 0 && start == t.doc_start[i - 1];
    MOEBIUS_CHECK(input, starts || continues,
                  "{}: doc_start: expected the index of the first token of the token's document, {} or that of the "
                  "token before; got {} at "
                  "[{}, {}]",
                  path, at, start, i / t.seq, at);
  }
}

}  // namespace

ParityTokens read_parity_tokens(const std::string& path, const ModelSpec& model) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const SafetensorsEntry& tokens = file.at("tokens");
  MOEBIUS_CHECK(input, tokens.shape.size() == 2 && tokens.shape[0] >= 1 && tokens.shape[1] >= 2,
                "{}: tokens: expected [B, S] with at least one row of two tokens; got rank {} and {} bytes", path,
                tokens.shape.size(), tokens.bytes);
  ParityTokens t{.batch = tokens.shape[0], .seq = tokens.shape[1]};
  t.token = read_ids(file, tokens, model.vocab_size);
  t.doc_start.resize(t.batch * t.seq);
  if (const SafetensorsEntry* entry = file.find("doc_start")) {
    MOEBIUS_CHECK(input, entry->shape == tokens.shape,
                  "{}: doc_start: expected the shape of tokens; got rank {} and {} bytes", path, entry->shape.size(),
                  entry->bytes);
    t.doc_start = read_ids(file, *entry, t.seq);
    check_doc_start(t, path);
  }
  for (int64_t i = 0; i < t.batch * t.seq; ++i) {
    const int64_t position = i % t.seq - t.doc_start[i];
    MOEBIUS_CHECK(input, position < model.max_position_embeddings,
                  "{}: tokens: expected positions below the model's max_position_embeddings = {}; got {} at [{}, {}]; "
                  "give at most {} tokens a row, or doc_start",
                  path, model.max_position_embeddings, position, i / t.seq, i % t.seq, model.max_position_embeddings);
  }
  return t;
}

}  // namespace moebius
