#include "comm/transport/transport.h"

#include "comm/message_group.h"

namespace moebius {

std::unique_ptr<Group> Transport::make_group(std::string name, std::vector<int> world_ranks, int node) {
  const int channel = num_channels_;
  num_channels_ += kChannelsOfGroup;
  return std::make_unique<MessageGroup>(
      *this,
      MessageGroupSpec{.name = std::move(name), .ranks = std::move(world_ranks), .channel = channel, .node = node});
}

const WorldOptions& Transport::options() const {
  static const WorldOptions defaults;
  return defaults;
}

std::string name_of_rank(const WorldOptions& options, int world_rank) {
  return options.coordinates ? fmt::format("rank {} ({})", world_rank, options.coordinates(world_rank))
                             : fmt::format("rank {}", world_rank);
}

std::string names_of_ranks(const WorldOptions& options, std::span<const int> world_ranks) {
  std::string names;
  for (const int r : world_ranks) names += (names.empty() ? "" : ", ") + name_of_rank(options, r);
  return names;
}

}  // namespace moebius
