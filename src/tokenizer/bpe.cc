#include "tokenizer/bpe.h"

#include <algorithm>

#include "io/unicode.h"

namespace moebius {
namespace {

constexpr std::string_view kMarker = "\xE2\x96\x81";

// Returns where the next word begins, which is at a marker that follows another character.
size_t next_part(std::string_view text) {
  for (size_t at = text.find(kMarker, 1); at != std::string_view::npos; at = text.find(kMarker, at + kMarker.size()))
    if (text.substr(previous_char(text, at), kMarker.size()) != kMarker) return at;
  return text.size();
}

}  // namespace

// If no merge crosses the boundary between a character and a marker, both sides can be encoded separately. So long
// texts without a pre-tokenizer become words that the cache can hold.
void Bpe::encode(std::string_view word, BpeScratch* scratch, std::vector<int32_t>* ids) const {
  while (!word.empty()) {
    const size_t part = parts_at_marker_ ? next_part(word) : word.size();
    encode_piece(word.substr(0, part), scratch, ids);
    word.remove_prefix(part);
  }
}

void Bpe::encode_piece(std::string_view word, BpeScratch* scratch, std::vector<int32_t>* ids) const {
  if (scratch->cache_.append(word, ids)) return;
  std::vector<int32_t>& own = scratch->ids_;
  own.clear();
  const Ids& whole = byte_level_ ? words_ : ids_;
  const auto found = ignore_merges_ ? whole.find(word) : whole.end();
  if (found != whole.end()) {
    own.push_back(found->second);
  } else {
    start_symbols(word, scratch);
    merge(scratch);
    for (const auto& symbol : scratch->symbols_)
      if (symbol.id >= 0) own.push_back(symbol.id);
  }
  scratch->cache_.put(word, own);
  ids->insert(ids->end(), own.begin(), own.end());
}

// The id of an unknown character is held back, so that the next unknown character can be fused with
// it. The bytes of a later character are put before it.
void Bpe::start_symbols(std::string_view word, BpeScratch* scratch) const {
  auto& symbols = scratch->symbols_;
  symbols.clear();
  const auto add = [&](int32_t id) {
    const auto at = static_cast<int32_t>(symbols.size());
    symbols.push_back({.id = id, .previous = at - 1, .next = at + 1});
  };
  bool unknown_waits = false;
  for (size_t at = 0; at < word.size();) {
    const size_t begin = at;
    if (byte_level_) {
      ++at;
    } else {
      next_char(word, &at);
    }
    const Atom& atom =
        byte_level_ ? atoms_of_bytes_[static_cast<uint8_t>(word[begin])] : atom_of(word.substr(begin, at - begin));
    if (atom.id >= 0) {
      if (unknown_waits) add(unknown_id_);
      unknown_waits = false;
      add(atom.id);
    } else if (!atom.byte_ids.empty()) {
      for (const int32_t id : atom.byte_ids) add(id);
    } else if (unknown_id_ >= 0) {
      if (unknown_waits && !fuse_unknown_) add(unknown_id_);
      unknown_waits = true;
    }
  }
  if (unknown_waits) add(unknown_id_);
  if (!symbols.empty()) symbols.back().next = -1;
}

// 0xC0, 0xC1 and those from 0xF5 are in no valid UTF-8, so vocabularies may lack them.
bool Bpe::loses_bytes() const {
  for (int byte = 0; byte < 0xF5; ++byte)
    if (byte != 0xC0 && byte != 0xC1 && loses(static_cast<uint8_t>(byte))) return true;
  return false;
}

// The top of the heap is the candidate of the least order.
void Bpe::push_candidate(BpeScratch* scratch, int32_t position) const {
  const auto& symbols = scratch->symbols_;
  if (position < 0 || symbols[position].next < 0) return;
  const Merged* merged = merges_.find(symbols[position].id, symbols[symbols[position].next].id);
  if (merged == nullptr) return;
  scratch->heap_.push_back(
      {.order = uint64_t{merged->rank} << 32 | static_cast<uint32_t>(position), .merged_id = merged->id});
}

void Bpe::merge(BpeScratch* scratch) const {
  auto& symbols = scratch->symbols_;
  auto& heap = scratch->heap_;
  const auto later = [](const BpeScratch::Candidate& a, const BpeScratch::Candidate& b) { return a.order > b.order; };
  const auto push = [&](int32_t position) {
    const size_t before = heap.size();
    push_candidate(scratch, position);
    if (heap.size() > before) std::push_heap(heap.begin(), heap.end(), later);
  };
  heap.clear();
  for (size_t at = 0; at < symbols.size(); ++at) push_candidate(scratch, static_cast<int32_t>(at));
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    const auto top = heap.front();
    std::pop_heap(heap.begin(), heap.end(), later);
    heap.pop_back();
    const auto position = static_cast<int32_t>(top.order & 0xffffffffu);
    auto& left = symbols[position];
    if (left.id < 0 || left.next < 0) continue;
    auto& right = symbols[left.next];
    const Merged* merged = merges_.find(left.id, right.id);
    if (merged == nullptr || merged->id != top.merged_id) continue;  // a neighbour has changed since
    left.id = merged->id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[left.next].previous = position;
    push(left.previous);
    push(position);
  }
}

}  // namespace moebius
