#include "model/device_support.h"

#include <algorithm>

#include "core/error.h"

namespace moebius {

void check_device(const ModelSpec& m, DeviceKind device) {
  if (device != DeviceKind::cuda) return;
  const int64_t width = std::max(m.head_dim, m.is_latent() ? m.v_head_dim : 0);
  MOEBIUS_CHECK(
      usage, width <= 256,
      "run.device = \"cuda\" cannot be honoured: on a GPU attention has kernels for heads of at most 256; got "
      "{}; set run.device = \"cpu\" (--device cpu)",
      width);
}

}  // namespace moebius
