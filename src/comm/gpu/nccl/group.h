// Groups of NCCL over a world (comm/gpu/nccl.h).
#pragma once

#include <memory>

#include "comm/gpu/nccl.h"
#include "comm/group.h"

namespace moebius {

class NcclWorld;

// over: a group of the same ranks, for CPU memory. The ranks of the group call it together. The world must outlive it.
std::unique_ptr<Group> make_nccl_group(NcclWorld& world, std::unique_ptr<Group> over, const NcclUse& use);

}  // namespace moebius
