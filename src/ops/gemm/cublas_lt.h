// The library cuBLASLt, which is opened at its first use.
#pragma once

#include <string>

namespace moebius {

// Opens the library, if it is not open. Call it before creating objects that the library must outlive (handles in
// statics). Throws Error{usage} when it cannot be opened.
void open_cublas_lt();
std::string why_no_cublas_lt();  // the loader's message; empty if the library is available
std::string cublas_lt_text();    // its version, "13.1.0"

}  // namespace moebius
