// What the maker says of a GPU, beside what is measured on it.
#pragma once

#include <string>

namespace moebius {

// Dense bf16 products by NVIDIA's data sheet, TFLOP/s, of a GPU by its name
// (Accelerator::info()); 0 where it is not listed.
double datasheet_tflops(const std::string& gpu);

}  // namespace moebius
