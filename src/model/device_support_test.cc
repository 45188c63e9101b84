#include "model/device_support.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace moebius {
namespace {

std::string error_of(const ModelSpec& m) {
  try {
    check_device(m, DeviceKind::cuda);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  return "";
}

TEST(DeviceSupport, NamesThePartWithoutKernels) {
  ModelSpec m;
  EXPECT_EQ(error_of(m), "");
  m.kv_lora_rank = 4;
  EXPECT_EQ(error_of(m),
            "run.device = \"cuda\" cannot be honoured: latent attention (model.kv_lora_rank) has no kernels for a GPU "
            "yet; set run.device = \"cpu\" (--device cpu)");
  EXPECT_NO_THROW(check_device(m, DeviceKind::cpu));
}

}  // namespace
}  // namespace moebius
