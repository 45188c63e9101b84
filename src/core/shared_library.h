// Libraries that the program opens when it first needs them: it starts faster, and also where they are not.
#pragma once

#include <string>

namespace moebius {

struct SharedLibrary {
  void* handle = nullptr;   // never closed
  std::string why_missing;  // in the loader's words; empty when it is open
};

// By its name where the loader looks (LD_LIBRARY_PATH, the folders of the program's other libraries, the system's),
// else the file at path.
SharedLibrary open_library(const std::string& name, const std::string& path);

// Null when the library has no such function. Function: of its header, decltype(&f).
void* find_symbol(const SharedLibrary& library, const char* name);
template <class Function>
Function find_function(const SharedLibrary& library, const char* name) {
  return reinterpret_cast<Function>(find_symbol(library, name));
}

}  // namespace moebius
