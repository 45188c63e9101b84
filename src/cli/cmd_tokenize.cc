#include <fmt/format.h>

#include <charconv>
#include <iostream>
#include <memory>

#include "cli/command.h"
#include "cli/options.h"
#include "tokenizer/tokenizer.h"

namespace moebius {
namespace {

struct Options {
  std::string tokenizer;
  bool decode = false;
};

std::vector<int32_t> parse_ids(const std::string& line, int64_t number) {
  std::vector<int32_t> ids;
  const char *at = line.data(), *end = line.data() + line.size();
  while (true) {
    while (at != end && (*at == ' ' || *at == '\t' || *at == '\r')) ++at;
    if (at == end) return ids;
    int32_t id = 0;
    const auto [next, error] = std::from_chars(at, end, id);
    MOEBIUS_CHECK(input, error == std::errc() && (next == end || *next == ' ' || *next == '\t' || *next == '\r'),
                  "standard input:{}: expected ids with spaces between them; got \"{}\"", number,
                  line.substr(at - line.data(), 20));
    ids.push_back(id);
    at = next;
  }
}

int run_tokenize(const Options& o, Log& log) {
  const std::unique_ptr<Tokenizer> tokenizer = open_tokenizer(o.tokenizer);
  warn_if_any(log, tokenizer->notice());
  std::string line;
  for (int64_t number = 1; std::getline(std::cin, line); ++number) {
    if (o.decode) {
      std::cout << tokenizer->decode(parse_ids(line, number)) << '\n';
      continue;
    }
    std::vector<int32_t> ids;
    tokenizer->encode(line, &ids);
    std::cout << fmt::format("{}\n", fmt::join(ids, " "));
  }
  MOEBIUS_CHECK(io, std::cout.flush().good(),
                "standard output: could not be written; free space there or send it elsewhere");
  return 0;
}

}  // namespace

void add_tokenize(Cli& cli) {
  Command* command = cli.program.add_subcommand(
      "tokenize", "turns each line of standard input into token ids, or with --decode ids into text");
  const auto o = std::make_shared<Options>();
  command->add_option("--tokenizer", o->tokenizer, "bytes, or a folder with a tokenizer.json")->required();
  command->add_flag("--decode", o->decode, "turn ids into text");
  add_example(*command, "echo 'some text' | moebius tokenize --tokenizer bytes");
  command->callback([&cli, o] { cli.run = [&cli, o] { return run_tokenize(*o, cli.log); }; });
}

}  // namespace moebius
