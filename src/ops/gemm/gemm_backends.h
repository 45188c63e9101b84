// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include <string>

#include "device/device.h"

namespace moebius {

struct BatchedGemm;
struct Gemm;

// Returns product i of a batch.
Gemm product_of(const BatchedGemm& a, int64_t i);

namespace cpu {
void gemm(Stream& s, const Gemm& a);
}  // namespace cpu

namespace cuda {
void gemm(Stream& s, const Gemm& a);
void batched_gemm(Stream& s, const BatchedGemm& a);
void prepare_gemm(Stream& s);
std::string gemm_algorithm_text(Stream& s, const Gemm& a);
}  // namespace cuda

}  // namespace moebius
