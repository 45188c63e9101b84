// Bpe::read: reads the model of a tokenizer.json and checks all of it.
#include <algorithm>

#include "core/error.h"
#include "io/unicode.h"
#include "tokenizer/bpe.h"
#include "tokenizer/byte_level.h"

namespace moebius {
namespace {

constexpr int64_t kMaxId = (int64_t{1} << 24) - 1;  // far above any vocabulary; a table of this size fits memory
constexpr std::string_view kMarker = "\xE2\x96\x81";

// A merge is ["a", "b"], or "a b" in older files.
std::pair<std::string, std::string> pair_of(const JsonField& merge) {
  if (merge.value().is_array()) {
    const auto items = merge.items();
    if (items.size() != 2) merge.fail("two tokens");
    return {items[0].string(), items[1].string()};
  }
  const std::string& text = merge.string();
  const size_t space = text.find(' ');
  if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
    merge.fail("two tokens with one space between them");
  return {text.substr(0, space), text.substr(space + 1)};
}

void refuse_text(const JsonField& model, const char* key) {
  if (model.has(key) && !model.at(key).string().empty()) model.at(key).fail("null", "this is not supported");
}

void check_type(const JsonField& model) {
  if (model.has("type") && model.at("type").string() != "BPE")
    model.at("type").fail("BPE", "this model is not supported");
  if (!model.has("type") && !model.has("merges")) model.at("type").fail("BPE");
  if (model.has("dropout") && model.at("dropout").value() != 0)
    model.at("dropout").fail("null", "BPE dropout is not supported");
  refuse_text(model, "continuing_subword_prefix");
  refuse_text(model, "end_of_word_suffix");
}

// Returns whether a marker follows another character in `token`.
bool has_inner_marker(std::string_view token) {
  for (size_t at = token.find(kMarker, 1); at != std::string_view::npos; at = token.find(kMarker, at + 1))
    if (token.substr(previous_char(token, at), kMarker.size()) != kMarker) return true;
  return false;
}

}  // namespace

Bpe Bpe::read(const JsonField& model, bool byte_level) {
  check_type(model);
  Bpe bpe;
  bpe.byte_level_ = byte_level;
  bpe.byte_fallback_ = model.boolean_or("byte_fallback", false);
  bpe.fuse_unknown_ = model.boolean_or("fuse_unk", false);
  bpe.ignore_merges_ = model.boolean_or("ignore_merges", false);
  bpe.read_vocab(model.at("vocab"));
  bpe.read_merges(model.at("merges"));
  bpe.find_unknown(model);
  bpe.find_atoms_of_bytes();
  return bpe;
}

void Bpe::read_vocab(const JsonField& vocab) {
  if (!vocab.value().is_object() || vocab.value().empty()) vocab.fail("an object of tokens and their ids");
  std::vector<bool> used;
  for (const auto& [token, value] : vocab.value().items()) {
    const auto id =
        static_cast<size_t>(JsonField(value, fmt::format("{}.\"{}\"", vocab.path(), token)).integer(0, kMaxId));
    if (id >= used.size()) {
      used.resize(id + 1);
      tokens_.resize(id + 1);
    }
    MOEBIUS_CHECK(input, !used[id],
                  "{}: expected a unique id for each token; got {} for \"{}\" and \"{}\"; correct the file",
                  vocab.path(), id, tokens_[id], token);
    used[id] = true;
    tokens_[id] = token;
    ids_.emplace(token, static_cast<int32_t>(id));
    if (!byte_level_) continue;
    if (const auto bytes = byte_level_bytes(token)) words_.emplace(*bytes, static_cast<int32_t>(id));
  }
}

void Bpe::read_merges(const JsonField& merges) {
  const auto items = merges.items();
  merges_ = PairTable(items.size());
  parts_at_marker_ = !byte_level_ && !ignore_merges_ && find(std::string(kMarker)) >= 0;
  for (size_t rank = 0; rank < items.size(); ++rank) {
    const auto [left, right] = pair_of(items[rank]);
    for (const std::string& token : {left, right, left + right})
      MOEBIUS_CHECK(input, find(token) >= 0,
                    "{}: expected tokens of the vocabulary; got \"{}\", which is not one; correct the file",
                    items[rank].path(), token);
    merges_.set(find(left), find(right), {.rank = static_cast<uint32_t>(rank), .id = find(left + right)});
    if (has_inner_marker(left + right)) parts_at_marker_ = false;
  }
}

void Bpe::find_unknown(const JsonField& model) {
  if (!model.has("unk_token")) return;
  unknown_id_ = find(model.at("unk_token").string());
  if (unknown_id_ < 0) model.at("unk_token").fail("a token of the vocabulary");
}

void Bpe::find_atoms_of_bytes() {
  for (int byte = 0; byte < 256; ++byte) {
    std::string character;
    append_utf8(byte_level_char(static_cast<uint8_t>(byte)), &character);
    atoms_of_bytes_[byte] = atom_of(character);
  }
}

int32_t Bpe::find(const std::string& token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? -1 : found->second;
}

Bpe::Atom Bpe::atom_of(std::string_view character) const {
  Atom atom;
  if (const auto found = ids_.find(character); found != ids_.end()) {
    atom.id = found->second;
    return atom;
  }
  if (!byte_fallback_) return atom;
  for (const char c : character) atom.byte_ids.push_back(find(fmt::format("<0x{:02X}>", static_cast<uint8_t>(c))));
  if (std::ranges::count(atom.byte_ids, -1) > 0) atom.byte_ids.clear();
  return atom;
}

}  // namespace moebius
