#include "io/jsonl.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "io/testing.h"

namespace moebius {
namespace {

TEST(Jsonl, AppendsLinesAcrossWriters) {
  const TestDir dir;
  JsonlWriter(dir.path("m")).append({{"step", 1}, {"loss", 0.1}});
  JsonlWriter writer(dir.path("m"));
  writer.append({{"step", 2}, {"loss", std::numeric_limits<double>::quiet_NaN()}});
  EXPECT_EQ(read_file(dir.path("m")), "{\"step\":1,\"loss\":0.1}\n{\"step\":2,\"loss\":null}\n");
}

TEST(Jsonl, DoublesRoundTrip) {
  const TestDir dir;
  const double value = 0.1 + 0.2;
  JsonlWriter(dir.path("m")).append({{"x", value}});
  EXPECT_EQ(nlohmann::json::parse(read_file(dir.path("m")))["x"].get<double>(), value);
}

TEST(Jsonl, TruncationKeepsWhatTheCheckpointHasSeen) {
  const TestDir dir;
  const std::string path = dir.path("m");
  write_file_atomic(
      path, "{\"kind\":\"run\"}\n{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":2,\"kind\":\"eval\"}\n{\"ste");
  truncate_jsonl_after(path, 2);
  EXPECT_EQ(read_file(path), "{\"kind\":\"run\"}\n{\"step\":1}\n{\"step\":2}\n{\"step\":2,\"kind\":\"eval\"}\n");
}

TEST(Jsonl, ATornLineIsDroppedEvenWhenItParses) {
  const TestDir dir;
  write_file_atomic(dir.path("m"),
                    "{\"step\":1}\n{\"step\":2}");  // whole, but its newline is not there: more may be missing
  truncate_jsonl_after(dir.path("m"), 5);
  EXPECT_EQ(read_file(dir.path("m")), "{\"step\":1}\n");
}

TEST(Jsonl, TruncatingAMissingFileDoesNothing) {
  const TestDir dir;
  truncate_jsonl_after(dir.path("m"), 5);
  EXPECT_EQ(dir.num_files(), 0);
}

TEST(Jsonl, ABadLineInTheMiddleIsRefused) {
  const TestDir dir;
  write_file_atomic(dir.path("m"), "{\"step\":1}\nnonsense\n{\"step\":2}\n");
  expect_error(ErrorKind::input, "m:2: expected a JSON object; got \"nonsense\"",
               [&] { truncate_jsonl_after(dir.path("m"), 5); });
}

}  // namespace
}  // namespace moebius
