// What kernels for sm_90a are written with.
#pragma once

#include "ops/cuda/sm90_copy.h"
#include "ops/cuda/sm90_sync.h"
#include "ops/cuda/sm90_wgmma.h"
