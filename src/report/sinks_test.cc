#include "report/sinks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "report/testing.h"

namespace moebius {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class Sinks : public ::testing::Test {
 protected:
  RunFolder folder(const std::string& after = "") {
    write_run(dir_.path("run"), 4, after);
    RunFolder run(dir_.path("run"));
    run.poll();
    return run;
  }
  TestDir dir_;
};

TEST_F(Sinks, CsvHasARowForEachRecord) {
  const RunFolder run = folder("{\"kind\":\"train\",\"step\":5,\"loss\":null,\"=a,\\\"b\":0.1}\nhalf");
  EXPECT_EQ(write_csv(run, dir_.path("t.csv")), 6);
  const std::string csv = read_file(dir_.path("t.csv"));
  EXPECT_THAT(csv, StartsWith("kind,step,loss,aux_loss,z_loss,grad_norm,lr,tokens,step_time_s,tokens_per_s,"
                              "model_tflops_per_rank,expert_load_max_over_mean,dropped_tokens,memory_peak_bytes,"
                              "\"'=a,\"\"b\",bits_per_byte\r\n"));
  EXPECT_THAT(csv, HasSubstr("\r\ntrain,3,1.6666666666666667,0.02,0,1.5,0.001,128,0.05,2560,0.5,1.5,0,31551488,,\r\n"));
  EXPECT_THAT(csv, HasSubstr("\r\neval,4,1.5,,,,,64,,,,,,,,2.25\r\n"));
  EXPECT_THAT(csv, HasSubstr("\r\ntrain,5,,,,,,,,,,,,,0.1,\r\n"));
}

TEST_F(Sinks, PrometheusHasTheNewestValues) {
  const RunFolder run = folder();
  const std::string text = prometheus_text("a \"run\"\n", run.data());
  EXPECT_THAT(text, HasSubstr("# TYPE moebius_loss gauge\nmoebius_loss{run=\"a \\\"run\\\"\\n\"} 1.25\n"));
  EXPECT_THAT(text, HasSubstr("moebius_eval_bits_per_byte{run=\"a \\\"run\\\"\\n\"} 2.25\n"));
  EXPECT_THAT(text, HasSubstr(",layer=\"1\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("moebius_rank_seconds{run=\"a \\\"run\\\"\\n\",phase=\"waiting_s\",rank=\"1\"} 0.02\n"));
  EXPECT_THAT(text, HasSubstr(",axis=\"ep\"} 0.02\n"));
}

TEST_F(Sinks, NamesThatCollideInPrometheusAreWrittenOnce) {
  const RunFolder run = folder("{\"kind\":\"train\",\"step\":9,\"a-b\":1,\"a b\":2}\n");
  const std::string text = prometheus_text("r", run.data());
  EXPECT_THAT(text, HasSubstr("moebius_a_b{run=\"r\"} 1\n"));
  EXPECT_THAT(text, testing::Not(HasSubstr("moebius_a_b{run=\"r\"} 2\n")));
}

}  // namespace
}  // namespace moebius
