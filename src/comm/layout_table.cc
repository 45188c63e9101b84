#include "comm/layout.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace moebius {
namespace {

constexpr int64_t kMaxMembers = 8;  // ranks of a group that are listed

std::string rank_lines(const MeshShape& shape, int64_t max_ranks) {
  std::string text = "  rank    tp  cp  dp  pp   etp  ep edp\n";
  const int64_t world = shape.world(), shown = world <= max_ranks ? world : max_ranks / 2;
  const auto add = [&](int64_t rank) {
    const RankPlace p = place_of(shape, static_cast<int>(rank));
    text += fmt::format("{:6}  {:4}{:4}{:4}{:4}  {:4}{:4}{:4}\n", rank, p.tp, p.cp, p.dp, p.pp, p.etp, p.ep, p.edp);
  };
  for (int64_t rank = 0; rank < shown; ++rank) add(rank);
  if (shown < world) {
    text += "   ...\n";
    add(world - 1);
  }
  return text;
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size() && i < kMaxMembers; ++i) text += fmt::format("{}{}", i == 0 ? "" : " ", ranks[i]);
  return text + (ranks.size() > kMaxMembers ? fmt::format(" ... {}", ranks.back()) : "");
}

}  // namespace

std::string layout_table(const MeshShape& shape, int64_t max_ranks) {
  std::string text =
      fmt::format("{} ranks: dense tp {} x cp {} x dp {} x pp {}, experts etp {} x ep {} x edp {} x pp {}\n",
                  shape.world(), shape.tp, shape.cp, shape.dp, shape.pp, shape.etp, shape.ep, shape.edp, shape.pp);
  text += rank_lines(shape, max_ranks);
  std::array<std::string, kNumAxes> firsts;
  size_t width = 24;
  for (int i = 0; i < kNumAxes; ++i) {
    firsts[i] = list(ranks_of_group(shape, static_cast<Axis>(i), 0));
    width = std::max(width, firsts[i].size());
  }
  text += fmt::format("{:10} {:>6} {:>6}  {:{}}  {}\n", "group", "size", "groups", "first group", width, "purpose");
  for (int i = 0; i < kNumAxes; ++i) {
    const Axis axis = static_cast<Axis>(i);
    const int64_t size = group_size(shape, axis);
    text += fmt::format("{:10} {:6} {:6}  {:{}}  {}\n", name_of(axis), size, shape.world() / size, firsts[i], width,
                        purpose_of(axis));
  }
  return text;
}

}  // namespace moebius
