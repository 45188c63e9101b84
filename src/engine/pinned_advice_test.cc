#include "engine/pinned_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/testing.h"
#include "memory/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;
using testing::Not;

// Returns the error of a plan if the GPU's backend refuses to pin 3 GiB for it.
std::string error_of(const MemoryPlan& plan) {
  try {
    with_pinned_advice(plan, {}, [] {
      throw OutOfPinnedMemory(int64_t{3} << 30, "which a GPU reads and writes where it is",
                              "cudaHostRegister: operation not permitted");
    });
  } catch (const OutOfMemory&) {
    ADD_FAILURE() << "the advice for the GPU's own memory would follow";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  return "no error";
}

const char* const kRefused =
    "out of pinned host memory: 3.000 GiB were requested in one piece, which a GPU reads and writes where it is "
    "(cudaHostRegister: operation not permitted); the GPU's own memory is not short: raise the memory limit of this container or group and its limit of locked memory (ulimit -l), or stop other "
    "programs that hold host memory";

TEST(PinnedAdvice, NamesTheKeyOfStatesOnTheHost) {
  MemoryPlan plan;
  Tensor moments;
  plan.declare(moments, "moments", {(8 << 20) / 4}, DType::f32, Life::host);
  EXPECT_THAT(
      error_of(plan),
      HasSubstr(
          std::string(kRefused) +
          "; optimizer.offload keeps 8.0 MiB in pinned memory of the host: set optimizer.state = \"8bit\" or optimizer.master = \"bf16_stochastic\", use more ranks "
          "on more machines, or keep it on the GPU (optimizer.offload = false)\nmemory plan\n"));
}

TEST(PinnedAdvice, NamesTheKeyOfActivationsOnTheHost) {
  const OffloadedPlan offloaded;
  EXPECT_THAT(
      error_of(offloaded.plan),
      HasSubstr(
          "memory.offload keeps 8.0 MiB in pinned memory of the host: set a smaller memory.offload_fraction, fewer names in memory.offload, "));
}

TEST(PinnedAdvice, NamesTheKeyOfWeightsOnTheHost) {
  MemoryPlan plan;
  Tensor weights;
  plan.declare(weights, "weights", {(8 << 20) / 4}, DType::f32, Life::host);
  const auto expect = [&](bool states, const char* text) {
    expect_error(ErrorKind::usage, text,
                 [&] { check_pinned_memory(plan, 7 << 20, 0, {.states = states, .weights = true}); });
  };
  expect(
      false,
      "out of memory: weights in memory.offload keep 8.0 MiB in pinned memory of the host, and 7.0 MiB are available; "
      "use more ranks on more machines, or keep it on the GPU (remove \"weights\" from memory.offload)\n");
  expect(true, "weights in memory.offload and optimizer.offload keep 8.0 MiB in pinned");
  expect(true, "(remove \"weights\" from memory.offload, and set optimizer.offload = false)\n");
}

TEST(PinnedAdvice, NamesActivationsAndWhatElseIsOnTheHost) {
  OffloadedPlan offloaded;
  Tensor weights;
  offloaded.plan.declare(weights, "weights", {(8 << 20) / 4}, DType::f32, Life::host);
  expect_error(ErrorKind::usage,
               "out of memory: memory.offload keeps 8.0 MiB of activations; with its weights and optimizer.offload, "
               "16.0 MiB are in pinned memory of the host, and 7.0 MiB are available; ",
               [&] { check_pinned_memory(offloaded.plan, 7 << 20, 0, {.states = true, .weights = true}); });
}

// Every run on a GPU pins a little for its batches, without any key.
TEST(PinnedAdvice, NamesNoKeyWhereNoneAsksForIt) {
  const std::string text = error_of(MemoryPlan());
  EXPECT_THAT(text, HasSubstr(std::string(kRefused) + "\nmemory plan\n"));
  EXPECT_THAT(text, Not(HasSubstr("offload")));
}

TEST(PinnedAdvice, PassesOtherErrorsOn) {
  EXPECT_THROW(with_pinned_advice(MemoryPlan(), {}, [] { throw OutOfMemory("of the GPU"); }), OutOfMemory);
  with_pinned_advice(MemoryPlan(), {}, [] {});
}

}  // namespace
}  // namespace moebius
