#include "config/check/tensor_scales_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(TensorScalesCheck, NamesLayoutsThatCannotShareThem) {
  for (const char* recipe : {"precision.recipe=fp8_tensor", "precision.recipe=nvfp4"}) {
    for (const char* degree : {"parallel.tp=2", "parallel.cp=2", "parallel.ep=2", "parallel.etp=2"})
      EXPECT_NO_THROW(parse({recipe, "train.seq_len=8", degree}).check(2)) << recipe << degree;
  }
  EXPECT_THAT(check_error({"precision.recipe=nvfp4", "train.seq_len=12", "parallel.cp=3", "parallel.ep=2"}, 6),
              HasSubstr("precision.recipe = \"nvfp4\" has scales that the ranks of a micro-batch share"));
  EXPECT_THAT(check_error({"precision.recipe=nvfp4", "train.seq_len=8", "parallel.cp=2", "parallel.dynamic_cp=true",
                           "data.separate_documents=true", "data.pack_documents=true"},
                          2),
              HasSubstr("parallel.dynamic_cp = true spreads tokens over ranks by their documents, so "
                        "precision.recipe = \"nvfp4\" cannot draw as one rank does"));
  EXPECT_THAT(check_error({"precision.recipe=fp8_tensor", "train.seq_len=12", "parallel.cp=3", "parallel.ep=2"}, 6),
              HasSubstr("precision.recipe = \"fp8_tensor\" has scales that the ranks of a micro-batch share, and those "
                        "that share experts: one of tp * cp and ep * etp must divide the other; got 1 * 3 and 2 * 1; "
                        "choose \"fp8_block\" or \"mxfp8\", or other degrees [--set]"));
  EXPECT_THAT(check_error({"precision.recipe=fp8_tensor", "parallel.etp=2", "parallel.expert_overlap=layer"}, 2),
              HasSubstr("parallel.expert_overlap exchanges rows in the group of ep * etp = 1 * 2 ranks, in which "
                        "precision.recipe = \"fp8_tensor\" exchanges scales, since tp * cp = 1 * 1 is smaller; set "
                        "parallel.expert_overlap to \"none\", or parallel.etp to 1 [--set]"));
}

}  // namespace
}  // namespace moebius
