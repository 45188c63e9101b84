// The build that a test program belongs to. A program runs as it was built, or, of the same
// objects, under the address sanitizer, beside programs that were instrumented like it.
#pragma once

#include <filesystem>
#include <string>

extern "C" __attribute__((weak)) void __asan_init();

namespace moebius {

inline bool is_under_address_sanitizer() { return __asan_init != nullptr; }

// This test program. It is read at the start: after a test has made a mount namespace of its own,
// the system may name the program by a path that is outside the process's root.
inline const std::filesystem::path kTestProgram = std::filesystem::read_symlink("/proc/self/exe");

// Returns the path of a program that was built beside this one: build/NAME of build/tests/...,
// build/asan/NAME of build/asan/tests/...
inline std::string built_program(const std::string& name) { return kTestProgram.parent_path().parent_path() / name; }

}  // namespace moebius
