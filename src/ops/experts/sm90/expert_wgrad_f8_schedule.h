// The tiles that each cluster computes in the weight gradient of FP8 operands (expert_wgrad_f8.cu).
//
// Experts are computed in order, so that all clusters read the operands of few experts at a time. The tiles of an
// expert have one number of K steps, and go to clusters in rounds. Those that do not fill a round go to the clusters
// that have had the fewest steps so far: else clusters would have different numbers of steps where rows of experts
// differ. Neither was measured alone.
//
// One warp of each block finds the places of its cluster, expert by expert, while the others compute. So the order
// follows from the offsets alone, and no bit depends on it: a cluster computes its tiles whole.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moebius::cuda::sm90 {

// The K blocks of an expert: [first, first + num). last_steps: K steps of 32 in the last of them that have rows.
struct ExpertBlocks {
  int32_t first, num, last_steps;
};

// Places in shared memory, of the tiles of each expert that do not fill a round: the number of this cluster's, or -1.
// A place is a byte, so a grid has at most 128 clusters. One thread writes them; after each it publishes the number of
// experts that have a place.
class PlaceMemory {
 public:
  static constexpr int32_t kBytes = 864, kMaxExperts = kBytes - 4;

  __device__ explicit PlaceMemory(uint32_t shared) : shared_(shared) {}
  // By one thread, before a barrier of the block.
  __device__ void init() const { asm volatile("st.shared.s32 [%0], 0;" ::"r"(shared_) : "memory"); }
  __device__ void write(int32_t expert, int32_t place) const {
    asm volatile("st.shared.s8 [%0], %1;" ::"r"(at(expert)), "r"(place) : "memory");
    asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_), "r"(expert + 1) : "memory");
  }
  // Waits for the place of the expert.
  __device__ int32_t read(int32_t expert) const {
    int32_t num;
    do {
      asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(num) : "r"(shared_) : "memory");
    } while (num <= expert);
    int32_t place;
    asm volatile("ld.shared.s8 %0, [%1];" : "=r"(place) : "r"(at(expert)) : "memory");
    return place;
  }

 private:
  __device__ uint32_t at(int32_t expert) const { return shared_ + 4 + static_cast<uint32_t>(expert); }
  uint32_t shared_;
};

// The clusters of a grid, and the tiles of an expert in whole rounds of them and left over.
struct TileRounds {
  static constexpr int32_t kOfLane = 4, kMaxClusters = 32 * kOfLane;
  int32_t clusters, own, whole, left;

  __device__ explicit TileRounds(int32_t tiles_of_expert)
      : clusters(static_cast<int32_t>(gridDim.x / 2)),
        own(static_cast<int32_t>(blockIdx.x / 2)),
        whole(tiles_of_expert / clusters),
        left(tiles_of_expert % clusters) {}
  // Returns whether a warp finds the places; otherwise they are in turns.
  __device__ bool are_balanced(int32_t num_experts) const {
    return left > 0 && num_experts > 1 && num_experts <= PlaceMemory::kMaxExperts && clusters <= kMaxClusters;
  }
  // The place of this cluster in turns: expert e goes on where e - 1 has ended.
  __device__ int32_t in_turn(int32_t expert) const {
    const auto begin = static_cast<int32_t>(int64_t{expert} * left % clusters);
    const int32_t place = own - begin + (own < begin ? clusters : 0);
    return place < left ? place : -1;
  }
};

// By a whole warp: the places of this cluster. steps_of(e): the K steps of a tile of expert e, and what its results
// take, in K steps; 0: it has no tiles to compute.
template <class StepsOf>
__device__ void find_places(const TileRounds& rounds, int32_t num_experts, const PlaceMemory& memory,
                            StepsOf steps_of) {
  constexpr uint32_t kAll = ~0u;
  constexpr int32_t kNever = INT32_MAX / 2;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const uint32_t before = (1u << lane) - 1;
  // Steps of clusters lane + 32 i above those of the cluster that has the fewest.
  int32_t steps[TileRounds::kOfLane];
#pragma unroll
  for (int32_t i = 0; i < TileRounds::kOfLane; ++i) steps[i] = lane + 32 * i < rounds.clusters ? 0 : kNever;
  int32_t most = 0;
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    const int32_t added = steps_of(expert);
    int32_t place = -1;
    if (added > 0) {
      // The smallest limit that as many clusters keep as there are tiles left.
      int32_t limit = 0;
      for (int32_t high = most; limit < high;) {
        const int32_t middle = (limit + high) / 2;
        int32_t count = 0;
#pragma unroll
        for (const int32_t s : steps) count += __popc(__ballot_sync(kAll, s <= middle));
        if (count >= rounds.left)
          high = middle;
        else
          limit = middle + 1;
      }
      // All below it, and the first ones at it.
      int32_t at_limit = rounds.left, taken = 0, least = kNever;
#pragma unroll
      for (const int32_t s : steps) at_limit -= __popc(__ballot_sync(kAll, s < limit));
#pragma unroll
      for (int32_t i = 0; i < TileRounds::kOfLane; ++i) {
        const uint32_t equal = __ballot_sync(kAll, steps[i] == limit);
        const bool takes = steps[i] < limit || (steps[i] == limit && __popc(equal & before) < at_limit);
        const uint32_t takers = __ballot_sync(kAll, takes);
        if (takes && lane + 32 * i == rounds.own) place = taken + __popc(takers & before);
        at_limit -= __popc(equal);
        taken += __popc(takers);
        if (takes) steps[i] += added;
        least = min(least, steps[i]);
      }
      least = __reduce_min_sync(kAll, least);
      most = 0;
#pragma unroll
      for (int32_t& s : steps) {
        if (s < kNever) most = max(most, s -= least);
      }
      most = __reduce_max_sync(kAll, most);
    }
    if (lane == rounds.own % 32) memory.write(expert, place);
    __syncwarp();
  }
}

}  // namespace moebius::cuda::sm90
