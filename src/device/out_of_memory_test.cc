#include "device/out_of_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moebius {
namespace {

TEST(OutOfMemory, IsDistinguishedFromOtherFailuresOfALibrary) {
  for (const char* said :
       {"gemm: cublasLtCreate: CUBLAS_STATUS_ALLOC_FAILED",
        "attention_fwd: cuDNN: execute: code: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "ncclSend: unhandled cuda error: Cuda failure 2 'out of memory'", "ncclRecv: Failed to malloc 77 bytes",
        "ncclGroupEnd: Failed to CUDA calloc async 77 bytes", "ncclGroupEnd: Failed to CUDA host alloc 77 bytes"}) {
    try {
      throw_library_error(ErrorKind::internal, said);
    } catch (const OutOfMemory& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      EXPECT_THAT(e.what(), testing::StartsWith(std::string(said) + ": out of memory: the library's own memory"));
    }
  }
}

TEST(OutOfMemory, OtherFailuresKeepTheirKind) {
  try {
    throw_library_error(ErrorKind::distributed, "ncclSend: remote process exited");
  } catch (const OutOfMemory&) {
    FAIL() << "it is not about memory";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::distributed);
    EXPECT_STREQ(e.what(), "ncclSend: remote process exited");
  }
}

}  // namespace
}  // namespace moebius
