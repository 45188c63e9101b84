#include "model/moe/wire_rows.h"

#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;

constexpr PrecisionSpec kPacked{.recipe = PrecisionRecipe::fp8_block, .dispatch = PrecisionChoice::recipe};

class WireRowsTest : public ::testing::TestWithParam<DType> {
 protected:
  // Runs body with a stack of the size that a dry run reports.
  template <class Body>
  void run(const Body& body) {
    StepStack counted(DeviceKind::null, nullptr, 0);
    Stream null(DeviceKind::null, pool_);
    MicroBatch batch;
    Step dry{null, counted, batch};
    body(dry);
    std::vector<std::byte> memory(counted.high_water() + 256);
    StepStack stack(DeviceKind::cpu, memory.data(), counted.high_water());
    Step step{s_, stack, batch};
    body(step);
  }
  ThreadPool pool_{2};
  Stream s_{DeviceKind::cpu, pool_};
};

// A token arrives as quantize() rounds it, and quantising that again changes nothing.
TEST_P(WireRowsTest, ArriveAsTheyWereQuantised) {
  for (const int64_t D : {12, 128, 300}) {
    const WireRows wire(kPacked, GetParam(), D);
    ASSERT_TRUE(wire.is_packed());
    Array x = Array::normal({5, D}, GetParam(), 3);
    const QuantisedArray rounded({5, D}, DType::f8_e4m3, ScaleLayout::row_blocks),
        again({5, D}, DType::f8_e4m3, ScaleLayout::row_blocks);
    quantize(s_, {.q = rounded.operand(), .x_RC = x.tensor()});
    run([&](Step& step) {
      const Tensor rows = wire.pack(step, x.tensor()), arrived = wire.unpack(step, rows);
      EXPECT_LT(rows.num_bytes(), 5 * D * size_of(DType::bf16)) << D;
      EXPECT_EQ(arrived.dtype, GetParam());
      if (step.stream.device() == DeviceKind::null) return;
      Values got(arrived.numel());
      for (int64_t i = 0; i < arrived.numel(); ++i)
        got[i] = GetParam() == DType::f32 ? arrived.ptr<float>()[i] : to_f32(arrived.ptr<bf16>()[i]);
      EXPECT_EQ(got, rounded.values(s_)) << D;
      quantize(s_, {.q = again.operand(), .x_RC = arrived});
      EXPECT_EQ(again.values(s_), rounded.values(s_)) << D;
    });
  }
}

TEST_P(WireRowsTest, AreSentUnchangedWithoutTheRecipe) {
  Array x = Array::normal({3, 20}, GetParam(), 3);
  for (const PrecisionSpec& spec : {PrecisionSpec{}, PrecisionSpec{.dispatch = PrecisionChoice::recipe},
                                    PrecisionSpec{.recipe = PrecisionRecipe::fp8_block}}) {
    const WireRows wire(spec, GetParam(), 20);
    EXPECT_FALSE(wire.is_packed());
    run([&](Step& step) { EXPECT_EQ(wire.unpack(step, wire.pack(step, x.tensor())).data, x.tensor().data); });
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, WireRowsTest, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(WireRows, RefusesRowsThatWouldBecomeWider) {
  try {
    WireRows(kPacked, DType::bf16, 6);
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "precision.dispatch = \"recipe\" would send rows of 16 bytes instead of 12; set it to \"compute\", or raise "
        "model.hidden_size");
  }
}

}  // namespace
}  // namespace moebius
