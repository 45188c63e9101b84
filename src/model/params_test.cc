#include "model/params.h"

#include <bit>

#include "io/testing.h"

namespace moebius {
namespace {

constexpr int64_t kPiece = 7;

// A bf16 parameter of two parts, one of them split in its second dimension, of which a rank owns a range in the middle.
struct Rig {
  explicit Rig(MasterFormat master) {
    params.set_formats({.master = master});
    params.declare(
        {.name = "w",
         .shape = {9, 11},
         .dtype = DType::bf16,
         .parts = {{.name = "a", .shape = {4, 11}, .offset = 0},
                   {.name = "b", .shape = {5, 40}, .offset = 44, .shard = {.dim = 1, .begin = 10, .count = 11}}},
         .init_std = 1.0f});
    params.own(0, {.begin = 5, .count = 80});
    plan.bind(DeviceKind::cpu, 1 << 16);
  }
  const Param& w() const { return params.all()[0]; }
  std::vector<uint16_t> weights() const {
    std::vector<uint16_t> bits;
    for (int64_t i = 0; i < w().w.numel(); ++i) bits.push_back(w().w.ptr<bf16>()[i].bits);
    return bits;
  }
  // Returns the bits of the owned masters.
  std::vector<uint32_t> masters(int64_t piece = kMastersPiece) {
    std::vector<float> values(static_cast<size_t>(w().owned.count));
    if (w().has_remainder)
      read_masters(s, w(), 0, values, piece);
    else
      values.assign(w().master_n.ptr<float>(), w().master_n.ptr<float>() + w().owned.count);
    std::vector<uint32_t> bits;
    for (const float x : values) bits.push_back(std::bit_cast<uint32_t>(x));
    return bits;
  }

  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  MemoryPlan plan;
  ParamTable params{plan, ModelUse::training};
};

// The lengths of parts and of the owned range are no multiples of the piece.
TEST(Masters, AreDrawnInPiecesWithTheBitsOfOneDraw) {
  Rig f32(MasterFormat::f32), whole(MasterFormat::bf16_remainder), pieces(MasterFormat::bf16_remainder);
  f32.params.init(f32.s, 3);
  whole.params.init(whole.s, 3);
  pieces.params.init(pieces.s, 3, kPiece);
  EXPECT_EQ(pieces.weights(), whole.weights());
  EXPECT_EQ(pieces.masters(), f32.masters());
  EXPECT_EQ(whole.masters(), f32.masters());
}

TEST(Masters, AreReadAndReplacedInPieces) {
  Rig rig(MasterFormat::bf16_remainder);
  rig.params.init(rig.s, 3);
  std::vector<uint32_t> expected = rig.masters();
  EXPECT_EQ(rig.masters(kPiece), expected);
  constexpr size_t kFirst = 4, kNum = 3 * kPiece + 2;
  std::vector<float> values(kNum);
  for (size_t i = 0; i < kNum; ++i) {
    values[i] = 1.0f + static_cast<float>(i) / 97;
    expected[kFirst + i] = std::bit_cast<uint32_t>(values[i]);
  }
  write_masters(rig.s, rig.w(), kFirst, values, kPiece);
  EXPECT_EQ(rig.masters(), expected);
  std::vector<float> read(kNum);
  read_masters(rig.s, rig.w(), kFirst, read, kPiece);
  EXPECT_EQ(read, values);
}

}  // namespace
}  // namespace moebius
