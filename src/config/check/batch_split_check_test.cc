#include "config/check/batch_split_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

Sets splitting(Sets more) {
  more.insert(more.begin(), {"parallel.ep=2", "parallel.expert_overlap=batch_split"});
  return more;
}
const Sets kOnGpu = {"run.device=cuda", "precision.compute=bf16", "parallel.dispatcher=direct", "model.hidden_size=16",
                     "model.moe_intermediate_size=24"};
Sets on_gpu(Sets more) {
  more.insert(more.begin(), kOnGpu.begin(), kOnGpu.end());
  return splitting(more);
}

TEST(CheckBatchSplit, PassesWhatCanBeSplit) {
  EXPECT_NO_THROW(parse(splitting({"parallel.dispatcher=direct"})).check(2));
  EXPECT_NO_THROW(parse(splitting({})).check(2)) << "\"auto\" becomes direct where ranks reach each other";
  EXPECT_NO_THROW(parse(on_gpu({})).check(2));
  EXPECT_NO_THROW(parse(on_gpu({"precision.compute=f32", "run.kernels=portable"})).check(2));
  EXPECT_NO_THROW(parse(splitting({"precision.recipe=fp8_block", "precision.keep=[\"*experts*\"]"})).check(2))
      << "the layers know what a pattern matches";
}

TEST(CheckBatchSplit, AcceptsPortableKernelsOnACpu) {
  EXPECT_NO_THROW(
      parse(splitting({"parallel.dispatcher=direct", "precision.compute=bf16", "run.kernels=portable"})).check(2));
}

TEST(CheckBatchSplit, ErrorsNameTheUnsupportedSetting) {
  EXPECT_THAT(check_error(splitting({"parallel.dispatcher=allgather"}), 2),
              HasSubstr("parallel.expert_overlap = \"batch_split\" needs parallel.dispatcher = \"direct\", which knows "
                        "the places of all rows before they are sent; set it, or set expert_overlap to \"layer\" "
                        "[--set]"));
  EXPECT_THAT(check_error(splitting({"precision.recipe=fp8_block"}), 2),
              HasSubstr("parallel.expert_overlap = \"batch_split\" computes a rank's own rows from x as it is, so rows "
                        "and products must be bf16 or f32, without adapters; set it to \"layer\", or remove "
                        "precision.recipe and lora [--set]"));
  EXPECT_THAT(
      check_error(splitting({"precision.recipe=fp8_block", "precision.keep=[\"*\"]", "precision.dispatch=recipe"}), 2),
      HasSubstr("rows and products must be bf16 or f32, without adapters"));
  EXPECT_THAT(check_error(on_gpu({"run.kernels=portable"}), 2),
              HasSubstr("parallel.expert_overlap = \"batch_split\" in bf16 needs the kernels of a GPU of compute "
                        "capability 9.0; got run.kernels = \"portable\"; set parallel.expert_overlap to \"layer\" or "
                        "\"none\" [--set]"));
  EXPECT_THAT(check_error(on_gpu({"model.hidden_size=12"}), 2), HasSubstr("in multiples of 8; got 12 and 24; set"));
  EXPECT_THAT(check_error(on_gpu({"model.moe_intermediate_size=20"}), 2),
              HasSubstr("in bf16 needs the kernels of a GPU of compute capability 9.0, which take a hidden size and an "
                        "expert's width on a rank in multiples of 8; got"));
  EXPECT_THAT(check_error(on_gpu({"model.moe_intermediate_size=20"}), 2),
              HasSubstr("got 16 and 20; set parallel.expert_overlap to \"layer\" or \"none\" [--set]"));
  EXPECT_NO_THROW(parse(on_gpu({"precision.compute=f32", "model.moe_intermediate_size=20"})).check(2));
}

TEST(CheckBatchSplit, TheNoteIsForRunsOnGpus) {
  EXPECT_EQ(
      split_kernels_note(parse(on_gpu({}))),
      "parallel.expert_overlap = \"batch_split\" in bf16 needs the kernels of a GPU of compute capability 9.0; on "
      "another one the run ends before its first step");
  EXPECT_EQ(split_kernels_note(parse(splitting({}))), "");
  EXPECT_EQ(split_kernels_note(parse(on_gpu({"parallel.expert_overlap=layer"}))), "");
  EXPECT_EQ(split_kernels_note(parse(on_gpu({"precision.compute=f32"}))), "");
}

}  // namespace
}  // namespace moebius
