// cuBLASLt, which is opened when it is first needed.
#pragma once

#include <string>

namespace moebius::cuda {

// Its version, "13.1.0", or why it cannot be used.
std::string cublas_lt_text();

}  // namespace moebius::cuda
