// The headers that kernels for sm_90a are written with.
#pragma once

#include "ops/sm90/copy.h"
#include "ops/sm90/sync.h"
#include "ops/sm90/wgmma.h"
