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
  require(m.qk_norm != QkNorm::whole, "RMSNorm of q and k over all heads (model.qk_norm = \"whole\", olmoe)");
}

}  // namespace moebius
