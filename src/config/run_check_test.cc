#include "config/run_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(Check, SmallestRecipePasses) { EXPECT_NO_THROW(parse().check(1)); }

TEST(Check, RangesAreCheckedForSpecsThatWereChangedInCode) {
  RunSpec spec = parse();
  spec.optimizer.lr = 0;
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { spec.check(1); }),
              HasSubstr("optimizer.lr must be a finite number above 0, from 1e-37 to 1e+37; got 0.0 [r.toml:17]"));
  spec = parse();
  spec.precision.compute = DType::i8;
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { spec.check(1); }),
              HasSubstr("precision.compute must be \"f32\" or \"bf16\""));
}

TEST(Check, OneErrorListsAllMissingKeys) {
  const auto text = [](const std::string& recipe) {
    return error_text(ErrorKind::usage, [&] { parse_run_spec(recipe, "r.toml", {}).check(1); });
  };
  EXPECT_THAT(text(kModel), HasSubstr("the recipe lacks train.steps, train.global_batch, "
                                      "train.micro_batch, train.seq_len, optimizer.lr; give them in it, "
                                      "or with --set SECTION.KEY=VALUE (and, to train, run.dir, data.train)"));
  const RunSpec no_lr =
      parse_run_spec(kModel + "[run]\ndir = \"d\"\n[data]\ntrain = [\"p\"]\n", "r.toml",
                     {"train.steps=1", "train.global_batch=1", "train.micro_batch=1", "train.seq_len=1"});
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { no_lr.check(1); }), testing::EndsWith("with --set SECTION.KEY=VALUE"));
}

TEST(Check, PrecisionRecipesAreAcceptedWhereTheyRun) {
  for (const char* recipe : {"fp8_block", "fp8_tensor", "mxfp8", "nvfp4"})
    EXPECT_NO_THROW(parse({std::string("precision.recipe=") + recipe}).check(1)) << recipe;
  for (const char* recipe : {"fp8_block", "fp8_tensor", "mxfp8", "nvfp4"})
    EXPECT_NO_THROW(parse({std::string("precision.recipe=") + recipe, "run.device=cuda"}).check(1)) << recipe;
  EXPECT_NO_THROW(parse({"precision.recipe=mxfp8", "run.device=cuda", "run.kernels=portable"}).check(1));
  EXPECT_THAT(check_error({"precision.recipe=fp8_block", "run.device=cuda", "run.kernels=portable"}),
              HasSubstr("precision.recipe = \"fp8_block\" has no portable kernels; set run.kernels = \"auto\" or "
                        "precision.recipe = \"none\""));
  EXPECT_THAT(check_error({"precision.recipe=fp8_block", "run.device=cuda", "precision.compute=f32"}),
              HasSubstr("precision.recipe = \"fp8_block\" on a GPU needs precision.compute = \"bf16\"; got \"f32\"; "
                        "change one of them [--set]"));
  EXPECT_THAT(
      check_error({"precision.keep=[\"*o_proj*\"]"}),
      HasSubstr("precision.keep = [\"*o_proj*\"] would do nothing: precision.recipe is \"none\"; set a recipe, or "
                "remove it [--set]"));
  EXPECT_THAT(check_error({"precision.weight_gradients=compute"}),
              HasSubstr("precision.weight_gradients = \"compute\" would do nothing: precision.recipe is \"none\""));
  EXPECT_THAT(check_error({"precision.weight_copies=false"}),
              HasSubstr("precision.weight_copies = false would do nothing: precision.recipe is \"none\""));
  for (const char* key : {"precision.weights", "precision.dispatch", "precision.activations"}) {
    const std::string held = std::string(key) + "=recipe";
    EXPECT_NO_THROW(parse({"precision.recipe=fp8_block", held}).check(1));
    EXPECT_THAT(check_error({held}),
                HasSubstr(fmt::format("{} = \"recipe\" would do nothing: precision.recipe is", key)));
    EXPECT_THAT(check_error({"precision.recipe=mxfp8", held}),
                HasSubstr(fmt::format("{} = \"recipe\" is for precision.recipe = \"fp8_block\", whose blocks have one "
                                      "scale in both directions or along a row; got \"mxfp8\"; set {} = \"compute\" "
                                      "[--set]",
                                      key, key)));
    EXPECT_NO_THROW(parse({"precision.recipe=fp8_block", "run.device=cuda", held}).check(1));
  }
  EXPECT_THAT(
      check_error({"precision.recipe=fp8_block", "precision.weights=recipe", "optimizer.master=bf16_remainder"}),
      HasSubstr("precision.weights = \"recipe\" holds weights in 8 bits, which remainders cannot be the masters "
                "of; set optimizer.master = \"f32\""));
  EXPECT_NO_THROW(parse({"precision.recipe=fp8_block", "log.precision=true", "run.device=cuda"}).check(1));
  EXPECT_THAT(check_error({"log.precision=true"}), HasSubstr("log.precision = true would do nothing"));
  EXPECT_THAT(parse_error({"precision.recipe=fp8"}),
              HasSubstr("precision.recipe must be \"none\" or \"fp8_block\" or \"fp8_tensor\" or \"mxfp8\" or "
                        "\"nvfp4\"; got \"fp8\""));
}

// Seven ranks of experts are wrong whatever the batch.
TEST(Check, ErrorsOfTheModelComeBeforeThoseOfTheBatch) {
  EXPECT_THAT(check_error({"parallel.ep=7"}, 7),
              HasSubstr("parallel.ep must divide model.num_experts = 4; got 7; the nearest for 7 ranks is 1"));
}

TEST(Check, RefusesBatchesWhoseTokensHaveNoIndex) {
  const Sets at_limit{"train.seq_len=1", "train.micro_batch=1", "model.max_position_embeddings=4"};
  const auto with = [&](Sets more) {
    more.insert(more.begin(), at_limit.begin(), at_limit.end());
    return more;
  };
  EXPECT_NO_THROW(parse(with({"train.global_batch=1000000000", "precision.recipe=nvfp4"})).check(1));
  EXPECT_NO_THROW(parse(with({"train.global_batch=1000000000", "train.seq_len=3"})).check(1));
  EXPECT_THAT(check_error(with({"train.global_batch=1000000000", "train.seq_len=3", "precision.recipe=nvfp4"})),
              HasSubstr("precision.recipe = \"nvfp4\" rounds by the index of a token in the global batch: "
                        "train.global_batch * seq_len must be at most 2147483647; got 1000000000 * 3; lower "
                        "train.global_batch [--set]"));
}

TEST(Check, RefusesBatchesThatDoNotDivide) {
  EXPECT_THAT(
      check_error({"train.global_batch=7"}),
      HasSubstr("train.global_batch must be divisible by micro_batch * dp = 3 * 1 = 3; got 7; the nearest are 6 "
                "and 9 [--set]"));
  EXPECT_THAT(
      check_error({}, 4),
      HasSubstr("train.global_batch must be divisible by micro_batch * dp = 3 * 4 = 12; got 6; the nearest is 12"));
  EXPECT_THAT(
      check_error({"train.seq_len=34"}),
      HasSubstr(
          "train.seq_len must be at most model.max_position_embeddings = 33; got 34; a longer context needs model.max_position_embeddings "
          "and, for a trained model, model.rope_scaling or rope_theta [--set]"));
}

TEST(Check, RefusesMoreExpertsOfATokenThanThereAre) {
  EXPECT_THAT(check_error({"model.num_experts_per_tok=5"}),
              HasSubstr("num_experts_per_tok must be from 1 to num_experts = 4; got 5"));
}

TEST(Check, RefusesKeysOfAnotherOptimizer) {
  EXPECT_THAT(
      check_error({"optimizer.momentum=0.5"}),
      HasSubstr(
          "optimizer.momentum = 0.5 would do nothing: optimizer.name is \"adamw\"; choose \"sgd\" or \"muon\", or "
          "remove it [--set]"));
  for (const char* key : {"beta1", "beta2", "eps"})
    EXPECT_THAT(check_error({"optimizer.name=sgd", fmt::format("optimizer.{}=0.5", key)}),
                HasSubstr(fmt::format("optimizer.{} = 0.5 would do nothing: optimizer.name is \"sgd\"; choose "
                                      "\"adamw\", or remove it [--set]",
                                      key)));
  EXPECT_THAT(check_error({"optimizer.name=sgd", "optimizer.momentum=0", "optimizer.state=bf16"}),
              HasSubstr("optimizer.state = \"bf16\" would do nothing: optimizer.momentum is 0, so there is no state; "
                        "set momentum, or remove it [--set]"));
  parse({"optimizer.name=sgd", "optimizer.momentum=0"}).check(1);
  const RunSpec sgd = parse({"optimizer.name=sgd"});
  parse_run_spec(to_toml(sgd, false), "resolved", {}).check(1);  // which holds every key
}

TEST(Check, RefusesOtherMastersOfF32Weights) {
  for (const char* form : {"bf16_remainder", "bf16_stochastic"}) {
    const std::string master = fmt::format("optimizer.master={}", form);
    parse({"precision.compute=bf16", master}).check(1);
    EXPECT_THAT(check_error({"precision.compute=f32", master}),
                HasSubstr(fmt::format("optimizer.master = \"{}\" would do nothing: precision.compute is \"f32\", and "
                                      "f32 weights are their own masters; set \"bf16\", or remove it [--set]",
                                      form)));
  }
}

TEST(Check, RefusesSumsOfGradientsInBf16ThatCannotBe) {
  parse({"precision.compute=bf16", "optimizer.grad=bf16", "optimizer.offload_grad=true"}).check(1);
  EXPECT_THAT(check_error({"precision.compute=f32", "optimizer.grad=bf16"}),
              HasSubstr("optimizer.grad = \"bf16\" would do nothing: precision.compute is \"f32\", and gradients of "
                        "f32 weights are f32; set \"bf16\", or remove it [--set]"));
  EXPECT_THAT(check_error({"optimizer.offload_grad=true"}),
              HasSubstr("optimizer.offload_grad = true would do nothing: optimizer.grad is \"f32\"; set \"bf16\", or "
                        "remove it [--set]"));
  EXPECT_THAT(check_error({"optimizer.offload_buffer=2"}),
              HasSubstr("optimizer.offload_buffer = 2 would do nothing: optimizer.offload is false; set it to true, or "
                        "remove offload_buffer [--set]"));
  for (const char* idle : {"optimizer.offload_buffer=0", "optimizer.offload_buffer=auto"})
    EXPECT_NO_THROW(parse({idle}).check(1)) << "a resolved recipe may have it";
  EXPECT_THAT(check_error({"optimizer.fuse_grad=true"}),
              HasSubstr("optimizer.fuse_grad = true would do nothing: optimizer.grad is \"f32\"; set \"bf16\", or "
                        "remove it [--set]"));
  const std::vector<std::string> on_host{"precision.compute=bf16", "optimizer.grad=bf16", "optimizer.fuse_grad=true",
                                         "optimizer.offload_grad=true"};
  EXPECT_THAT(check_error(on_host),
              HasSubstr("optimizer.fuse_grad = true needs sums of gradients in the memory of the GPU; set "
                        "optimizer.offload_grad = false, or remove fuse_grad [--set]"));
  EXPECT_THAT(
      check_error({"precision.compute=bf16", "optimizer.grad=bf16", "optimizer.fuse_grad=true", "run.device=cuda",
                   "run.kernels=portable"}),
      HasSubstr("optimizer.fuse_grad = true needs Hopper's kernels, which run.kernels = \"portable\" leaves out"));
  EXPECT_THAT(check_error({"precision.compute=bf16", "optimizer.grad=bf16", "optimizer.fuse_grad=true",
                           "run.device=cuda", "model.moe_intermediate_size=12"}),
              HasSubstr("got widths of 12 and 12"));
  EXPECT_THAT(check_error({"precision.compute=bf16", "optimizer.grad=bf16", "optimizer.fuse_grad=true", "lora.rank=4",
                           "lora.alpha=4"}),
              HasSubstr("optimizer.fuse_grad = true would do nothing"));
  EXPECT_THAT(check_error({"precision.compute=bf16", "optimizer.grad=bf16", "optimizer.fuse_grad=true",
                           "precision.recipe=fp8_block"}),
              HasSubstr("optimizer.fuse_grad = true would do nothing: products with quantised operands write f32 "
                        "gradients; set precision.weight_gradients = \"compute\", or remove it [--set]"));
  EXPECT_NO_THROW(parse({"precision.compute=bf16", "optimizer.grad=bf16", "optimizer.fuse_grad=true",
                         "precision.recipe=fp8_block", "precision.weight_gradients=compute"})
                      .check(1));
  EXPECT_NO_THROW(parse({"precision.compute=bf16", "optimizer.grad=bf16", "optimizer.master=bf16_remainder"}).check(1));
}

TEST(Check, RefusesContradictionsOfTheLrSchedule) {
  EXPECT_THAT(check_error({"optimizer.min_lr=0.6"}),
              HasSubstr("optimizer.min_lr must be at most lr = 0.5; got 0.6 [--set]"));
  EXPECT_THAT(check_error({"optimizer.min_lr=0.1", "optimizer.schedule=constant"}),
              HasSubstr("min_lr = 0.1 has no meaning in schedule \"constant\""));
  EXPECT_THAT(check_error({"optimizer.decay_steps=3"}),
              HasSubstr("decay_steps = 3 has a meaning in schedule \"wsd\" only"));
  EXPECT_THAT(check_error({"optimizer.decay_steps=3", "optimizer.warmup_steps=7", "optimizer.schedule=wsd"}),
              HasSubstr("warmup_steps + decay_steps = 7 + 3 must be at most train.steps = 9"));
  // A tenth of the steps that is one step is no decay.
  for (const char* few : {"train.steps=9", "train.steps=19"})
    EXPECT_THAT(check_error({"optimizer.schedule=wsd", few}),
                HasSubstr("optimizer.schedule \"wsd\" needs decay_steps here: a tenth of train.steps = "));
  parse({"optimizer.schedule=wsd", "train.steps=20"}).check(1);
  parse({"optimizer.schedule=wsd", "train.steps=9", "optimizer.decay_steps=1"}).check(1);
}

TEST(Check, RefusesContradictionsOfTheBalance) {
  EXPECT_THAT(check_error({"moe.balance=bias", "moe.bias_rate=0.1", "lora.rank=4", "lora.targets=[\"q_proj\"]",
                           "model.init_from=base"}),
              HasSubstr("choose another balance, and model.expert_bias = true where the model was trained with it"));
  EXPECT_THAT(check_error({"moe.balance=[\"sinkhorn\", \"aux\"]", "moe.aux_coeff=0.1"}),
              HasSubstr("\"sinkhorn\" balances experts by itself"));
  EXPECT_THAT(check_error({"moe.balance=sinkhorn", "moe.force_balance=true"}),
              HasSubstr("\"sinkhorn\" balances experts by itself"));
  EXPECT_THAT(check_error({"moe.balance=sinkhorn", "model.n_group=2", "model.topk_group=1"}),
              HasSubstr("moe.balance \"sinkhorn\" chooses among all experts: model.n_group must be 1; got 2; choose "
                        "another balance, or a model without groups [--set]"));
  EXPECT_THAT(check_error({"moe.balance=sinkhorn", "model.expert_bias=true"}),
              HasSubstr("moe.balance \"sinkhorn\" chooses by the scores only: model.expert_bias must be false; choose "
                        "another balance, or a model without the bias [--set]"));
  EXPECT_NO_THROW(parse({"moe.balance=sinkhorn"}).check(1));
  EXPECT_THAT(check_error({"moe.balance=aux"}), HasSubstr("aux_coeff is 0, so it would do nothing; set moe.aux_coeff"));
  EXPECT_THAT(check_error({"moe.aux_coeff=0.1"}),
              HasSubstr("moe.aux_coeff = 0.1 needs \"aux\", \"seq_aux\" or \"global_aux\" in moe.balance"));
  EXPECT_THAT(check_error({"model.num_experts=0", "model.intermediate_size=9", "moe.balance=bias"}),
              HasSubstr("moe.balance needs experts; the model has none"));
}

TEST(Check, RefusesKeysOfMoeThatWouldDoNothing) {
  EXPECT_THAT(check_error({"moe.bias_rate=0.1"}),
              HasSubstr("moe.bias_rate = 0.1 would do nothing: moe.balance has no \"bias\"; "
                        "add it, or remove bias_rate [--set]"));
  EXPECT_NO_THROW(parse({"moe.bias_rate=0.1", "moe.balance=bias"}).check(1));
  EXPECT_THAT(
      check_error({"moe.drop_policy=position"}),
      HasSubstr("moe.drop_policy = \"position\" would do nothing: without moe.capacity_factor nothing is dropped"));
  EXPECT_NO_THROW(parse({"moe.drop_policy=position", "moe.capacity_factor=1"}).check(1));
  for (const char* balance : {"aux", "seq_aux", "global_aux", "bias"}) {
    Sets sets{"moe.force_balance=true", std::string("moe.balance=") + balance};
    if (std::string(balance) != "bias") sets.push_back("moe.aux_coeff=0.1");
    EXPECT_THAT(check_error(sets), HasSubstr("moe.force_balance gives every expert the same load, so moe.balance has"));
  }
  EXPECT_NO_THROW(parse({"moe.force_balance=true"}).check(1));
}

TEST(Check, KeysOfMoeNeedAnMoeLayer) {
  for (const char* set : {"moe.z_coeff=0.1", "moe.capacity_factor=2", "moe.jitter=0.1", "moe.router_dtype=compute",
                          "moe.force_balance=true"}) {
    EXPECT_THAT(check_error({"model.moe_layer_freq=[0, 0, 0]", "model.intermediate_size=9", set}),
                HasSubstr("would do nothing: the model has no MoE layer (model.num_experts, model.moe_layer_freq)"));
  }
  EXPECT_THAT(check_error({"model.moe_layer_freq=[0, 0, 0]", "model.intermediate_size=9", "moe.balance=aux",
                           "moe.aux_coeff=0.1"}),
              HasSubstr("moe.balance = \"aux\" would do nothing"));
  EXPECT_NO_THROW(parse({"model.moe_layer_freq=[0, 0, 0]", "model.intermediate_size=9"}).check(1));
}

TEST(Check, RefusesMultiTokenPredictionThatCannotBe) {
  EXPECT_NO_THROW(parse({"model.num_nextn_predict_layers=2", "train.mtp_coeff=0.3"}).check(1));
  EXPECT_EQ(parse({"model.num_nextn_predict_layers=2"}).num_mtp(), 2);
  EXPECT_EQ(parse({"model.num_nextn_predict_layers=2", "train.mtp_coeff=0"}).num_mtp(), 0);
  EXPECT_THAT(check_error({"train.mtp_coeff=0.3"}),
              HasSubstr("train.mtp_coeff = 0.3 would do nothing: the model has no multi-token prediction "
                        "(model.num_nextn_predict_layers); remove it [--set]"));
  const auto on_two_ranks = [](const std::string& layout) {
    return parse({"model.num_nextn_predict_layers=1", "parallel.pp=2", "parallel.layout=" + layout});
  };
  EXPECT_NO_THROW(on_two_ranks("E t*2 | t m L").check(2));
  EXPECT_THAT(
      error_text(ErrorKind::usage, [&] { on_two_ranks("E t*3 m | L").check(2); }),
      HasSubstr(
          "parallel.layout: m must not be on the first rank before L, since that rank has the embedding; got \"E t*3 m "
          "| L\", where rank 0 of pp = 2 has it; write m L on the last stage"));
  EXPECT_NO_THROW(
      parse({"model.num_nextn_predict_layers=1", "parallel.pp=3", "parallel.layout=E t*3 | m | L"}).check(3));
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { on_two_ranks("E t*2 | t L").check(2); }),
              HasSubstr("stage 1 has L where m is due"));
}

TEST(Check, OffloadNamesWhatIsKept) {
  EXPECT_NO_THROW(parse({"memory.offload=[\"layer_input\", \"norm\", \"qkv\", \"attention\", \"expert_up\"]",
                         "memory.offload_fraction=0.5"})
                      .check(1));
  EXPECT_NO_THROW(parse({"memory.offload=[\"layer\"]", "memory.recompute=[\"norm\"]"}).check(1));
  EXPECT_NO_THROW(parse({"memory.offload=[\"layer_input\"]", "memory.recompute=[\"layer\"]"}).check(1));
  EXPECT_NO_THROW(parse({"memory.offload=[\"qkv\"]", "memory.recompute=[\"qkv:0-1\"]"}).check(1));
  EXPECT_THAT(
      check_error({"memory.offload=[\"mlp\"]"}),
      HasSubstr("memory.offload \"mlp\" would do nothing: the model has no layer that keeps it; remove it [--set]"));
  EXPECT_THAT(check_error({"memory.offload=[\"shared_expert\"]"}), HasSubstr("the model has no layer that keeps it"));
  EXPECT_THAT(check_error({"memory.offload=[\"mla_up_proj\"]"}), HasSubstr("the model has no layer that keeps it"));
  EXPECT_THAT(
      check_error({"memory.offload=[\"norm\", \"qkv\"]", "memory.recompute=[\"qkv\"]"}),
      HasSubstr("memory.offload \"qkv\" would do nothing: memory.recompute covers it, so it is not kept; remove "
                "it from one of the two [--set]"));
  EXPECT_THAT(check_error({"memory.offload=[\"expert_up\"]", "memory.recompute=[\"layer\"]"}),
              HasSubstr("memory.recompute covers it"));
  EXPECT_THAT(
      check_error({"memory.offload_fraction=0.5"}),
      HasSubstr("memory.offload_fraction = 0.5 would do nothing: memory.offload names nothing; name something, or "
                "remove it [--set]"));
}

TEST(Check, RecomputeNamesWhatTheModelHas) {
  EXPECT_NO_THROW(parse({"memory.recompute=[\"layer\", \"norm\", \"qkv\", \"attention\", \"expert_up\"]"}).check(1));
  EXPECT_THAT(
      check_error({"memory.recompute=[\"shared_expert\"]"}),
      HasSubstr(
          "memory.recompute \"shared_expert\" would do nothing: the model has no shared experts; remove it [--set]"));
  EXPECT_THAT(check_error({"memory.recompute=[\"mlp\"]"}), HasSubstr("the model has no dense feed-forward layers"));
  EXPECT_THAT(check_error({"memory.recompute=[\"mlp:0\"]"}), HasSubstr("the model has no dense feed-forward layers"));
  EXPECT_THAT(check_error({"memory.recompute=[\"mla_up_proj\"]"}), HasSubstr("the model has no latent attention"));
  EXPECT_NO_THROW(parse({"memory.recompute=[\"norm:0-2\"]"}).check(1));
  EXPECT_THAT(
      check_error({"memory.recompute=[\"norm:0,2-3\"]"}),
      HasSubstr("memory.recompute names layer 3, and the last one of the model is 2; correct the range [--set]"));
  EXPECT_NO_THROW(parse({"memory.recompute=auto", "memory.fit=80GiB"}).check(1));
  EXPECT_THAT(
      check_error({"memory.recompute=auto"}),
      HasSubstr("memory.recompute = \"auto\" needs memory.fit, the memory that a rank may need, such as \"80GiB\"; set "
                "it [--set]"));
}

TEST(Check, RefusesUnsupportedFeatures) {
  EXPECT_THAT(check_error({"parallel.dispatcher=alltoall"}),
              HasSubstr("parallel.dispatcher = \"alltoall\" would do nothing: parallel.ep and etp are 1, so each rank "
                        "holds all experts; set parallel.ep, or remove it [--set]"));
  EXPECT_THAT(check_error({"parallel.dispatcher=alltoall", "parallel.ep=2", "run.device=cuda"}, 2),
              HasSubstr("parallel.dispatcher = \"alltoall\" reads its counts on the host, so its steps cannot be "
                        "captured in CUDA graphs; set run.graph = false, or dispatcher = \"allgather\" [--set]"));
  EXPECT_THAT(check_error({"parallel.expert_overlap=layer"}),
              HasSubstr("parallel.expert_overlap = \"layer\" would do nothing: parallel.ep and etp are 1, so each rank "
                        "holds all experts; set parallel.ep, or remove it [--set]"));
  EXPECT_NO_THROW(parse({"parallel.expert_overlap=layer", "parallel.ep=2"}).check(2));
  EXPECT_NO_THROW(parse({"parallel.ranks_per_node=2", "parallel.ep=4", "train.global_batch=12"}).check(4));
  for (const auto& [ep, node] : {std::pair{1, 4}, {4, 4}, {4, 3}}) {
    EXPECT_THAT(
        error_text(
            ErrorKind::usage,
            [&] {
              parse({fmt::format("parallel.ranks_per_node={}", node), fmt::format("parallel.ep={}", ep)}).check(ep);
            }),
        HasSubstr(fmt::format("parallel.ranks_per_node = {} would do nothing: the {} of the run are not on several "
                              "whole nodes of {}; choose a smaller divisor of {}, or remove it",
                              node, ep == 1 ? "1 rank" : "4 ranks", node, ep)));
  }
  EXPECT_THAT(parse_error({"parallel.ranks_per_node=9"}),
              HasSubstr("parallel.ranks_per_node must be a whole number from 1 to 8; got 9"));
  EXPECT_THAT(parse_error({"parallel.expert_overlap=half"}),
              HasSubstr("parallel.expert_overlap must be \"none\" or \"layer\" or \"batch_split\"; got \"half\""));
  EXPECT_NO_THROW(parse({"parallel.dispatcher=alltoall", "parallel.ep=2"}).check(2));
  EXPECT_NO_THROW(parse({"parallel.dispatcher=alltoall", "parallel.ep=2", "moe.rank_rows_factor=1.5"}).check(2));
  EXPECT_THAT(check_error({"parallel.ep=2", "moe.rank_rows_factor=1.5"}, 2),
              HasSubstr("moe.rank_rows_factor = 1.5 bounds the rows of a rank, which only all-to-all can check; set "
                        "parallel.dispatcher = \"alltoall\", or remove it [--set]"));
  EXPECT_THAT(check_error({"moe.rank_rows_factor=1.5"}), HasSubstr("moe.rank_rows_factor = 1.5 would do nothing"));
  EXPECT_NO_THROW(parse({"parallel.ep=2", "memory.expert_rows=1.5"}).check(2));
  EXPECT_NO_THROW(parse({"memory.expert_rows=auto"}).check(1)) << "the default may be written";
  EXPECT_NO_THROW(parse({"memory.expert_rows=1.25"}).check(1)) << "resolved recipes of earlier versions have it";
  EXPECT_THAT(check_error({"memory.expert_rows=1.5"}), HasSubstr("memory.expert_rows = 1.5 would do nothing"));
  EXPECT_THAT(parse_error({"parallel.schedule=zb"}),
              HasSubstr("parallel.schedule must be \"1f1b\" or \"zb_h1\"; got \"zb\""));
}

// A resolved recipe holds every key, and reads back to a run that passes.
TEST(Check, AResolvedRecipePasses) { EXPECT_NO_THROW(read_back(parse(), true).check(1)); }

TEST(Check, RefusesFloatsOutOfRange) {
  EXPECT_THAT(parse_error({"optimizer.eps=1e-46"}),
              HasSubstr("optimizer.eps must be a finite number above 0, from 1e-37"));
  for (const char* key :
       {"optimizer.lr", "optimizer.min_lr", "optimizer.clip", "optimizer.weight_decay", "optimizer.beta1",
        "optimizer.beta2", "moe.aux_coeff", "moe.z_coeff", "moe.bias_rate", "moe.jitter", "moe.capacity_factor",
        "model.rms_norm_eps", "model.initializer_range", "model.routed_scaling_factor"}) {
    for (const char* value : {"=1e-46", "=1e39"})
      EXPECT_THAT(parse_error({std::string(key) + value}), HasSubstr("from 1e-37"));
  }
  EXPECT_THAT(parse_error({"moe.capacity_factor=2e6"}), HasSubstr("from 1e-37 to 1000000; got 2000000.0"));
  EXPECT_NO_THROW(parse({"optimizer.lr=1e30", "optimizer.min_lr=1e30"}).check(1));
}

TEST(Check, RefusesADatasetTwiceAndWeightsOfHeldOutData) {
  EXPECT_THAT(check_error({"data.train=[\"p\", \"q\", \"p\"]"}),
              HasSubstr("data.train names \"p\" twice; give it once, with a weight [--set]"));
  EXPECT_THAT(check_error({"data.valid=[{prefix = \"p\", weight = 2}]"}),
              HasSubstr("data.valid gives \"p\" a weight of 2, but an evaluation reads each dataset once"));
  EXPECT_THAT(check_error({"data.valid=[\"p\", \"p\"]"}), HasSubstr("data.valid names \"p\" twice"));
}

TEST(Check, RefusesDegreesThatDoNotDivide) {
  EXPECT_NO_THROW(parse({"parallel.tp=2", "parallel.ep=2", "train.seq_len=8"}).check(2));
  EXPECT_THAT(check_error({"parallel.tp=2"}), HasSubstr("divisible by tp * cp * pp = 2 * 1 * 1; got 1;"));
  EXPECT_THAT(check_error({"parallel.tp=4"}, 4),
              HasSubstr("parallel.tp must divide model.num_attention_heads = 2; got 4; the nearest for 4 ranks is 2"));
  EXPECT_THAT(check_error({"parallel.tp=2", "model.num_key_value_heads=1"}, 2),
              HasSubstr("parallel.tp must divide model.num_key_value_heads = 1; got 2"));
  EXPECT_THAT(check_error({"parallel.ep=8", "parallel.tp=2", "train.micro_batch=1", "train.global_batch=4"}, 8),
              HasSubstr("parallel.ep must divide model.num_experts = 4; got 8"));
  EXPECT_THAT(check_error({"parallel.etp=2", "model.moe_intermediate_size=5", "train.micro_batch=1"}, 2),
              HasSubstr("parallel.etp must divide model.moe_intermediate_size = 5; got 2"));
  EXPECT_THAT(check_error({"parallel.tp=2", "model.shared_expert_intermediate_size=3"}, 2),
              HasSubstr("parallel.tp must divide model.shared_expert_intermediate_size = 3; got 2"));
  EXPECT_THAT(check_error({"parallel.tp=2", "parallel.cp=2", "parallel.cp_comm=alltoall", "train.seq_len=8"}, 4),
              HasSubstr("parallel.cp_comm = \"alltoall\" shares heads: tp * cp = 2 * 2 must divide "
                        "model.num_key_value_heads = 2; choose \"allgather\" or \"ring\", or parallel.cp = 1"));
  EXPECT_THAT(check_error({"parallel.cp_comm=ring"}),
              HasSubstr("parallel.cp_comm = \"ring\" would do nothing: parallel.cp is 1; remove it, or set cp"));
  EXPECT_THAT(check_error({"parallel.cp=2"}, 2),
              HasSubstr("train.seq_len must be divisible by 2 * parallel.cp = 4; got 7; the nearest are 4 and 8, or "
                        "parallel.cp = 1 [r.toml:15]"));
  EXPECT_THAT(check_error({"parallel.cp=24", "train.seq_len=16"}, 24),
              HasSubstr("divisible by 2 * parallel.cp = 48; got 16; choose parallel.cp = 8 [--set]"));
}

TEST(Check, RefusesContradictionsOfContextParallelism) {
  const Sets cp4{"parallel.cp=4", "train.seq_len=16", "train.micro_batch=1", "model.num_key_value_heads=2"};
  const auto error = [&](Sets more, int64_t ranks = 4) {
    more.insert(more.begin(), cp4.begin(), cp4.end());
    return check_error(more, ranks);
  };
  const std::string hierarchical = "parallel.cp_comm=hierarchical";
  Sets legal = cp4;
  legal.insert(legal.end(), {hierarchical, "parallel.cp_inner=2"});
  EXPECT_NO_THROW(parse(legal).check(4));
  EXPECT_THAT(error({hierarchical}),
              HasSubstr("parallel.cp_inner must be above 1 and below parallel.cp = 4, and divide it, and tp * cp_inner "
                        "= 1 * 1 must divide model.num_key_value_heads = 2, for parallel.cp_comm = \"hierarchical\"; "
                        "got 1; choose 2"));
  EXPECT_THAT(error({hierarchical, "parallel.cp_inner=4"}), HasSubstr("got 4; choose 2 [--set]"));
  EXPECT_THAT(error({hierarchical, "parallel.cp_inner=2", "model.num_key_value_heads=1"}),
              HasSubstr("got 2; none is left; choose another parallel.cp_comm"));
  EXPECT_THAT(error({"parallel.cp_inner=2"}),
              HasSubstr("parallel.cp_inner = 2 would do nothing: it is read by parallel.cp_comm = \"hierarchical\""));
  EXPECT_THAT(error({"parallel.cp_comm_window=ring"}),
              HasSubstr("parallel.cp_comm_window = \"ring\" would do nothing: no layer of the model has a window"));
  EXPECT_THAT(check_error({"parallel.dynamic_cp=true"}),
              HasSubstr("parallel.dynamic_cp = true would do nothing: parallel.cp is 1"));
  EXPECT_THAT(error({"parallel.dynamic_cp=true"}),
              HasSubstr("parallel.dynamic_cp = true keeps documents whole on some ranks of cp; set "
                        "data.separate_documents and data.pack_documents, or remove it [--set]"));
  const Sets packed{"parallel.dynamic_cp=true", "data.separate_documents=true", "data.pack_documents=true"};
  const auto with = [&](Sets more) {
    more.insert(more.begin(), packed.begin(), packed.end());
    return error(more);
  };
  legal = cp4;
  legal.insert(legal.end(), packed.begin(), packed.end());
  EXPECT_NO_THROW(parse(legal).check(4));
  EXPECT_THAT(with({hierarchical, "parallel.cp_inner=2"}), HasSubstr("parallel.dynamic_cp = true has no two levels"));
  EXPECT_THAT(error({"parallel.cp=3", "train.seq_len=12", "parallel.dynamic_cp=true"}, 3),
              HasSubstr("needs a parallel.cp that is a power of two; got 3; the nearest are 2 and 4"));
  Sets pipeline = legal;
  for (const char* set : {"run.device=cuda", "precision.compute=bf16", "parallel.pp=2", "parallel.layout=E t | t*2 L"})
    pipeline.push_back(set);
  EXPECT_NO_THROW(parse(pipeline).check(8)) << "each sequence of cp has a CUDA graph";
  EXPECT_THAT(check_error({"data.pack_documents=true"}), HasSubstr("data.pack_documents = true would do nothing"));
}

TEST(Check, RefusesLayoutsThatDoNotFitThePipeline) {
  EXPECT_NO_THROW(parse({"parallel.pp=3"}).check(3));
  EXPECT_NO_THROW(parse({"parallel.pp=2", "parallel.layout=E t*2 | t L"}).check(2));
  EXPECT_THAT(check_error({"parallel.pp=2"}, 2),
              HasSubstr("divisible by pp * vpp = 2 * 1 = 2; got 3 layers; set parallel.layout"));
  EXPECT_THAT(check_error({"parallel.layout=E t*2 | t L"}),
              HasSubstr("parallel.layout must have pp * vpp = 1 * 1 = 1 stages; got 2 in \"E t*2 | t L\""));
  EXPECT_THAT(check_error({"parallel.pp=2", "parallel.layout=E t | t L"}, 2), HasSubstr("after 2 of 3 layers"));
  const std::string four = "parallel.layout=E t | t | t | L";
  EXPECT_NO_THROW(parse({"parallel.pp=2", "parallel.vpp=2", four}).check(2));
  EXPECT_THAT(check_error({"parallel.pp=2", "parallel.vpp=2", four, "train.micro_batch=2"}, 2),
              HasSubstr("parallel.vpp = 2 needs a multiple of pp = 2 micro-batches per step; got train.global_batch / "
                        "(micro_batch * dp) = 6 / (2 * 1) = 3; change them, or set vpp = 1 [--set]"));
}

}  // namespace
}  // namespace moebius
