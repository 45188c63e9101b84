#include "config/stage_layout.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"

namespace moebius {

namespace {

// No model has so many layers. Without the bound, *n within *n could fill the memory.
constexpr size_t kMaxLetters = 100'000;

// The string with every repeat written out and without blanks, so that only E t m L | remain.
class Expansion {
 public:
  explicit Expansion(const std::string& text) : text_(text) {}

  std::string run() {
    while (at_ < text_.size()) {
      step(text_[at_]);
      MOEBIUS_CHECK(usage, open_.back().letters.size() <= kMaxLetters,
                    "parallel.layout repeats to more than {} letters at character {}; got \"{}\"", kMaxLetters, at_ + 1,
                    text_);
      ++at_;
    }
    if (open_.size() > 1) fail(open_.back().begin, "a ) for this (");
    return open_.back().letters;
  }

 private:
  struct Group {
    std::string letters;
    size_t begin = 0;  // of its ( in the text
  };

  void step(char c) {
    if (c == ' ' || c == '\t') return;
    if (std::string_view("EtmL|").find(c) != std::string_view::npos) {
      append(std::string(1, c));
    } else if (c == '(') {
      open_.push_back({"", at_});
      last_.clear();
    } else if (c == ')') {
      if (open_.size() == 1 || open_.back().letters.empty()) fail(at_, "something in parentheses to end");
      const std::string inner = open_.back().letters;
      open_.pop_back();
      append(inner);
    } else if (c == '*') {
      repeat();
    } else {
      fail(at_, "E, t, m, L, |, ( ), or *n");
    }
  }

  void append(const std::string& letters) {
    open_.back().letters += letters;
    last_ = letters;
  }

  // at_ is at the star; afterwards it is at the last digit.
  void repeat() {
    if (last_.empty()) fail(at_, "a letter or a group before *");
    const size_t star = at_;
    while (at_ + 1 < text_.size() && text_[at_ + 1] == ' ') ++at_;
    size_t count = 0;
    while (at_ + 1 < text_.size() && text_[at_ + 1] >= '0' && text_[at_ + 1] <= '9') {
      count = std::min(count * 10 + static_cast<size_t>(text_[++at_] - '0'), kMaxLetters + 1);
    }
    if (count == 0) fail(star, "a number of at least 1 after *");
    std::string& letters = open_.back().letters;
    for (size_t i = 1; i < count && letters.size() <= kMaxLetters; ++i) letters += last_;
    last_.clear();
  }

  [[noreturn]] void fail(size_t at, const char* expected) const {
    MOEBIUS_FAIL(usage, "parallel.layout: expected {} at character {}; got '{}' in \"{}\"", expected, at + 1, text_[at],
                 text_);
  }

  const std::string& text_;
  size_t at_ = 0;
  std::vector<Group> open_ = {{}};  // the whole string, then the open groups
  std::string last_;                // the text that a * would repeat
};

std::string written(int64_t num_letters, char letter) {
  return num_letters == 1 ? std::string(1, letter) : fmt::format("{}*{}", letter, num_letters);
}

// Compares the letters of the stages with those of the model, in order.
std::vector<StageSpec> read_stages(const StageLayoutRequest& request, const std::string& letters) {
  const auto count = [](int64_t n, char letter) { return std::string(static_cast<size_t>(n), letter); };
  const std::string model = "E" + count(request.num_layers, 't') + count(request.num_mtp, 'm') + "L";
  std::vector<StageSpec> stages(1);
  size_t at = 0;
  const auto take = [&](std::string_view got) {
    const std::string due = at < model.size() ? model.substr(at, 1) : "the end";
    MOEBIUS_CHECK(usage, got == due,
                  "parallel.layout must hold the model, E {}{} L in this order; stage {} has {} where {} is due, after "
                  "{} of {} layers; got \"{}\"",
                  written(request.num_layers, 't'),
                  request.num_mtp > 0 ? " " + written(request.num_mtp, 'm') : std::string(), stages.size() - 1, got,
                  due, std::count(model.begin(), model.begin() + static_cast<int64_t>(at), 't'), request.num_layers,
                  request.text);
    ++at;
  };
  for (const char& c : letters) {
    if (c == '|') {
      stages.push_back({.first_layer = stages.back().first_layer + stages.back().num_layers});
      continue;
    }
    take(std::string_view(&c, 1));
    StageSpec& stage = stages.back();
    stage.embedding |= c == 'E';
    stage.loss |= c == 'L';
    stage.num_layers += c == 't';
    stage.num_mtp += c == 'm';
    stage.norm |= c == 'm' || (c == 'L' && request.num_mtp == 0);
  }
  take("the end");
  return stages;
}

void check_stages(const StageLayoutRequest& request, const std::vector<StageSpec>& stages) {
  const int64_t P = request.num_ranks, V = request.num_virtual;
  MOEBIUS_CHECK(usage, std::ssize(stages) == P * V,
                "parallel.layout must have pp * vpp = {} * {} = {} stages; got {} in \"{}\"; add or remove a |", P, V,
                P * V, stages.size(), request.text);
  int64_t with_mtp = 0;
  for (size_t s = 0; s < stages.size(); ++s) {
    const bool empty = stages[s] == StageSpec{.first_layer = stages[s].first_layer};
    MOEBIUS_CHECK(usage, !empty, "parallel.layout: stage {} of {} is empty; got \"{}\"; give it a layer, or remove a |",
                  s, stages.size(), request.text);
    with_mtp += stages[s].num_mtp > 0;
  }
  MOEBIUS_CHECK(usage, with_mtp <= 1,
                "parallel.layout: all m must be on one stage; got {} stages in \"{}\"; move them together", with_mtp,
                request.text);
}

// All stages get the same number of layers. The remaining layers go to the stages after stage 0, one each.
std::vector<StageSpec> stages_without_layout(const StageLayoutRequest& request) {
  const int64_t S = request.num_ranks * request.num_virtual;
  std::vector<StageSpec> stages;
  for (int64_t s = 0, first = 0; s < S; ++s) {
    const int64_t num = request.num_layers / S + (s >= 1 && s <= request.num_layers % S);
    stages.push_back({.first_layer = first, .num_layers = num});
    first += num;
  }
  stages.front().embedding = true;
  stages.back().norm = true;
  stages.back().num_mtp = request.num_mtp;
  stages.back().loss = true;
  return stages;
}

std::vector<StageSpec> even_stages(const StageLayoutRequest& request) {
  const int64_t P = request.num_ranks, V = request.num_virtual, S = P * V, layers = request.num_layers;
  MOEBIUS_CHECK(usage, layers >= S,
                "parallel: pp * vpp = {} * {} = {} are more stages than the {} layers of the model; lower parallel.pp "
                "or parallel.vpp",
                P, V, S, layers);
  std::vector<StageSpec> stages = stages_without_layout(request);
  MOEBIUS_CHECK(usage, layers % S == 0,
                "parallel: without a layout the layers must be divisible by pp * vpp = {} * {} = {}; got {} layers; "
                "set parallel.layout, as in \"{}\"",
                P, V, S, layers, print({P, stages}));
  return stages;
}

}  // namespace

StageLayout stage_layout(const StageLayoutRequest& request) {
  constexpr auto kMax = static_cast<int64_t>(kMaxLetters);
  const int64_t P = request.num_ranks, V = request.num_virtual, layers = request.num_layers, mtp = request.num_mtp;
  MOEBIUS_CHECK(usage, P >= 1 && V >= 1 && layers >= 1 && layers <= kMax && mtp >= 0 && mtp <= kMax,
                "parallel.layout: pp, vpp >= 1, layers from 1 to {} and mtp layers from 0 to {} are laid out; got pp = "
                "{}, vpp = {}, {} layers and {} mtp layers",
                kMax, kMax, P, V, layers, mtp);
  const bool written_out = request.text.find_first_not_of(" \t") != std::string::npos;
  if (!written_out) return {P, even_stages(request)};
  std::vector<StageSpec> stages = read_stages(request, Expansion(request.text).run());
  check_stages(request, stages);
  return {P, std::move(stages)};
}

void check_mtp_stage(const StageLayout& layout) {
  for (size_t s = 0; s < layout.stages.size(); ++s) {
    const StageSpec& stage = layout.stages[s];
    MOEBIUS_CHECK(
        usage, stage.num_mtp == 0 || stage.loss || layout.placement().rank_of(static_cast<int64_t>(s)) > 0,
        "parallel.layout: m must not be on the first rank before L, since that rank has the embedding; got \"{}\", "
        "where rank 0 of pp = {} has it; write m L on the last stage",
        print(layout), layout.num_ranks);
  }
}

std::string print(const StageLayout& layout) {
  std::string text;
  for (const StageSpec& stage : layout.stages) {
    if (&stage != &layout.stages.front()) text += " |";
    if (stage.embedding) text += " E";
    if (stage.num_layers > 0) text += " " + written(stage.num_layers, 't');
    if (stage.num_mtp > 0) text += " " + written(stage.num_mtp, 'm');
    if (stage.loss) text += " L";
  }
  return text.substr(1);
}

}  // namespace moebius
