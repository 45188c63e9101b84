#include "config/check/sharding_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(CheckSharding, PassesWhatCanBeCombined) {
  EXPECT_NO_THROW(parse({"parallel.fsdp=true", "parallel.shard_gradients=true"}).check(1));
  EXPECT_NO_THROW(parse({"parallel.fsdp=true", "parallel.shard_gradients=true", "run.device=cuda"}).check(2));
  EXPECT_NO_THROW(parse({"parallel.fsdp=true", "precision.recipe=mxfp8"}).check(2));
  EXPECT_NO_THROW(parse({"parallel.fsdp=true", "precision.recipe=fp8_block", "precision.weights=recipe"}).check(2));
  EXPECT_NO_THROW(parse({"parallel.fsdp=true", "parallel.fsdp_shard=2"}).check(2));
  EXPECT_NO_THROW(parse({"parallel.fsdp=true", "optimizer.name=muon"}).check(2));
  EXPECT_NO_THROW(parse({"parallel.fsdp=true", "parallel.shard_gradients=true", "memory.fit=80GiB"}).check(2));
  EXPECT_NO_THROW(parse({"parallel.fsdp=true", "precision.compute=bf16", "optimizer.grad=bf16",
                         "optimizer.master=bf16_stochastic", "optimizer.offload=true", "checkpoint.async=false"})
                      .check(2));
  EXPECT_NO_THROW(parse({"parallel.shard_gradients=true", "precision.recipe=fp8_block"}).check(2));
  EXPECT_NO_THROW(
      parse({"parallel.shard_gradients=true", "precision.compute=bf16", "optimizer.master=bf16_remainder"}).check(2));
  EXPECT_NO_THROW(
      parse({"parallel.fsdp=true", "parallel.shard_gradients=true", "lora.rank=4", "lora.targets=[\"q_proj\"]"})
          .check(2));
}

TEST(CheckSharding, PassesAQuantisedBaseOfAdapters) {
  for (const char* base : {"lora.base=fp8_block", "lora.base=mxfp4"})
    EXPECT_NO_THROW(parse({"parallel.fsdp=true", "parallel.fsdp_shard=2", "lora.rank=4", "lora.targets=[\"q_proj\"]",
                           base, "model.init_from=some/folder"})
                        .check(2));
}

TEST(CheckSharding, ErrorsNameTheUnsupportedSetting) {
  EXPECT_THAT(
      check_error({"parallel.fsdp_shard=2", "train.global_batch=12"}, 4),
      HasSubstr("parallel.fsdp is false, so weights are whole on each rank; set parallel.fsdp = true, or remove "
                "it [--set]"));
  EXPECT_THAT(error_text(ErrorKind::usage,
                         [] {
                           parse({"parallel.fsdp=true", "parallel.fsdp_shard=1"});
                         }),
              HasSubstr("parallel.fsdp_shard must be 0, or a whole number from 2 to 1000000000; got 1"));
  EXPECT_THAT(check_error({"parallel.fsdp=true", "parallel.fsdp_shard=3", "train.global_batch=12"}, 4),
              HasSubstr("parallel.fsdp_shard = 3 must divide the dp * cp = 4 ranks that hold the same weights; set it "
                        "to a divisor of 4, or to 0 for all of them"));
  const auto error = [](std::vector<std::string> set) {
    set.insert(set.end(), {"parallel.shard_gradients=true", "precision.compute=bf16"});
    return check_error(set, 2);
  };
  EXPECT_NO_THROW(parse({"parallel.shard_gradients=true", "precision.compute=bf16", "optimizer.grad=bf16",
                         "optimizer.master=bf16_remainder"})
                      .check(2));
  EXPECT_THAT(error({"optimizer.name=muon"}),
              HasSubstr("parallel.shard_gradients = true leaves no memory of whole gradients, in which Muon brings a "
                        "matrix together; set optimizer.name = \"adamw\", or remove it"));
}

// They are not activations, so the list of these is empty.
TEST(CheckSharding, WeightsOnTheHostAreANameOfOffload) {
  const RunSpec both = parse({"memory.offload=[\"weights\", \"qkv\"]"}), one = parse({"memory.offload=[\"weights\"]"});
  EXPECT_TRUE(both.offload_weights && both.memory.offload.tensors.qkv && one.offload_weights);
  EXPECT_FALSE(one.memory.offload.any() || parse({"memory.offload=[\"qkv\"]"}).offload_weights);
  EXPECT_THAT(to_toml(both, false), HasSubstr("offload = [\"qkv\", \"weights\"]"));
  EXPECT_THAT(check_error({"memory.offload=[\"weights\"]", "memory.offload_fraction=0.5"}),
              HasSubstr("memory.offload_fraction = 0.5 would do nothing: memory.offload names no activations"));
}

TEST(CheckSharding, WeightsOnTheHostAreKeptOnce) {
  const std::string kOnHost = "memory.offload=[\"weights\"]";
  EXPECT_NO_THROW(parse({kOnHost}).check(1));
  EXPECT_NO_THROW(parse({kOnHost, "parallel.fsdp=true", "parallel.fsdp_shard=2"}).check(2));
  EXPECT_NO_THROW(parse({kOnHost, "parallel.pp=2", "parallel.layout=E t*2 | t L"}).check(2));
  EXPECT_THAT(
      check_error({kOnHost}, 2),
      HasSubstr("memory.offload \"weights\": 2 ranks hold the weights of a stage, and each would keep a copy "
                "of some of them in host memory; set parallel.fsdp = true, so that each keeps a shard [--set]"));
  EXPECT_NO_THROW(
      parse({kOnHost, "lora.rank=4", "lora.targets=[\"q_proj\"]", "lora.base=fp8_block", "model.init_from=some/folder"})
          .check(1));
}

}  // namespace
}  // namespace moebius
