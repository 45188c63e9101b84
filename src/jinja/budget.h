// The limits of one rendering. Templates come with models of any origin, so these limits keep a template from hanging
// the process or exhausting its memory.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace moebius::jinja {

// An error of a template, without its place. Template::render and Template::parse turn it into an
// Error that names the place.
class TemplateError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Limits {
  int64_t steps = 20'000'000;        // expressions, statements, and items or 256 bytes of text that they read
  int64_t bytes = int64_t{1} << 29;  // bytes of all texts and items that a rendering makes
  int depth = 1000;                  // expressions, statements and macros that are active at once
};

class Budget {
 public:
  explicit Budget(const Limits& limits) : limits_(limits) {}

  void step(int64_t count = 1) {
    steps_ += count;
    if (steps_ > limits_.steps)
      throw TemplateError("expected at most " + std::to_string(limits_.steps) + " steps; got more");
  }
  void read_text(size_t num_bytes) { step(static_cast<int64_t>(num_bytes / 256)); }
  void make(size_t num_bytes) {
    bytes_ += static_cast<int64_t>(num_bytes);
    if (bytes_ > limits_.bytes || num_bytes > static_cast<size_t>(limits_.bytes))
      throw TemplateError("expected at most " + std::to_string(limits_.bytes >> 20) +
                          " MiB of texts and lists; got more");
  }
  void enter() {
    if (depth_ == limits_.depth)
      throw TemplateError("expected at most " + std::to_string(limits_.depth) +
                          " expressions and macros in each other; got more");
    ++depth_;
  }
  void leave() { --depth_; }

 private:
  Limits limits_;
  int64_t steps_ = 0, bytes_ = 0;
  int depth_ = 0;
};

// While an object of this class exists, one more expression, statement or macro counts as active. Its constructor
// throws TemplateError beyond Limits::depth.
class Nested {
 public:
  explicit Nested(Budget& budget) : budget_(budget) { budget_.enter(); }
  ~Nested() { budget_.leave(); }
  Nested(const Nested&) = delete;

 private:
  Budget& budget_;
};

}  // namespace moebius::jinja
