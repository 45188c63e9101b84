#include "data/jsonl.h"

#include <limits>
#include <map>
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

TEST(Jsonl, TruncationKeepsRecordsUpToTheCheckpoint) {
  const TestDir dir;
  const std::string path = dir.path("m");
  write_file_atomic(
      path, "{\"kind\":\"run\"}\n{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":2,\"kind\":\"eval\"}\n{\"ste");
  truncate_jsonl_after(path, 2);
  EXPECT_EQ(read_file(path), "{\"kind\":\"run\"}\n{\"step\":1}\n{\"step\":2}\n{\"step\":2,\"kind\":\"eval\"}\n");
}

TEST(Jsonl, ATornLineIsDroppedEvenWhenItParses) {
  const TestDir dir;
  // The last line is whole but has no newline, so more of it may be missing.
  write_file_atomic(dir.path("m"), "{\"step\":1}\n{\"step\":2}");
  truncate_jsonl_after(dir.path("m"), 5);
  EXPECT_EQ(read_file(dir.path("m")), "{\"step\":1}\n");
}

TEST(Jsonl, TruncatingAMissingFileDoesNothing) {
  const TestDir dir;
  truncate_jsonl_after(dir.path("m"), 5);
  EXPECT_EQ(dir.num_files(), 0);
}

// After a power loss, blocks that were never written read as NUL bytes.
TEST(Jsonl, DamagedLinesAtTheEndAreDroppedAndCounted) {
  const TestDir dir;
  const std::string path = dir.path("m"), good = "{\"step\":1}\n{\"step\":2}\n";
  for (const auto& [end, lines] : std::map<std::string, int64_t>{{"", 0},
                                                                 {"nonsense\n", 1},
                                                                 {"[3]\n\n", 2},
                                                                 {std::string(5000, '\0'), 1},
                                                                 {std::string(50, '\0') + "\n{\"st", 2}}) {
    write_file_atomic(path, good + end);
    EXPECT_EQ(truncate_jsonl_after(path, 5), lines) << end;
    EXPECT_EQ(read_file(path), good) << end;
  }
}

TEST(Jsonl, ADamagedLineInTheMiddleTakesNoRecordWithIt) {
  const TestDir dir;
  write_file_atomic(dir.path("m"), "{\"step\":1}\n\xff{\"step\":7}\n{\"step\":2}\n{\"step\":3}\n");
  EXPECT_EQ(truncate_jsonl_after(dir.path("m"), 2), 1);
  EXPECT_EQ(read_file(dir.path("m")), "{\"step\":1}\n{\"step\":2}\n");
}

TEST(Jsonl, SyncAcceptsAnyLogFile) {
  const TestDir dir;
  JsonlWriter writer(dir.path("m"));
  writer.sync();
  writer.append({{"step", 1}});
  writer.sync();
  EXPECT_EQ(read_file(dir.path("m")), "{\"step\":1}\n");
  JsonlWriter("/dev/null").sync();  // a device that cannot be synced is no error
}

}  // namespace
}  // namespace moebius
