#include "ops/elementwise/elementwise.h"

#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

TEST(CopyColumns, MovesThemAndTouchesNothingElse) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::i32}) {
      for (const int64_t rows : {0, 1, 131}) {
        Array from = Array::normal({rows, 7}, dtype, 1, 100), to = Array::normal({rows, 5}, dtype, 2, 100);
        Values want = to.values();
        for (int64_t t = 0; t < rows; ++t) {
          for (int64_t j = 0; j < 3; ++j) want[t * 5 + 1 + j] = from.values()[t * 7 + 4 + j];
        }
        copy_columns(s, {.to_TA = to.tensor(), .from_TB = from.tensor(), .to_first = 1, .from_first = 4, .count = 3});
        EXPECT_EQ(to.values(), want);
      }
    }
  });
}

TEST(CopyColumns, RefusesColumnsOutOfRange) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array from({2, 7}, DType::f32), to({2, 5}, DType::f32);
  EXPECT_EQ(testing::error_of([&] {
              copy_columns(s, {.to_TA = to.tensor(), .from_TB = from.tensor(), .from_first = 5, .count = 3});
            }),
            "copy_columns: from must be a matrix with columns [5, 8); got f32[2, 7]");
}

}  // namespace
}  // namespace moebius
