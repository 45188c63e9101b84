#include "io/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "io/hash.h"
#include "io/testing.h"

namespace moebius {
namespace {

TEST(Files, AtomicWriteReplacesTheFileAndLeavesNothingElse) {
  const TestDir dir;
  write_file_atomic(dir.path("a"), "old");
  write_file_atomic(dir.path("a"), "newer");
  EXPECT_EQ(read_file(dir.path("a")), "newer");
  EXPECT_EQ(dir.num_files(), 1);
}

TEST(Files, AtomicWriteKeepsLinksPipesAndDevices) {
  const TestDir dir;
  write_file_atomic(dir.path("a"), "old");
  ASSERT_EQ(::symlink(dir.path("a").c_str(), dir.path("link").c_str()), 0);
  write_file_atomic(dir.path("link"), "newer");
  EXPECT_TRUE(std::filesystem::is_symlink(dir.path("link")));
  EXPECT_EQ(read_file(dir.path("a")), "newer");

  ASSERT_EQ(::mkfifo(dir.path("pipe").c_str(), 0600), 0);
  const int reader = ::open(dir.path("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  write_file_atomic(dir.path("pipe"), "rows");
  char bytes[8];
  EXPECT_EQ(::read(reader, bytes, sizeof bytes), 4);
  ::close(reader);
  EXPECT_TRUE(std::filesystem::is_fifo(dir.path("pipe")));
  EXPECT_EQ(dir.num_files(), 3);
}

TEST(Files, PendingFileThatIsNotCommittedIsGone) {
  const TestDir dir;
  write_file_atomic(dir.path("a"), "old");
  {
    PendingFile pending(dir.path("a"));
    pending.file().append("half", 4);
    EXPECT_EQ(dir.num_files(), 2);
  }
  EXPECT_EQ(dir.num_files(), 1);
  EXPECT_EQ(read_file(dir.path("a")), "old");
}

TEST(Files, NewFilesHonourTheUmask) {
  const TestDir dir;
  const mode_t before = ::umask(027);
  write_file_atomic(dir.path("a"), "x");
  ::umask(before);
  struct stat info {};
  ASSERT_EQ(::stat(dir.path("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
}

TEST(Files, ReadPastTheEndIsAnError) {
  const TestDir dir;
  write_file_atomic(dir.path("a"), "12345");
  const File file = File::open_read(dir.path("a"));
  char bytes[8];
  EXPECT_EQ(file.read_some(bytes, 8, 2), 3);
  expect_error(ErrorKind::io, "expected 8 bytes at 2; got 3 before the end", [&] { file.read_at(bytes, 8, 2); });
}

TEST(Files, MissingFilesAndFoldersAreBadInput) {
  const TestDir dir;
  expect_error(ErrorKind::input, "none: No such file or directory; check the path",
               [&] { read_file(dir.path("none")); });
  expect_error(ErrorKind::input, "expected a file; got a folder", [&] { read_file(dir.path()); });
}

TEST(Files, WritesThatFailSayThePathTheBytesAndTheReason) {
  const File full = File::create("/dev/full");
  expect_error(ErrorKind::io, "write of 3 bytes at 0 to /dev/full: No space left on device; the disk is full (",
               [&] { full.write_at("abc", 3, 0); });
  expect_error(ErrorKind::io, "write of 3 bytes to /dev/full: No space left", [&] { full.append("abc", 3); });
  expect_error(ErrorKind::io, "No such file or directory; check the path",
               [] { write_file_atomic("/no-such-folder/a", "x"); });
}

TEST(Files, AWriteThatStopsHalfWayIsAnErrorAndThePendingFileIsGone) {
  const TestDir dir;
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 1000, before.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string big(3000, 'x');
  expect_error(ErrorKind::io, "write of 3000 bytes at 0 to", [&] { write_file_atomic(dir.path("a"), big); });
  expect_error(ErrorKind::io, "File too large; raise the file size limit",
               [&] { write_file_atomic(dir.path("a"), big); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(dir.num_files(), 0);
}

TEST(Files, TooManyOpenFilesNameTheLimit) {
  const TestDir dir;
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const struct rlimit none { 0, before.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  expect_error(ErrorKind::io, "Too many open files; raise the limit of open files (ulimit -n)",
               [&] { File::create_unique(dir.path("a")); });
  ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST(Files, CreateUniqueRefusesAnExistingFile) {
  const TestDir dir;
  write_file_atomic(dir.path("a"), "x");
  expect_error(ErrorKind::io, "File exists", [&] { File::create_unique(dir.path("a")); });
}

TEST(Files, ParentDir) {
  EXPECT_EQ(parent_dir("a"), ".");
  EXPECT_EQ(parent_dir("x/a"), "x");
  EXPECT_GT(free_bytes("."), 0);
}

TEST(Hash, PiecesGiveTheHashOfTheWhole) {
  const std::string text = "the quick brown fox";
  Hasher hasher;
  hasher.update(text.data(), 5);
  hasher.update(text.data() + 5, text.size() - 5);
  EXPECT_EQ(hasher.digest(), hash_bytes(text.data(), text.size()));
  EXPECT_NE(hasher.digest(), hash_bytes(text.data(), text.size() - 1));
}

TEST(Hash, HexIsTheCanonicalDigest) {
  EXPECT_EQ(to_hex(hash_bytes("", 0)), "99aa06d3014798d86001c324468d497f");  // the published XXH3-128 of nothing
}

}  // namespace
}  // namespace moebius
