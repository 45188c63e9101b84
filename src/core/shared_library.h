// Shared libraries that the program opens when it first needs them.
// The program starts faster, and it also starts on machines without them.
#pragma once

#include <string>

namespace moebius {

struct SharedLibrary {
  void* handle = nullptr;   // never closed
  std::string why_missing;  // the loader's message; empty when the library is open
};

// Opens the library `name` from where the loader looks, or else the file at `path`. The loader
// looks in LD_LIBRARY_PATH, the folders of the program's other libraries, and the system's folders.
SharedLibrary open_library(const std::string& name, const std::string& path);

// Returns null when the library has no such function.
void* find_symbol(const SharedLibrary& library, const char* name);
// Returns the same, with a type. Function is the type in the library's header: decltype(&f).
template <class Function>
Function find_function(const SharedLibrary& library, const char* name) {
  return reinterpret_cast<Function>(find_symbol(library, name));
}

}  // namespace moebius
