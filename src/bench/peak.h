// The peak rate of a GPU in its data sheet, to compare measured rates with.
#pragma once

#include <string>

namespace moebius {

// Returns the rate of dense bf16 products in NVIDIA's data sheet, in TFLOP/s. `gpu` is the name
// from Accelerator::info().
// Returns 0 for a GPU that is not listed.
double datasheet_tflops(const std::string& gpu);

}  // namespace moebius
