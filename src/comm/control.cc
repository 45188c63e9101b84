#include "comm/control.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <sstream>

#include "comm/liveness/rank_failure.h"
#include "core/error.h"

namespace moebius {
namespace {

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr size_t kMax = 8;
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), kMax); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  if (ranks.size() > kMax) text += fmt::format(" and {} more", ranks.size() - kMax);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

// The first line in which two texts differ. A line that one text does not have is empty.
struct Difference {
  int64_t line = 0;
  std::string a, b;
};

Difference first_difference(const std::string& a, const std::string& b) {
  std::istringstream of_a(a), of_b(b);
  Difference d;
  do {
    ++d.line;
    d.a.clear();
    d.b.clear();
    std::getline(of_a, d.a);
    std::getline(of_b, d.b);
  } while (d.a == d.b && (of_a || of_b));
  return d;
}

// Packs an Error for other ranks: one character for its kind, then its text. An empty text
// means no error.
std::string packed(const Error& e) { return static_cast<char>(e.kind()) + std::string(e.what()); }

ErrorKind kind_of(const std::string& packed, int rank) {
  if (const std::optional<ErrorKind> kind = error_kind(packed[0])) return *kind;
  MOEBIUS_FAIL(distributed,
               "control: expected rank {} to report how its part ended; got something else; start all ranks with the "
               "same command of the same program",
               rank);
}

}  // namespace

Control::Control(Transport& transport) : transport_(transport), rank_(transport.rank()), size_(transport.size()) {
  std::vector<int> all(size_);
  std::iota(all.begin(), all.end(), 0);
  group_ = transport.make_group("control", all);
}

// Texts of up to kShort bytes are sent together with their lengths, in one call. Nearly all texts are that short. If
// one is longer, a second call sends all of them.
namespace {

constexpr int64_t kShort = 120;

struct ShortText {
  int64_t num_bytes = 0;
  char text[kShort] = {};
};

ShortText short_text(const std::string& text) {
  ShortText s{.num_bytes = std::ssize(text)};
  std::copy_n(text.begin(), std::min(kShort, s.num_bytes), s.text);
  return s;
}

Tensor bytes_of(ShortText* texts, int64_t count) {
  return tensor_of(reinterpret_cast<uint8_t*>(texts), {count * static_cast<int64_t>(sizeof(ShortText))});
}

}  // namespace

std::vector<std::string> Control::gather(const std::string& mine) {
  std::vector<ShortText> shorts(static_cast<size_t>(size_));
  ShortText own = short_text(mine);
  group_->all_gather(s_, bytes_of(shorts.data(), size_), bytes_of(&own, 1));
  int64_t most = 0;
  for (const ShortText& s : shorts) most = std::max(most, s.num_bytes);
  std::vector<std::string> gathered;
  if (most <= kShort) {
    for (const ShortText& s : shorts) gathered.emplace_back(s.text, static_cast<size_t>(s.num_bytes));
    return gathered;
  }
  std::vector<uint8_t> texts(size_ * most);
  std::copy(mine.begin(), mine.end(), texts.begin() + rank_ * most);
  group_->all_gather(s_, tensor_of(texts.data(), {size_ * most}), tensor_of(texts.data() + rank_ * most, {most}));
  for (int r = 0; r < size_; ++r)
    gathered.emplace_back(texts.begin() + r * most, texts.begin() + r * most + shorts[r].num_bytes);
  return gathered;
}

std::string Control::from_root(const std::string& text) {
  ShortText s = short_text(text);
  group_->broadcast(s_, bytes_of(&s, 1), 0);
  if (s.num_bytes <= kShort) return {s.text, static_cast<size_t>(s.num_bytes)};
  std::vector<uint8_t> buffer(static_cast<size_t>(s.num_bytes));
  if (is_root()) std::copy(text.begin(), text.end(), buffer.begin());
  group_->broadcast(s_, tensor_of(buffer.data(), {s.num_bytes}), 0);
  return {buffer.begin(), buffer.end()};
}

std::vector<int64_t> Control::gather(int64_t mine) {
  std::vector<int64_t> all(size_);
  all[rank_] = mine;
  group_->all_gather(s_, tensor_of(all.data(), {size_}), tensor_of(&all[rank_], {1}));
  return all;
}

int64_t Control::sum(int64_t mine) {
  const std::vector<int64_t> all = gather(mine);
  return std::accumulate(all.begin(), all.end(), int64_t{0});
}

int64_t Control::max(int64_t mine) {
  const std::vector<int64_t> all = gather(mine);
  return *std::max_element(all.begin(), all.end());
}

void Control::barrier() { group_->barrier(); }

void Control::together(const std::function<void()>& body) {
  std::string mine;
  try {
    body();
    if (size_ == 1) return;
  } catch (const Error& e) {
    if (size_ == 1) throw;
    mine = packed(e);
  }
  const std::vector<std::string> outcomes = gather(mine);
  for (int r = 0; r < size_; ++r) {
    if (outcomes[r].empty()) continue;
    const bool all_alike = std::count(outcomes.begin(), outcomes.end(), outcomes[r]) == size_;
    const std::string text = outcomes[r].substr(1);
    throw Error(kind_of(outcomes[r], r), all_alike ? text : fmt::format("rank {}: {}", r, text));
  }
}

void Control::on_root(const std::function<void()>& body) {
  std::string failure;
  if (is_root()) {
    try {
      body();
    } catch (const Error& e) {
      failure = packed(e);
    }
  }
  failure = from_root(failure);
  if (!failure.empty()) throw Error(kind_of(failure, 0), failure.substr(1));
}

void check_agree(Control& control, const Claim& claim) {
  const std::vector<std::string> texts = control.gather(claim.text);
  std::vector<int> with_root, against;
  for (int r = 0; r < control.size(); ++r) (texts[r] == texts[0] ? with_root : against).push_back(r);
  if (against.empty()) return;
  const Difference d = first_difference(texts[0], texts[against[0]]);
  MOEBIUS_FAIL(usage,
               "the ranks do not agree on {}: {} against {}; line {} of rank 0 is \"{}\", of rank {} \"{}\"; start all "
               "ranks with the same one",
               claim.what, ranks_text(with_root), ranks_text(against), d.line, d.a, against[0], d.b);
}

}  // namespace moebius
