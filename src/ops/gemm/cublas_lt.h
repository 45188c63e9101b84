// cuBLASLt, which is opened when it is first needed.
#pragma once

#include <string>

namespace moebius {

// The first call, or the first product, opens it: to be called before what the library must outlive
// (handles in statics) is made. Error{usage} when it cannot be opened.
void open_cublas_lt();
std::string why_no_cublas_lt();  // in the loader's words; empty when it is there
std::string cublas_lt_text();    // its version, "13.1.0"

}  // namespace moebius
