#include "data/jsonl.h"

#include <fmt/format.h>

#include <filesystem>
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

// A log in front of whose last lines there is a hole of a tebibyte. Nobody can read it whole.
class LargeLog {
 public:
  explicit LargeLog(const std::string& last_lines) {
    const File file = File::create(path());
    file.write_at(last_lines.data(), std::ssize(last_lines), kHole);
  }
  std::string path() const { return dir_.path("m"); }
  std::string last_lines() const {
    const File file = File::open_read(path());
    std::string lines(static_cast<size_t>(file.size() - kHole), '\0');
    file.read_at(lines.data(), std::ssize(lines), kHole);
    return lines;
  }

 private:
  static constexpr int64_t kHole = int64_t{1} << 40;
  TestDir dir_;
};

TEST(Jsonl, OnlyTheEndOfALargeLogIsRead) {
  const std::string filler(3'000'000, 'x');  // a line is longer than a block
  const std::string kept = "\n{\"step\":6}\n{\"step\":7}\n{\"step\":7,\"kind\":\"eval\"}\n";
  const LargeLog log(kept + R"({"step":8,"x":")" + filler + "\"}\n{\"step\":9}\n{\"step\":1");
  EXPECT_TRUE(jsonl_holds(log.path(), "eval", 7));
  EXPECT_FALSE(jsonl_holds(log.path(), "eval", 8));
  EXPECT_EQ(truncate_jsonl_after(log.path(), 7), 1);
  EXPECT_EQ(log.last_lines(), kept);
  EXPECT_EQ(truncate_jsonl_after(log.path(), 7), 0);
  EXPECT_EQ(log.last_lines(), kept);
}

// Lines over blocks, of which one begins anywhere in a line.
TEST(Jsonl, LinesOfManyBlocksAreReadWhole) {
  const TestDir dir;
  std::string kept, dropped;
  for (int i = 0; i < 40; ++i) {
    const std::string filler(static_cast<size_t>(100'003 * (i % 7)), 'y');
    const std::string line = fmt::format("{{\"step\":{},\"x\":\"{}\"}}\n", i, filler);
    (i <= 12 ? kept : dropped) += line;
  }
  write_file_atomic(dir.path("m"), kept + dropped);
  EXPECT_EQ(truncate_jsonl_after(dir.path("m"), 12), 0);
  EXPECT_EQ(read_file(dir.path("m")), kept);
}

TEST(Jsonl, RecordsOfAKindAndStepAreFound) {
  const TestDir dir;
  const std::string path = dir.path("m");
  EXPECT_FALSE(jsonl_holds(path, "eval", 1));
  write_file_atomic(path,
                    "{\"kind\":\"train\",\"step\":1}\n{\"kind\":\"eval\",\"step\":1}\n[2]\n"
                    "{\"kind\":\"train\",\"step\":2}\n{\"kind\":\"eval\",\"step\":2}");
  EXPECT_TRUE(jsonl_holds(path, "eval", 1));
  EXPECT_TRUE(jsonl_holds(path, "train", 2));
  EXPECT_FALSE(jsonl_holds(path, "eval", 2)) << "a line without its line break is not whole, and is dropped";
  EXPECT_FALSE(jsonl_holds(path, "eval", 3));
}

// The name of the log may be a link.
TEST(Jsonl, ALinkToALogStaysALink) {
  const TestDir dir;
  const std::string target = dir.path("target"), path = dir.path("m");
  std::filesystem::create_symlink(target, path);
  for (const std::string last : {"{\"step\":3}\n", "\n{\"step\":2,\"kind\":\"eval\"}\n"}) {
    write_file_atomic(target, "{\"step\":1}\n{\"step\":2}\n" + last);
    truncate_jsonl_after(path, 2);
    EXPECT_TRUE(std::filesystem::is_symlink(path));
    EXPECT_EQ(read_file(target).find("{\"step\":1}\n{\"step\":2}\n"), 0u);
    EXPECT_EQ(read_file(target).find("\n\n"), std::string::npos);
    EXPECT_EQ(read_file(target).find("3}"), std::string::npos);
  }
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
