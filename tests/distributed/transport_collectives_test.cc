#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "comm/mesh.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

using Collectives = Ranks;
MOEBIUS_ON_RANKS(Collectives);

// Returns the value of rank r at i. Magnitudes differ so much that the order of their sum shows.
double value(int r, int64_t i) {
  std::mt19937_64 random(1000003ULL * static_cast<uint64_t>(r) + static_cast<uint64_t>(i));
  const int exponent = static_cast<int>(random() % 40) - 20;
  return std::ldexp(static_cast<double>(random() % 4001) - 2000, exponent);
}

template <class T>
T element(int r, int64_t i) {
  if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(static_cast<float>(value(r, i)));
  } else {
    return static_cast<T>(value(r, i));
  }
}

template <class T>
std::vector<T> values(int r, int64_t n) {
  std::vector<T> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) x[i] = element<T>(r, i);
  return x;
}

// The definition of the sum: added in the order of the ranks, bf16 in f32 and rounded once.
template <class T>
T sum_at(int64_t i, int size, bool backwards = false) {
  const auto at = [&](int r) { return element<T>(backwards ? size - 1 - r : r, i); };
  if constexpr (std::is_same_v<T, bf16>) {
    float sum = to_f32(at(0));
    for (int r = 1; r < size; ++r) sum += to_f32(at(r));
    return to_bf16(sum);
  } else {
    T sum = at(0);
    for (int r = 1; r < size; ++r) sum += at(r);
    return sum;
  }
}

template <class T>
std::vector<T> sums(int64_t n, int size, bool backwards = false) {
  std::vector<T> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) x[i] = sum_at<T>(i, size, backwards);
  return x;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// --- sums -----------------------------------------------------------------------------------------------------------

template <class T>
void check_all_reduce(Rank& r) {
  for (const int64_t n : {0, 1, 7, 61, 4099}) {
    std::vector<T> x = values<T>(r.rank, n);
    r.world->all_reduce_sum(r.s, as_tensor(x));
    EXPECT_TRUE(same_bits(x, sums<T>(n, r.size))) << name_of(dtype_of<T>) << " x " << n << ", rank " << r.rank;
  }
}

TEST_P(Collectives, AllReduceAddsInTheOrderOfTheRanks) {
  run([](Transport& transport) {
    Rank r(transport);
    check_all_reduce<float>(r);
    check_all_reduce<double>(r);
    check_all_reduce<int64_t>(r);
    check_all_reduce<bf16>(r);
  });
  // From three ranks on, another order would show.
  EXPECT_EQ(GetParam() < 3, same_bits(sums<float>(61, GetParam()), sums<float>(61, GetParam(), true)));
}

using LargeCollectives = Ranks;
INSTANTIATE_TEST_SUITE_P(Everywhere, LargeCollectives, testing::Values(2, 3), name_of_ranks);

TEST_P(LargeCollectives, SumsOfManyPieces) {
  const int64_t n = 2 * GetParam() * Group::kSumPiece + 5;
  run([n](Transport& transport) {
    Rank r(transport);
    std::vector<int64_t> x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) x[i] = i * (r.rank + 1);
    r.world->all_reduce_sum(r.s, as_tensor(x));
    const int64_t factor = r.size * (r.size + 1) / 2;
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(x[i], i * factor);
    const int64_t rows = n / r.size;
    std::vector<int64_t> part(static_cast<size_t>(rows));
    x.resize(static_cast<size_t>(rows * r.size));
    r.world->reduce_scatter_sum(r.s, as_tensor(part), as_tensor(x));
    for (int64_t i = 0; i < rows; ++i) ASSERT_EQ(part[i], (r.rank * rows + i) * factor * r.size);
  });
}

TEST_P(Collectives, ReduceScatterIsThisRanksRowsOfTheSum) {
  run([](Transport& transport) {
    Rank r(transport);
    for (const int64_t rows : {0, 1, 5}) {
      const int64_t n = rows * 3;
      std::vector<bf16> in = values<bf16>(r.rank, n * r.size), out(static_cast<size_t>(n));
      r.world->reduce_scatter_sum(r.s, tensor_of(out.data(), {rows, 3}), tensor_of(in.data(), {rows * r.size, 3}));
      const std::vector<bf16> all = sums<bf16>(n * r.size, r.size);
      const std::vector<bf16> mine(all.begin() + n * r.rank, all.begin() + n * (r.rank + 1));
      EXPECT_TRUE(same_bits(out, mine));
      const Tensor in_RD = tensor_of(in.data(), {rows * r.size, 3});  // and in place
      r.world->reduce_scatter_sum(r.s, in_RD.rows(rows * r.rank, rows * (r.rank + 1)), in_RD);
      EXPECT_TRUE(same_bits({in.begin() + n * r.rank, in.begin() + n * (r.rank + 1)}, mine));
    }
  });
}

// --- moves ----------------------------------------------------------------------------------------------------------

TEST_P(Collectives, AllGatherInPlaceAndNot) {
  run([](Transport& transport) {
    Rank r(transport);
    for (const int64_t n : {0, 1, 5}) {
      std::vector<float> in = values<float>(r.rank, n), out(static_cast<size_t>(n * r.size)), want;
      for (int q = 0; q < r.size; ++q)
        for (const float x : values<float>(q, n)) want.push_back(x);
      r.world->all_gather(r.s, as_tensor(out), as_tensor(in));
      EXPECT_TRUE(same_bits(out, want));
      std::vector<float> place(static_cast<size_t>(n * r.size), -1);
      std::copy(in.begin(), in.end(), place.begin() + n * r.rank);
      r.world->all_gather(r.s, as_tensor(place), as_tensor(place).rows(n * r.rank, n * (r.rank + 1)));
      EXPECT_TRUE(same_bits(place, want));
    }
  });
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  run([](Transport& transport) {
    Rank r(transport);
    for (int root = 0; root < r.size; ++root) {
      std::vector<double> x = values<double>(r.rank, 7);
      r.world->broadcast(r.s, as_tensor(x), root);
      EXPECT_TRUE(same_bits(x, values<double>(root, 7)));
    }
  });
}

// Rank p sends q (p + 2 q) % 4 rows. The counts are unequal, and some are zero. With one rank
// nothing is sent.
int64_t rows_between(int p, int q, int size) {
  if (size > 1 && (p == size - 1 || q == size - 1)) return 0;
  return (p + 2 * q + 1) % 4;
}

TEST_P(Collectives, AllToAllMovesUnequalRows) {
  run([](Transport& transport) {
    Rank r(transport);
    std::vector<int64_t> send_rows, recv_rows;
    std::vector<int32_t> in, want;
    for (int q = 0; q < r.size; ++q) {
      send_rows.push_back(rows_between(r.rank, q, r.size));
      recv_rows.push_back(rows_between(q, r.rank, r.size));
      for (int64_t i = 0; i < 3 * send_rows.back(); ++i) in.push_back(10000 * r.rank + 100 * q + static_cast<int>(i));
      for (int64_t i = 0; i < 3 * recv_rows.back(); ++i) want.push_back(10000 * q + 100 * r.rank + static_cast<int>(i));
    }
    for (int i = 0; i < 6; ++i) {  // two rows of the planned bound stay unused
      in.push_back(-1);
      want.push_back(-7);
    }
    std::vector<int32_t> out(want.size(), -7);
    const int64_t before = r.world->sent_bytes();
    r.world->all_to_all_v(
        r.s, {.out = as_tensor(out, 3), .in = as_tensor(in, 3), .recv_rows = recv_rows, .send_rows = send_rows});
    EXPECT_EQ(out, want);
    const int64_t others = (std::ssize(in) - 6) / 3 - send_rows[r.rank];
    EXPECT_EQ(r.world->sent_bytes() - before, others * 3 * 4);
  });
}

TEST_P(Collectives, SendsArriveInTheirOrderAroundACollective) {
  run([](Transport& transport) {
    Rank r(transport);
    if (r.size == 1) return;
    const int next = (r.rank + 1) % r.size, previous = (r.rank + r.size - 1) % r.size;
    std::vector<float> first = values<float>(r.rank, 5), second = values<float>(r.rank + 100, 5000), a(5), b(5000);
    Pending send_first = r.world->send(r.s, as_tensor(first), next);
    Pending send_second = r.world->send(r.s, as_tensor(second), next);
    std::vector<float> x = values<float>(r.rank, 9);
    r.world->all_reduce_sum(r.s, as_tensor(x));  // queued after the sends and before the receives
    Pending recv_first = r.world->recv(r.s, as_tensor(a), previous);
    Pending recv_second = r.world->recv(r.s, as_tensor(b), previous);
    recv_second.wait();
    recv_first.wait();
    send_first.wait();
    send_second.wait();
    EXPECT_TRUE(same_bits(a, values<float>(previous, 5)));
    EXPECT_TRUE(same_bits(b, values<float>(previous + 100, 5000)));
    EXPECT_TRUE(same_bits(x, sums<float>(9, r.size)));
  });
}

// Every rank sees everything that was sent before a barrier.
TEST_P(Collectives, BarrierWaitsForAll) {
  run([](Transport& transport) {
    Rank r(transport);
    for (int i = 0; i < 20; ++i) r.world->barrier();
    EXPECT_EQ(r.world->sent_bytes(), 0);
  });
}

// --- figures --------------------------------------------------------------------------------------------------------

TEST_P(Collectives, SendTheBytesOfTheFormulas) {
  run([](Transport& transport) {
    Rank r(transport);
    const int64_t n = r.size, rows = 6, numel = rows * n, b = numel * 4;
    std::vector<float> large(static_cast<size_t>(numel)), small(static_cast<size_t>(rows));
    int64_t before = 0;
    const auto sent = [&] {
      const int64_t bytes = r.world->sent_bytes() - before;
      before = r.world->sent_bytes();
      return bytes;
    };
    r.world->all_reduce_sum(r.s, as_tensor(large));
    EXPECT_EQ(sent(), 2 * b * (n - 1) / n);
    r.world->reduce_scatter_sum(r.s, as_tensor(small), as_tensor(large));
    EXPECT_EQ(sent(), b * (n - 1) / n);
    r.world->all_gather(r.s, as_tensor(large), as_tensor(small));
    EXPECT_EQ(sent(), b * (n - 1) / n);
    r.world->broadcast(r.s, as_tensor(large), 0);
    EXPECT_EQ(sent(), r.rank == 0 ? b * (n - 1) : 0);
  });
}

// --- meshes ---------------------------------------------------------------------------------------------------------

std::vector<MeshShape> shapes_of(int size) {
  switch (size) {
    case 2:
      return {{.dp = 2, .ep = 2}, {.tp = 2, .edp = 2}, {.pp = 2}};
    case 3:
      return {{.cp = 3, .etp = 3}};
    case 4:
      return {{.tp = 2, .dp = 2, .ep = 4}, {.cp = 2, .pp = 2, .ep = 2}};
    case 8:
      return {{.tp = 2, .cp = 2, .pp = 2, .ep = 4}, {.tp = 2, .dp = 4, .etp = 2, .ep = 2, .edp = 2}};
    default:
      return {{}};
  }
}

TEST_P(Collectives, GroupsOfAMeshAreTheRanksOfTheLayout) {
  run([](Transport& transport) {
    Rank r(transport);
    for (const MeshShape& shape : shapes_of(r.size)) {
      const Mesh mesh(shape, transport);
      for (int i = 0; i < kNumAxes; ++i) {
        const Axis axis = static_cast<Axis>(i);
        const std::vector<int> want = ranks_of_group(shape, axis, r.rank);
        std::vector<int64_t> mine = {r.rank}, all(want.size());
        mesh.group(axis).all_gather(r.s, as_tensor(all), as_tensor(mine));
        EXPECT_EQ(std::vector<int64_t>(want.begin(), want.end()), all) << name_of(axis);
        EXPECT_EQ(want[mesh.group(axis).rank()], r.rank);
      }
    }
  });
}

}  // namespace
}  // namespace moebius
