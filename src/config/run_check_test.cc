#include "config/run_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(Check, SmallestRecipePasses) { EXPECT_NO_THROW(parse().check(1)); }

TEST(Check, RangesHoldForSpecsThatNoRecipeWrote) {
  RunSpec spec = parse();
  spec.optimizer.lr = 0;
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { spec.check(1); }),
              HasSubstr("optimizer.lr must be a finite number above 0; got 0.0 [r.toml:17]"));
  spec = parse();
  spec.precision.compute = DType::i8;
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { spec.check(1); }),
              HasSubstr("precision.compute must be \"f32\" or \"bf16\""));
  spec = parse_run_spec(kModel, "r.toml", {});
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { spec.check(1); }),
              HasSubstr("train.steps must be a whole number from 1 to 1000000000; got 0 [default]"));
}

TEST(Check, Batches) {
  EXPECT_THAT(check_error({"train.global_batch=7"}),
              HasSubstr("train.global_batch must be divisible by micro_batch * dp = 3 * 1 = 3; got 7 [--set]"));
  EXPECT_THAT(check_error({}, 4),
              HasSubstr("train.global_batch must be divisible by micro_batch * dp = 3 * 4 = 12; got 6"));
  EXPECT_THAT(check_error({"train.seq_len=34"}),
              HasSubstr("train.seq_len must be at most model.max_position_embeddings = 33; got 34 [--set]"));
}

TEST(Check, Model) {
  EXPECT_THAT(check_error({"model.num_experts_per_tok=5"}),
              HasSubstr("num_experts_per_tok must be from 1 to num_experts = 4; got 5"));
}

TEST(Check, Schedule) {
  EXPECT_THAT(check_error({"optimizer.min_lr=0.6"}),
              HasSubstr("optimizer.min_lr must be at most lr = 0.5; got 0.6 [--set]"));
  EXPECT_THAT(check_error({"optimizer.min_lr=0.1", "optimizer.schedule=constant"}),
              HasSubstr("min_lr = 0.1 has no meaning in schedule \"constant\""));
  EXPECT_THAT(check_error({"optimizer.decay_steps=3"}),
              HasSubstr("decay_steps = 3 has a meaning in schedule \"wsd\" only"));
  EXPECT_THAT(check_error({"optimizer.decay_steps=3", "optimizer.warmup_steps=7", "optimizer.schedule=wsd"}),
              HasSubstr("warmup_steps + decay_steps = 7 + 3 must be at most train.steps = 9"));
}

TEST(Check, Balance) {
  EXPECT_THAT(check_error({"moe.balance=[\"sinkhorn\", \"aux\"]", "moe.aux_coeff=0.1"}),
              HasSubstr("\"sinkhorn\" chooses the experts alone"));
  EXPECT_THAT(check_error({"moe.balance=sinkhorn", "moe.force_balance=true"}),
              HasSubstr("\"sinkhorn\" chooses the experts alone"));
  EXPECT_THAT(check_error({"moe.balance=aux"}), HasSubstr("aux_coeff is 0, so it would do nothing; set moe.aux_coeff"));
  EXPECT_THAT(check_error({"moe.aux_coeff=0.1"}),
              HasSubstr("moe.aux_coeff = 0.1 needs \"aux\", \"seq_aux\" or \"global_aux\" in moe.balance"));
  EXPECT_THAT(check_error({"model.num_experts=0", "model.intermediate_size=9", "moe.balance=bias"}),
              HasSubstr("moe.balance needs experts; the model has none"));
  EXPECT_NO_THROW(parse({"moe.bias_rate=0.1"}).check(1));
}

TEST(Check, Datasets) {
  EXPECT_THAT(check_error({"data.train=[\"p\", \"q\", \"p\"]"}),
              HasSubstr("data.train names \"p\" twice; give it once, with a weight [--set]"));
  EXPECT_THAT(check_error({"data.valid=[\"p\", \"p\"]"}), HasSubstr("data.valid names \"p\" twice"));
}

TEST(Check, Layout) {
  EXPECT_NO_THROW(parse({"parallel.tp=2", "parallel.ep=2"}).check(2));
  EXPECT_THAT(check_error({"parallel.tp=2"}), HasSubstr("divisible by tp * cp * pp = 2 * 1 * 1; got 1 ranks"));
  EXPECT_THAT(check_error({"parallel.tp=4"}, 4),
              HasSubstr("parallel.tp must divide model.num_attention_heads = 2; got 4"));
  EXPECT_THAT(check_error({"parallel.tp=2", "model.num_key_value_heads=1"}, 2),
              HasSubstr("parallel.tp must divide model.num_key_value_heads = 1; got 2"));
  EXPECT_THAT(check_error({"parallel.ep=8", "parallel.tp=2", "train.micro_batch=1", "train.global_batch=4"}, 8),
              HasSubstr("parallel.ep must divide model.num_experts = 4; got 8"));
  EXPECT_THAT(check_error({"parallel.etp=2", "model.moe_intermediate_size=5", "train.micro_batch=1"}, 2),
              HasSubstr("parallel.etp must divide model.moe_intermediate_size = 5; got 2"));
  EXPECT_THAT(check_error({"parallel.tp=2", "model.shared_expert_intermediate_size=3"}, 2),
              HasSubstr("parallel.tp must divide model.shared_expert_intermediate_size = 3; got 2"));
  EXPECT_THAT(check_error({"parallel.cp=2"}, 2),
              HasSubstr("train.seq_len must be divisible by 2 * parallel.cp = 4; got 7"));
  EXPECT_THAT(check_error({"parallel.pp=2"}, 2), HasSubstr("pp * vpp = 2 * 1 must divide the 3 layers"));
}

TEST(CheckTrainable, NamesWhatTrainingNeeds) {
  const auto text = [](const Sets& sets) {
    return error_text(ErrorKind::usage, [&] { parse(sets).check_trainable(); });
  };
  EXPECT_THAT(text({}), HasSubstr("run.dir must be given"));
  EXPECT_THAT(text({"run.dir=d"}), HasSubstr("data.train must be given"));
  EXPECT_THAT(text({"run.dir=d", "data.train=[\"p\"]", "train.eval_every=3"}),
              HasSubstr("train.eval_every = 3 needs data.valid"));
  EXPECT_NO_THROW(parse({"run.dir=d", "data.train=[\"p\"]"}).check_trainable());
}

}  // namespace
}  // namespace moebius
