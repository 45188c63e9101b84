// Errors are one exception type with one kind.
// A message says who failed, what was expected, what it got instead, and what to do.
// Only the command line catches errors, prints them and turns the kind into the exit code.
// The library never prints and never exits.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace moebius {

// The values are the exit codes of the program.
enum class ErrorKind : int { usage = 2, input = 3, io = 4, numerics = 5, distributed = 6, internal = 70 };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Throws Error{internal} that names the broken invariant and its place in the source.
[[noreturn]] void fail_assert(const char* condition, const char* file, int line);

// Returns value as To. Throws Error{usage} when it does not fit.
template <class To, class From>
To narrow(From value) {
  const To narrowed = static_cast<To>(value);
  if (static_cast<From>(narrowed) != value || ((narrowed < To{}) != (value < From{}))) {
    throw Error(ErrorKind::usage, fmt::format("narrow: {} does not fit the integer type asked for", value));
  }
  return narrowed;
}

// Returns a / b. Throws Error{usage} unless b divides a; `what` names the quotient in the message.
int64_t div_exact(int64_t a, int64_t b, const char* what);
// Returns a / b rounded up, for a >= 0 and b > 0.
inline int64_t div_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns a number with its noun for a message: "1 rank", "2 ranks".
std::string counted(int64_t n, std::string_view noun);

}  // namespace moebius

// MOEBIUS_FAIL and MOEBIUS_CHECK are for contracts that the caller or the user broke. They are
// always on. `kind` is an enumerator of ErrorKind; the remaining arguments are fmt's.
#define MOEBIUS_FAIL(kind, ...) throw ::moebius::Error(::moebius::ErrorKind::kind, ::fmt::format(__VA_ARGS__))
#define MOEBIUS_CHECK(kind, cond, ...) \
  do {                                 \
    if (!(cond)) [[unlikely]] {        \
      MOEBIUS_FAIL(kind, __VA_ARGS__); \
    }                                  \
  } while (0)
// MOEBIUS_ASSERT is for invariants of the library itself.
#define MOEBIUS_ASSERT(cond)                             \
  do {                                                   \
    if (!(cond)) [[unlikely]] {                          \
      ::moebius::fail_assert(#cond, __FILE__, __LINE__); \
    }                                                    \
  } while (0)
