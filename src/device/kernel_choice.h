// The kernels that a run may use on GPUs.
#pragma once

#include <cstdint>
#include <utility>

namespace moebius {

enum class KernelChoice : uint8_t {
  automatic,  // the fastest that support the shape on this GPU
  portable,   // those of compute capability 8.0, which every later GPU runs too
};

inline constexpr std::pair<const char*, KernelChoice> kKernelChoiceNames[] = {{"auto", KernelChoice::automatic},
                                                                              {"portable", KernelChoice::portable}};

constexpr const char* name_of(KernelChoice choice) { return kKernelChoiceNames[static_cast<int>(choice)].first; }

}  // namespace moebius
