#include "data/token_data.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>

#include "core/error.h"
#include "data/unaligned_values.h"

namespace moebius {
namespace {

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr int64_t kHeaderBytes = 34;
constexpr int64_t kSequenceBytes = 4 + 8;  // a length and a pointer
constexpr std::string_view kDamaged = "the dataset is damaged; build it again";

struct Header {
  TokenType type;
  int64_t n_seq, n_doc;
};

Header parse_header(std::string_view idx, const std::string& who) {
  const auto size = static_cast<int64_t>(idx.size());
  MOEBIUS_CHECK(input, size >= kHeaderBytes && idx.substr(0, 9) == kMagic,
                "token index {}: expected a Megatron index that starts with MMIDIDX; got {} other bytes; {}", who, size,
                kDamaged);
  MOEBIUS_CHECK(input, load<uint64_t>(idx, 9) == 1, "token index {}: expected version 1; got {}; build it again", who,
                load<uint64_t>(idx, 9));
  const auto code = load<uint8_t>(idx, 17);
  MOEBIUS_CHECK(input, (code >= 1 && code <= 5) || code == 8,
                "token index {}: expected an integer dtype code, 1 to 5 or 8; got {}; {}", who, code, kDamaged);
  const auto n_seq = load<uint64_t>(idx, 18), n_doc = load<uint64_t>(idx, 26);
  // The counts are bounded by the file's size first, so that the sum below cannot wrap.
  const auto limit = static_cast<uint64_t>(size);
  MOEBIUS_CHECK(
      input, n_seq <= limit && n_doc <= limit && kHeaderBytes + kSequenceBytes * n_seq + 8 * n_doc == limit,
      "token index {}: expected {} + 12 n_seq + 8 n_doc bytes; got {} bytes, n_seq {}, n_doc {}; it is truncated, "
      "damaged or multimodal; build it again",
      who, kHeaderBytes, size, n_seq, n_doc);
  return {static_cast<TokenType>(code), static_cast<int64_t>(n_seq), static_cast<int64_t>(n_doc)};
}

// Returns the first token of each sequence, and then the number of tokens.
std::vector<int64_t> sequence_begins(std::string_view idx, const Header& h, int64_t bin_bytes, const std::string& who) {
  const int64_t lengths = kHeaderBytes, pointers = lengths + 4 * h.n_seq, token_bytes = size_of(h.type);
  std::vector<int64_t> begins(h.n_seq + 1);
  for (int64_t i = 0; i < h.n_seq; ++i) {
    const int64_t length = load<int32_t>(idx, lengths + 4 * i), pointer = load<int64_t>(idx, pointers + 8 * i);
    MOEBIUS_CHECK(input, length >= 0, "token index {}: expected a length >= 0; got {} for sequence {}; {}", who, length,
                  i, kDamaged);
    MOEBIUS_CHECK(input, pointer == begins[i] * token_bytes,
                  "token index {}: expected sequence {} to begin at byte {}, where the one before it ends; got {}; {}",
                  who, i, begins[i] * token_bytes, pointer, kDamaged);
    begins[i + 1] = begins[i] + length;
  }
  MOEBIUS_CHECK(input, begins.back() * token_bytes == bin_bytes,
                "token index {}: expected a .bin of {} bytes, {} tokens of {}; got {} bytes; {}", who,
                begins.back() * token_bytes, begins.back(), token_bytes, bin_bytes, kDamaged);
  return begins;
}

template <class T>
void widen(const std::vector<char>& raw, int64_t count, int32_t* dst) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, raw.data() + i * sizeof(T), sizeof(T));
    dst[i] = static_cast<int32_t>(value);
    // The value does not fit, so it is outside the model's vocabulary too. Because of the -1,
    // check_token_ids reports it.
    if (sizeof(T) > 4 && dst[i] != static_cast<int64_t>(value)) dst[i] = -1;
  }
}

template <class T>
void shrink(std::span<const int32_t> ids, std::vector<char>* out) {
  const size_t begin = out->size();
  out->resize(begin + ids.size() * sizeof(T));
  for (size_t i = 0; i < ids.size(); ++i) {
    const T value = static_cast<T>(ids[i]);
    MOEBIUS_CHECK(usage, static_cast<int64_t>(value) == ids[i],
                  "token dataset writer: expected ids that fit {} bytes; got {}; choose the type by the vocabulary",
                  sizeof(T), ids[i]);
    std::memcpy(out->data() + begin + i * sizeof(T), &value, sizeof(T));
  }
}

}  // namespace

int64_t size_of(TokenType type) {
  switch (type) {
    case TokenType::u8:
    case TokenType::i8:
      return 1;
    case TokenType::i16:
    case TokenType::u16:
      return 2;
    case TokenType::i32:
      return 4;
    case TokenType::i64:
      return 8;
  }
  MOEBIUS_ASSERT(!"unknown token type");
}

TokenType token_type_for_vocab(int64_t vocab_size) { return vocab_size < 65500 ? TokenType::u16 : TokenType::i32; }

TokenIndex parse_token_index(std::string_view idx, int64_t bin_bytes, const std::string& who) {
  const Header h = parse_header(idx, who);
  const int64_t documents = kHeaderBytes + kSequenceBytes * h.n_seq;
  MOEBIUS_CHECK(input, h.n_doc >= 2, "token index {}: expected at least one document; got none; add some text", who);
  const std::vector<int64_t> begins = sequence_begins(idx, h, bin_bytes, who);
  MOEBIUS_CHECK(input, begins.back() > 0, "token index {}: expected at least one token; got none; add some text", who);
  TokenIndex index{.type = h.type, .num_sequences = h.n_seq, .document_begins = {}};
  index.document_begins.reserve(h.n_doc);
  int64_t previous = 0;
  for (int64_t d = 0; d < h.n_doc; ++d) {
    const auto sequence = load<int64_t>(idx, documents + 8 * d);
    const bool right_end = d == 0 ? sequence == 0 : d < h.n_doc - 1 || sequence == h.n_seq;
    MOEBIUS_CHECK(
        input, right_end && sequence >= previous && sequence <= h.n_seq,
        "token index {}: expected document indices that rise from 0 to {} sequences; got {} for document {}; {}", who,
        h.n_seq, sequence, d, kDamaged);
    index.document_begins.push_back(begins[sequence]);
    previous = sequence;
  }
  return index;
}

void refuse_file_for_prefix(const std::string& name, const std::string& who) {
  const size_t stem = name.size() - std::min<size_t>(name.size(), 4);
  const std::string ending = name.substr(stem), prefix = name.substr(0, stem);
  std::error_code unreadable;
  MOEBIUS_CHECK(input, (ending != ".bin" && ending != ".idx") || !std::filesystem::exists(prefix + ".idx", unreadable),
                "{}: expected the prefix of a dataset; got one of its files; leave {} out: {}", who, ending, prefix);
}

bool has_target_spans(const std::string& prefix) { return std::filesystem::exists(prefix + ".targets"); }

TokenDataset TokenDataset::open(const std::string& prefix) {
  refuse_file_for_prefix(prefix, "token dataset " + prefix);
  TokenDataset dataset;
  dataset.prefix_ = prefix;
  dataset.bin_ = File::open_read(prefix + ".bin");
  const std::string idx = prefix + ".idx";
  const std::string contents = read_file(idx);
  dataset.index_ = parse_token_index(contents, dataset.bin_.size(), idx);
  dataset.idx_hash_ = hash_bytes(contents.data(), static_cast<int64_t>(contents.size()));
  const std::string targets = prefix + ".targets";
  dataset.has_targets_ = has_target_spans(prefix);
  if (dataset.has_targets_) dataset.targets_ = parse_target_spans(read_file(targets), dataset.num_tokens(), targets);
  return dataset;
}

std::string TokenDataset::fingerprint() const {
  const int64_t size = bin_.size(), end = std::min<int64_t>(size, 1 << 20);
  std::string ends(2 * end, '\0');
  bin_.read_at(ends.data(), end, 0);
  bin_.read_at(ends.data() + end, end, size - end);
  std::string line = fmt::format("tokens={} documents={} idx={} bin_ends={}", num_tokens(), num_documents(),
                                 to_hex(idx_hash_), to_hex(hash_bytes(ends.data(), 2 * end)));
  if (has_targets_)
    line += fmt::format(" targets={}", to_hex(hash_bytes(targets_.data(), targets_.size() * sizeof(TokenSpan))));
  return line;
}

void TokenDataset::read(int64_t begin, int64_t count, int32_t* dst) const {
  MOEBIUS_CHECK(usage, begin >= 0 && count >= 0 && count <= num_tokens() - begin,
                "token dataset {}: expected a range inside its {} tokens; got {} at {}; ask for less", prefix_,
                num_tokens(), count, begin);
  const int64_t token_bytes = size_of(index_.type);
  if (index_.type == TokenType::i32) return bin_.read_at(dst, count * token_bytes, begin * token_bytes);
  std::vector<char> raw(count * token_bytes);
  bin_.read_at(raw.data(), count * token_bytes, begin * token_bytes);
  switch (index_.type) {
    case TokenType::u8:
      return widen<uint8_t>(raw, count, dst);
    case TokenType::i8:
      return widen<int8_t>(raw, count, dst);
    case TokenType::i16:
      return widen<int16_t>(raw, count, dst);
    case TokenType::u16:
      return widen<uint16_t>(raw, count, dst);
    case TokenType::i64:
      return widen<int64_t>(raw, count, dst);
    case TokenType::i32:
      break;
  }
}

void check_token_ids(std::span<const int32_t> ids, int64_t vocab_size, int64_t begin, const std::string& prefix) {
  const auto bad = std::find_if(ids.begin(), ids.end(), [=](int32_t id) { return id < 0 || id >= vocab_size; });
  MOEBIUS_CHECK(input, bad == ids.end(),
                "token dataset {}: expected ids in [0, {}), the model's vocabulary; got {} at token {}; {}", prefix,
                vocab_size, *bad, begin + (bad - ids.begin()),
                "use the tokenizer of the model, or a larger vocab_size");
}

TokenDatasetWriter::TokenDatasetWriter(const std::string& prefix, TokenType type)
    : prefix_(prefix),
      type_(type),
      bin_(std::make_unique<PendingFile>(prefix + ".bin")),
      idx_(std::make_unique<PendingFile>(prefix + ".idx")) {}

TokenDatasetWriter::~TokenDatasetWriter() = default;

void TokenDatasetWriter::add_target_span(int64_t count) {
  if (count == 0) return;
  const TokenSpan span{num_tokens_, num_tokens_ + count};
  if (!targets_.empty() && targets_.back().end == span.begin)
    targets_.back().end = span.end;
  else
    targets_.push_back(span);
}

void TokenDatasetWriter::add_tokens(std::span<const int32_t> ids, bool are_targets) {
  constexpr int64_t kFlushBytes = 1 << 20, kMaxLength = std::numeric_limits<int32_t>::max();
  switch (type_) {
    case TokenType::u8:
      shrink<uint8_t>(ids, &buffer_);
      break;
    case TokenType::i8:
      shrink<int8_t>(ids, &buffer_);
      break;
    case TokenType::i16:
      shrink<int16_t>(ids, &buffer_);
      break;
    case TokenType::u16:
      shrink<uint16_t>(ids, &buffer_);
      break;
    case TokenType::i32:
      shrink<int32_t>(ids, &buffer_);
      break;
    case TokenType::i64:
      shrink<int64_t>(ids, &buffer_);
      break;
  }
  if (are_targets)
    add_target_span(static_cast<int64_t>(ids.size()));
  else
    all_targets_ = all_targets_ && ids.empty();
  num_tokens_ += ids.size();
  // The length of a sequence is an int32, so a longer document has several sequences.
  for (sequence_tokens_ += ids.size(); sequence_tokens_ > kMaxLength; sequence_tokens_ -= kMaxLength) {
    lengths_.push_back(kMaxLength);
  }
  if (static_cast<int64_t>(buffer_.size()) >= kFlushBytes) flush();
}

void TokenDatasetWriter::flush() {
  bin_->file().append(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void TokenDatasetWriter::end_document() {
  if (sequence_tokens_ > 0) lengths_.push_back(static_cast<int32_t>(sequence_tokens_));
  sequence_tokens_ = 0;
  document_ends_.push_back(lengths_.size());
}

void TokenDatasetWriter::close() {
  MOEBIUS_CHECK(usage, sequence_tokens_ == 0 && num_tokens_ > 0,
                "token dataset {}: expected ended documents and at least one token; "
                "got {} tokens, {} of them in an open document; add text and end documents",
                prefix_, num_tokens_, sequence_tokens_);
  flush();
  write_index();
  // An old index must not remain next to the new tokens.
  std::filesystem::remove(prefix_ + ".idx");
  bin_->commit();
  write_targets();
  idx_->commit();
}

void TokenDatasetWriter::write_targets() {
  const std::string path = prefix_ + ".targets";
  if (all_targets_)
    std::filesystem::remove(path);
  else
    write_file_atomic(path, target_spans_text(targets_, num_tokens_));
}

void TokenDatasetWriter::write_index() {
  constexpr size_t kPieceBytes = 1 << 20;
  std::string piece(kMagic);
  const auto write_full = [&] {
    if (piece.size() < kPieceBytes) return;
    idx_->file().append(piece.data(), piece.size());
    piece.clear();
  };
  store<uint64_t>(&piece, 1);
  store(&piece, static_cast<uint8_t>(type_));
  store<uint64_t>(&piece, lengths_.size());
  store<uint64_t>(&piece, document_ends_.size() + 1);
  for (const int32_t length : lengths_) {
    store(&piece, length);
    write_full();
  }
  int64_t pointer = 0;
  for (const int32_t length : lengths_) {
    store(&piece, pointer);
    pointer += length * size_of(type_);
    write_full();
  }
  store<int64_t>(&piece, 0);
  for (const int64_t end : document_ends_) {
    store(&piece, end);
    write_full();
  }
  idx_->file().append(piece.data(), piece.size());
}

}  // namespace moebius
