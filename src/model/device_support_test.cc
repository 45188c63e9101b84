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

TEST(DeviceSupport, NamesWhatHasNoKernels) {
  ModelSpec m;
  m.head_dim = 256;
  EXPECT_EQ(error_of(m), "");
  m.kv_lora_rank = 4;
  m.v_head_dim = 257;
  EXPECT_EQ(error_of(m),
            "run.device = \"cuda\" cannot be honoured: on a GPU attention has kernels for heads of at most 256; got "
            "257; set run.device = \"cpu\" (--device cpu)");
  EXPECT_NO_THROW(check_device(m, DeviceKind::cpu));
}

}  // namespace
}  // namespace moebius
