#include "config/dispatcher_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(DispatcherChoice, NothingIsDispatchedOnOneRank) {
  for (const DispatcherKind asked : kDispatcherKinds) {
    const DispatcherChoice local = resolve_dispatcher({.asked = asked, .top_k = 2, .captures = true});
    EXPECT_EQ(local.kind, asked);
    EXPECT_EQ(local.name, "local");
    EXPECT_EQ(local.reason, "each rank holds all experts of its layers (parallel.ep * etp = 1)");
  }
  const DispatcherChoice none = resolve_dispatcher({.ep = 4, .has_moe_layers = false});
  EXPECT_EQ(none.name, "none");
  EXPECT_EQ(none.reason, "the model has no MoE layer");
}

TEST(DispatcherChoice, AutoGathersUpToTopK) {
  for (const bool captures : {false, true}) {
    const DispatcherChoice choice = resolve_dispatcher({.ep = 4, .etp = 2, .top_k = 4, .captures = captures});
    EXPECT_EQ(choice.kind, DispatcherKind::allgather);
    EXPECT_EQ(choice.name, "allgather");
    EXPECT_EQ(choice.reason,
              "chosen by \"auto\" because parallel.ep = 4 is at most top-k = 4, so that it sends no more than "
              "all-to-all");
  }
}

TEST(DispatcherChoice, AutoIsAllToAllAboveTopK) {
  const DispatcherChoice choice = resolve_dispatcher({.ep = 8, .top_k = 4});
  EXPECT_EQ(choice.kind, DispatcherKind::alltoall);
  EXPECT_EQ(choice.name, "alltoall");
  EXPECT_EQ(choice.reason,
            "chosen by \"auto\" because parallel.ep = 8 is above top-k = 4, so that it sends less than all-gather");
}

TEST(DispatcherChoice, AutoIsNeverAllToAllUnderGraphs) {
  const DispatcherChoice choice = resolve_dispatcher({.ep = 8, .top_k = 4, .captures = true});
  EXPECT_EQ(choice.kind, DispatcherKind::allgather);
  EXPECT_EQ(choice.name, "allgather");
  EXPECT_EQ(choice.reason,
            "chosen by \"auto\" because run.graph is on and all-to-all cannot be captured in CUDA graphs; with "
            "run.graph = false \"auto\" is all-to-all, which sends less (parallel.ep = 8, top-k = 4)");
}

TEST(DispatcherChoice, DirectThatARunWouldRefuseIsCalledSo) {
  const auto reason = [](const PeerReach& peers) {
    return resolve_dispatcher({.asked = DispatcherKind::direct, .ep = 4, .top_k = 4, .peers = peers}).reason;
  };
  EXPECT_EQ(reason({}), "parallel.dispatcher asks for it");
  EXPECT_EQ(reason({.all = true, .why = "they are neighbours"}), "parallel.dispatcher asks for it");
  EXPECT_EQ(reason({.why = "they are on two machines"}),
            "parallel.dispatcher asks for it; a run would refuse it, because they are on two machines");
}

TEST(DispatcherChoice, AutoIsDirectWhereRanksReachEachOther) {
  for (const bool captures : {false, true}) {
    for (const int64_t ep : {2, 8}) {
      const DispatcherChoice choice = resolve_dispatcher(
          {.ep = ep, .top_k = 4, .captures = captures, .peers = {.all = true, .why = "they are neighbours"}});
      EXPECT_EQ(choice.kind, DispatcherKind::direct);
      EXPECT_EQ(choice.name, "direct");
      EXPECT_EQ(choice.reason,
                "chosen by \"auto\" because they are neighbours: a token is written once to each rank that has any of "
                "its experts, which sends the least");
    }
  }
  const DispatcherChoiceInputs apart{.ep = 8, .top_k = 4, .peers = {.why = "rank 4 is on another machine than rank 0"}};
  EXPECT_EQ(resolve_dispatcher(apart).kind, DispatcherKind::alltoall);
  EXPECT_EQ(resolve_dispatcher(apart).reason,
            "chosen by \"auto\" because parallel.ep = 8 is above top-k = 4, so that it sends less than all-gather; "
            "direct would send the least, but rank 4 is on another machine than rank 0");
  EXPECT_EQ(resolve_dispatcher({.asked = DispatcherKind::allgather, .ep = 8, .peers = {.all = true}}).name,
            "allgather");
  EXPECT_EQ(resolve_dispatcher({.peers = {.all = true}}).name, "local");
}

// A token chooses 8 of 128 experts, and a rank has 16: the choices without any of those are counted.
TEST(DispatcherChoice, RowsOfATokenAreThoseOfTheFormulas) {
  const RowsOfToken rows = even_rows_of_token(128, 8, 8, 1);
  EXPECT_DOUBLE_EQ(rows.allgather, 7);
  EXPECT_DOUBLE_EQ(rows.alltoall, 7);
  EXPECT_NEAR(rows.direct, 4.671937, 1e-6);
  EXPECT_DOUBLE_EQ(even_rows_of_token(4, 1, 2, 2).alltoall, 1.5);
  EXPECT_DOUBLE_EQ(even_rows_of_token(4, 1, 2, 2).direct, 1.5);
  EXPECT_DOUBLE_EQ(even_rows_of_token(4, 3, 2, 1).direct, 1);  // more experts than a rank has
  EXPECT_THAT(
      resolve_dispatcher({.ep = 8, .top_k = 8, .num_experts = 128, .peers = {.all = true, .why = "so"}}).reason,
      HasSubstr("sends the least (4.67 rows per token with balanced routing, 7 with all-gather, 7 with all-to-all)"));
}

// A token chooses 8 of 128 experts, and a node has 64: a share of C(64, 8) / C(128, 8) chooses none of them.
TEST(DispatcherChoice, TheChanceOfAPartIsThatOfTheFormula) {
  EXPECT_NEAR(1 - chance_of_part(128, 8, 2), 4426165368.0 / 1429702652400.0, 1e-9);
  EXPECT_DOUBLE_EQ(chance_of_part(4, 3, 2), 1);  // more experts than a part leaves
}

// Experts t K to t K + K - 1 of 64 are in one of 4 parts with K = 8, and in two of 4 parts of 8 with K = 3.
TEST(DispatcherChoice, NeighbouringExpertsAreInFewParts) {
  EXPECT_DOUBLE_EQ(chance_of_part(64, 8, 4, /*round_robin=*/true), 1 / 4.0);
  EXPECT_DOUBLE_EQ(chance_of_part(64, 8, 16, /*round_robin=*/true), 2 / 16.0);
  EXPECT_DOUBLE_EQ(chance_of_part(8, 3, 4, /*round_robin=*/true), 2 / 4.0);
  EXPECT_DOUBLE_EQ(chance_of_part(8, 8, 8, /*round_robin=*/true), 1);
}

TEST(DispatcherChoice, AllTokensAreSentWhereNearlyAllRanksNeedThem) {
  EXPECT_TRUE(sends_all_tokens(64, 8, 2, /*num_groups=*/1));    // a chance of 0.998
  EXPECT_FALSE(sends_all_tokens(128, 8, 4, /*num_groups=*/1));  // 0.907
  EXPECT_FALSE(sends_all_tokens(64, 8, 2, /*num_groups=*/8));
  EXPECT_FALSE(sends_all_tokens(64, 8, 2, /*num_groups=*/1, /*round_robin=*/true));  // 0.5
  EXPECT_TRUE(sends_all_tokens(8, 8, 4, /*num_groups=*/1));
  EXPECT_FALSE(sends_all_tokens(8, 2, 8, /*num_groups=*/1));  // a token has too few experts
  EXPECT_FALSE(sends_all_tokens(8, 8, 1, /*num_groups=*/1));
}

DispatcherChoiceInputs in_nodes() {
  return {.ep = 16,
          .top_k = 8,
          .num_experts = 128,
          .peers = {.why = "they are apart", .in_nodes = true},
          .estimates = ExchangeEstimates{.allgather = {.across_bytes = 4e6, .inside_bytes = 30e6, .seconds = 3e-3},
                                         .alltoall = {.across_bytes = 9e6, .inside_bytes = 8e6, .seconds = 5e-3},
                                         .two_level = {.across_bytes = 4e6, .inside_bytes = 20e6, .seconds = 2e-3},
                                         .rates = "40 GB/s across nodes"}};
}

TEST(DispatcherChoice, AutoIsTheFastestWhereRanksReachTheirNodes) {
  const DispatcherChoice choice = resolve_dispatcher(in_nodes());
  EXPECT_EQ(choice.kind, DispatcherKind::two_level);
  EXPECT_EQ(choice.name, "two_level");
  EXPECT_EQ(choice.estimates.value().two_level.seconds, 2e-3);
  EXPECT_EQ(
      choice.reason,
      "chosen by \"auto\" because the ranks that share experts are on 2 nodes of 8 (parallel.ranks_per_node), "
      "where it is predicted to be the fastest: two-level 2 ms (4 MB across nodes and 20 MB inside) to exchange the "
      "rows of a layer and micro-batch, against all-gather 3 ms (4 MB across nodes and 30 MB inside), all-to-all 5 ms "
      "(9 MB across nodes and 8 MB inside); rates: 40 GB/s across nodes");
  const auto with = [](auto&& change) {
    DispatcherChoiceInputs changed = in_nodes();
    change(changed);
    return resolve_dispatcher(changed).kind;
  };
  using enum DispatcherKind;
  EXPECT_EQ(with([](auto& c) { c.captures = true; }), two_level);
  EXPECT_EQ(with([](auto& c) { c.estimates->allgather.seconds = 1e-3; }), allgather);
  EXPECT_EQ(with([](auto& c) { c.estimates->alltoall.seconds = 1e-3; }), alltoall);
  EXPECT_EQ(with([](auto& c) { c.peers.in_nodes = false; }), alltoall);
  EXPECT_EQ(with([](auto& c) { c.estimates = {}; }), alltoall);
  EXPECT_EQ(with([](auto& c) { c.peers.all = true; }), direct);
}

// A prediction that differs by less than a tenth does not replace the choice by bytes.
TEST(DispatcherChoice, AutoKeepsTheChoiceByBytesUnlessAnotherIsClearlyFaster) {
  const auto choice_at = [](double gain, bool captures) {
    DispatcherChoiceInputs q = in_nodes();
    q.captures = captures;
    (captures ? q.estimates->allgather : q.estimates->alltoall).seconds = gain * 2e-3;
    return resolve_dispatcher(q);
  };
  EXPECT_EQ(choice_at(1.05, /*captures=*/false).kind, DispatcherKind::alltoall);
  EXPECT_EQ(choice_at(1.11, /*captures=*/false).kind, DispatcherKind::two_level);
  EXPECT_EQ(choice_at(1.11, /*captures=*/true).kind, DispatcherKind::two_level);
  const DispatcherChoice kept = choice_at(1.05, /*captures=*/true);
  EXPECT_EQ(kept.kind, DispatcherKind::allgather);
  EXPECT_THAT(
      kept.reason,
      HasSubstr(
          "where it stays, since two-level is predicted to be only 1.05 times as fast: all-gather 2.1 ms (4 MB "
          "across nodes and 30 MB inside) to exchange the rows of a layer and micro-batch, against two-level 2 ms "
          "(4 MB across nodes and 20 MB inside); rates: 40 GB/s across nodes; direct would send the least, but "
          "they are apart"));
}

// A captured step cannot have all-to-all, however fast it is.
TEST(DispatcherChoice, AutoDoesNotCompareAllToAllUnderGraphs) {
  DispatcherChoiceInputs q = in_nodes();
  q.captures = true, q.estimates->alltoall.seconds = 1e-6;
  EXPECT_EQ(resolve_dispatcher(q).kind, DispatcherKind::two_level);
}

TEST(DispatcherChoice, TwoLevelByNameIsRefusedWhereItCannotBe) {
  using enum DispatcherKind;
  EXPECT_EQ(resolve_dispatcher({.asked = two_level, .ep = 4, .ranks_per_node = 2}).name, "two_level");
  EXPECT_EQ(resolve_dispatcher({.asked = two_level, .ep = 64, .etp = 2, .ranks_per_node = 8}).name, "two_level");
  EXPECT_EQ(resolve_dispatcher({.asked = two_level, .ep = 4, .captures = true, .ranks_per_node = 2}).name, "two_level");
  for (const auto& [ep, etp, node] : {std::tuple{4, 1, 8}, {4, 1, 4}, {6, 1, 4}, {4, 2, 1}}) {
    EXPECT_EQ(
        error_text(ErrorKind::usage,
                   [&] { resolve_dispatcher({.asked = two_level, .ep = ep, .etp = etp, .ranks_per_node = node}); }),
        fmt::format("parallel.dispatcher = \"two_level\": the ep * etp = {} * {} ranks that share experts must be "
                    "on two or more whole nodes of parallel.ranks_per_node = {} ranks, and each ep rank on one node; "
                    "set ranks_per_node to a divisor of {} that etp divides, or set dispatcher = \"direct\" where "
                    "all of them are on one machine",
                    ep, etp, node, ep * etp));
  }
}

TEST(DispatcherChoice, ANamedDispatcherIsUsedOrRefused) {
  EXPECT_EQ(resolve_dispatcher({.asked = DispatcherKind::allgather, .ep = 8, .top_k = 4}).name, "allgather");
  const DispatcherChoice choice = resolve_dispatcher({.asked = DispatcherKind::alltoall, .ep = 2, .top_k = 4});
  EXPECT_EQ(choice.kind, DispatcherKind::alltoall);
  EXPECT_EQ(choice.reason, "parallel.dispatcher asks for it");
  const DispatcherChoice direct =
      resolve_dispatcher({.asked = DispatcherKind::direct, .ep = 8, .top_k = 4, .captures = true});
  EXPECT_EQ(direct.kind, DispatcherKind::direct);
  EXPECT_EQ(direct.name, "direct");
  const DispatcherChoiceInputs captured{
      .asked = DispatcherKind::alltoall, .ep = 2, .captures = true, .origin = " [r:1]"};
  EXPECT_EQ(error_text(ErrorKind::usage, [&] { resolve_dispatcher(captured); }),
            "parallel.dispatcher = \"alltoall\" reads its counts on the host, so its steps cannot be captured in CUDA "
            "graphs; set run.graph = false, or dispatcher = \"allgather\" [r:1]");
}

TEST(DispatcherChoice, ItsNamesAreRead) {
  for (const DispatcherKind kind : kDispatcherKinds) EXPECT_EQ(dispatcher_kind(name_of(kind), ""), kind);
  EXPECT_EQ(error_text(ErrorKind::usage, [] { dispatcher_kind("pigeon", "--dispatcher"); }),
            "--dispatcher: expected auto, allgather, alltoall, direct or two_level; got pigeon");
}

TEST(DispatcherChoice, IsResolvedFromTheRecipe) {
  const Sets above_top_k = {"parallel.ep=4", "run.device=cuda"};
  EXPECT_EQ(resolve_dispatcher(parse()).name, "local");
  EXPECT_EQ(resolve_dispatcher(parse({"parallel.ep=4"})).name, "alltoall");
  EXPECT_EQ(resolve_dispatcher(parse({"parallel.ep=2"})).name, "allgather");
  EXPECT_EQ(resolve_dispatcher(parse({"parallel.ep=2"}), {.all = true}).name, "direct");
  EXPECT_EQ(resolve_dispatcher(parse(above_top_k)).name, "allgather");
  EXPECT_THAT(resolve_dispatcher(parse(above_top_k)).reason, HasSubstr("run.graph is on"));
  EXPECT_EQ(resolve_dispatcher(parse({"parallel.ep=4", "run.device=cuda", "run.graph=false"})).name, "alltoall");
}

}  // namespace
}  // namespace moebius
