#include "core/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace moebius {

SharedLibrary open_library(const std::string& name, const std::string& path) {
  std::string why;
  for (const std::string& file : {name, path}) {
    if (void* handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return {.handle = handle};
    why += (why.empty() ? "" : "; ") + std::string(::dlerror());
  }
  return {.why_missing =
              fmt::format("{} cannot be opened ({}); install it, or name its folder in LD_LIBRARY_PATH", name, why)};
}

void* find_symbol(const SharedLibrary& library, const char* name) {
  return library.handle == nullptr ? nullptr : ::dlsym(library.handle, name);
}

}  // namespace moebius
