// A kernel that does nothing. It is built like every portable kernel, so loading it shows whether the others can load.
#pragma once

#include <cuda_runtime.h>

namespace moebius {

// Loads the kernel on the thread's current GPU. Where there is no native code for the GPU, the driver compiles its PTX.
cudaError_t load_portable_kernel();

}  // namespace moebius
