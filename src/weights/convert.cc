#include <vector>

#include "io/convert_elements.h"
#include "weights/source.h"

namespace moebius {

void convert_elements(Stream& s, const Tensor& to, const void* from, DType from_dtype, const std::string& who) {
  if (to.device != DeviceKind::cpu) {
    std::vector<std::byte> host(to.num_bytes());
    convert_elements(s, {.data = host.data(), .shape = to.shape, .dtype = to.dtype}, from, from_dtype, who);
    copy_to_device(s, to.data, host.data(), to.num_bytes());
    return synchronize(s);
  }
  convert_elements(to.data, to.dtype, from, from_dtype, to.numel(), who);
}

}  // namespace moebius
