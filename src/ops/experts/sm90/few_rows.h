// The kernels of few rows that stream weights. They take calls that declare few rows, where columns are multiples of 8
// and tensors begin at multiples of 16 bytes. They give the bits of the portable kernels of few rows, which take any
// columns. Host code only.
#pragma once

#include "device/device.h"
#include "ops/experts/experts.h"

namespace moebius::cuda::sm90 {

bool takes_few_rows(const ExpertUp& a);
bool takes_few_rows(const ExpertDown& a);
void expert_up_few_rows(Stream& s, const ExpertUp& a);
// after_up: as expert_down_after_up() (ops/experts/few_rows.h) requires.
void expert_down_few_rows(Stream& s, const ExpertDown& a, bool after_up);

}  // namespace moebius::cuda::sm90
