// Tests of a GPU's streams, memory and events. They are skipped where there is no GPU.
#include "device/accelerator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "device/device.h"
#include "device/out_of_memory.h"

namespace moebius {
namespace {

using testing::HasSubstr;

class OnAccelerator : public testing::Test {
 protected:
  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

template <class Memory>
void expect_out_of_memory(const std::string& text, const std::string& what_to_do) {
  try {
    const Memory memory(DeviceKind::cuda, int64_t{1} << 46);
    FAIL() << "no error";
  } catch (const OutOfMemory& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_THAT(e.what(), HasSubstr(text));
    EXPECT_THAT(e.what(), HasSubstr(what_to_do));
  }
}

TEST_F(OnAccelerator, MissingMemoryIsReportedByKind) {
  const Accelerator gpu;
  expect_out_of_memory<Buffer>("out of device memory: 65536.000 GiB were requested in one piece, ",
                               "stop other programs on this GPU, or compute with smaller shapes");
  expect_out_of_memory<HostBuffer>("out of pinned host memory: 65536.000 GiB were requested in one piece",
                                   "the GPU's own memory is not short");
}

TEST_F(OnAccelerator, AGraphDoesItsWorkAtEachReplay) {
  Accelerator gpu;
  ThreadPool pool(1);
  Stream s(gpu, pool);
  const HostBuffer from(DeviceKind::cuda, 8), to(DeviceKind::cuda, 8);
  const Buffer on_gpu(DeviceKind::cuda, 8);
  GraphCapture capture;
  const CudaGraph graph(gpu, capture, [&] {
    EXPECT_EQ(gpu.capture(), &capture);
    copy_to_device(s, on_gpu.data(), from.data(), 8);
    copy_to_host(s, to.data(), on_gpu.data(), 8, CopyWait::async);
  });
  EXPECT_EQ(gpu.capture(), nullptr);
  EXPECT_EQ(graph.num_nodes(), 2);
  for (const char* text : {"first..", "second."}) {
    std::memcpy(from.data(), text, 8);
    graph.replay(gpu);
    synchronize(s);
    EXPECT_STREQ(static_cast<const char*>(to.data()), text);
  }
}

TEST_F(OnAccelerator, EventsAreTimedByItsClock) {
  Accelerator gpu;
  ThreadPool pool(1);
  Stream s(gpu, pool);
  const HostBuffer from(DeviceKind::cuda, int64_t{1} << 26);
  const Buffer to(DeviceKind::cuda, from.num_bytes());
  GpuEvent begin, middle, end;
  for (int round = 0; round < 2; ++round) {  // an event may be recorded again
    begin.record(gpu);
    middle.record(gpu);
    for (int i = 0; i < 8; ++i) copy_to_device(s, to.data(), from.data(), from.num_bytes());
    end.record(gpu);
    synchronize(s);
    EXPECT_GE(middle.seconds_since(begin), 0);
    EXPECT_GT(end.seconds_since(middle), 5e-4) << "512 MiB in less: 1 TB/s";
    EXPECT_LT(end.seconds_since(middle), 1);
    EXPECT_NEAR(end.seconds_since(begin), end.seconds_since(middle) + middle.seconds_since(begin), 1e-5);
  }
}

}  // namespace
}  // namespace moebius
