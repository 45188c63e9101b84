// Runs a fuzz target without libFuzzer, on every file of its corpus and on seeded mutations of
// each. So every build tries unexpected inputs, which is of most use under the sanitizers. For a
// real search, build with `cmake -DMOEBIUS_FUZZ=ON` and clang.
//
//   usage: NAME_fuzz CORPUS_FOLDER MUTATIONS      so many of each input
// Fails when the target throws an unexpected exception or crashes, or when the folder holds no input.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

std::vector<Bytes> read_corpus(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

class Mutator {
 public:
  Bytes mutate(Bytes input) {
    for (uint64_t edits = 1 + below(4); edits > 0; --edits) edit(input);
    return input;
  }

 private:
  uint64_t below(uint64_t n) { return random_() % n; }

  void edit(Bytes& input) {
    const size_t at = below(input.size() + 1);
    const size_t length = std::min<size_t>(below(9), input.size() - at);
    switch (below(5)) {
      case 0:  // flips a bit
        if (at < input.size()) input[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:  // sets a byte that parsers treat specially
        if (at < input.size()) input[at] = kBytes[below(sizeof kBytes)];
        break;
      case 2:  // truncates
        if (below(4) == 0) input.resize(at);
        break;
      case 3:  // removes a few bytes
        input.erase(input.begin() + at, input.begin() + at + length);
        break;
      case 4: {  // repeats a few bytes
        const Bytes copy(input.begin() + at, input.begin() + at + length);
        input.insert(input.begin() + at, copy.begin(), copy.end());
        break;
      }
    }
  }

  static constexpr uint8_t kBytes[] = {0,   1,   0x7f, 0x80, 0xff, '"', '\\', '{', '}',
                                       '[', ']', ',',  ':',  '-',  '.', '9',  '\n'};
  std::mt19937_64 random_{1};
};

}  // namespace

int main(int argc, char** argv) {
  const int mutations = argc == 3 ? std::atoi(argv[2]) : 0;
  if (mutations <= 0) return std::fprintf(stderr, "usage: %s CORPUS_FOLDER MUTATIONS\n", argv[0]), 2;
  const std::vector<Bytes> inputs = read_corpus(argv[1]);
  if (inputs.empty()) return std::fprintf(stderr, "%s: no input in %s\n", argv[0], argv[1]), 1;
  Mutator mutator;
  for (const Bytes& input : inputs) {
    LLVMFuzzerTestOneInput(input.data(), input.size());
    for (int i = 0; i < mutations; ++i) {
      const Bytes changed = mutator.mutate(input);
      LLVMFuzzerTestOneInput(changed.data(), changed.size());
    }
  }
  std::printf("%zu inputs, %d mutations of each\n", inputs.size(), mutations);
  return 0;
}
