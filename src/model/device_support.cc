#include "model/device_support.h"

#include "core/error.h"

namespace moebius {

void check_device(const ModelSpec& m, DeviceKind device) {
  if (device != DeviceKind::cuda) return;
  const auto require = [](bool supported, const char* part) {
    MOEBIUS_CHECK(usage, supported,
                  "run.device = \"cuda\" cannot be honoured: {} has no kernels for a GPU yet; set run.device = \"cpu\" "
                  "(--device cpu)",
                  part);
  };
  require(!m.is_latent(), "latent attention (model.kv_lora_rank)");
}

}  // namespace moebius
