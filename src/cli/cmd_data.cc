#include <fmt/core.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/command.h"
#include "cli/data_text.h"
#include "cli/options.h"
#include "cli/until_signal.h"
#include "data/data_build.h"
#include "data/token_data.h"

namespace moebius {
namespace {

struct Options {
  DataBuild build;
  std::string tokenizer, prefix;
  bool parse_special = false, json = false;
  int threads = 0;
  std::optional<int64_t> seq_len;
  int64_t first = 0, count = 1, max_tokens = 1000;  // of data show
};

std::string_view type_name(TokenType type) {
  switch (type) {
    case TokenType::u8:
      return "u8";
    case TokenType::i8:
      return "i8";
    case TokenType::i16:
      return "i16";
    case TokenType::i32:
      return "i32";
    case TokenType::i64:
      return "i64";
    case TokenType::u16:
      return "u16";
  }
  return "?";
}

std::string targets_text(const DatasetInfo& info) {
  return info.target_tokens == info.tokens ? "" : fmt::format(", {} of them targets", info.target_tokens);
}

// Training cuts the documents that do not fit a sequence, where documents are kept whole at all.
std::string cut_text(int64_t seq_len, const DatasetInfo& info) {
  if (seq_len == 0) return fmt::format(", {} in the longest document", counted(info.longest, "token"));
  return fmt::format(", {} in the longest document; {} not fit sequences of {}", counted(info.longest, "token"),
                     info.num_cut == 1 ? "1 document does" : fmt::format("{} documents do", info.num_cut), seq_len);
}

void check_at_least_one(const char* option, int64_t value) {
  MOEBIUS_CHECK(usage, value >= 1, "{}: expected at least 1; got {}", option, value);
}

int run_build(Log& log, Options& o) {
  if (o.seq_len) check_at_least_one("--seq-len", *o.seq_len);
  o.build.seq_len = o.seq_len.value_or(0);
  o.build.threads = num_threads(o.threads);
  const std::time_t now = std::time(nullptr);
  localtime_r(&now, &o.build.now);
  const std::unique_ptr<Tokenizer> tokenizer = open_tokenizer(o.tokenizer, {.parse_special = o.parse_special});
  warn_if_any(log, tokenizer->notice());
  const DatasetInfo info = build_dataset(o.build, *tokenizer);
  warn_if_any(log, info.notice);
  if (o.json) {
    print_json({{"prefix", o.build.out_prefix},
                {"documents", info.documents},
                {"tokens", info.tokens},
                {"target_tokens", info.target_tokens},
                {"text_bytes", info.text_bytes},
                {"longest", info.longest},
                {"cut", info.num_cut}});
  } else {
    fmt::print("{}: {}, {}{}, {} of text{}\n", o.build.out_prefix, counted(info.documents, "document"),
               counted(info.tokens, "token"), targets_text(info), counted(info.text_bytes, "byte"),
               cut_text(o.build.seq_len, info));
  }
  return 0;
}

int run_info(const Options& o) {
  const TokenDataset data = TokenDataset::open(o.prefix);
  const auto info = read_dataset_info(o.prefix);
  if (o.json) {
    nlohmann::ordered_json object{{"prefix", o.prefix},
                                  {"token_type", type_name(data.type())},
                                  {"documents", data.num_documents()},
                                  {"sequences", data.num_sequences()},
                                  {"tokens", data.num_tokens()}};
    if (info)
      object.update({{"tokenizer", info->tokenizer},
                     {"vocab_size", info->vocab_size},
                     {"append_eod", info->append_eod},
                     {"target_tokens", info->target_tokens},
                     {"text_bytes", info->text_bytes}});
    print_json(object);
    return 0;
  }
  fmt::print("{}: {}, {}, {} tokens of type {}\n", o.prefix, counted(data.num_documents(), "document"),
             counted(data.num_sequences(), "sequence"), data.num_tokens(), type_name(data.type()));
  if (info) {
    fmt::print("tokenizer {}, vocabulary {}{}, {} bytes of text, {} an end-of-document id after each text\n",
               info->tokenizer, info->vocab_size, targets_text(*info), info->text_bytes,
               info->append_eod ? "with" : "without");
  } else {
    fmt::print("no {}.json: tokenizer and bytes of text are unknown, so there will be no bits per byte\n", o.prefix);
  }
  return 0;
}

std::unique_ptr<Tokenizer> tokenizer_of(const Options& o) {
  const auto info = read_dataset_info(o.prefix);
  MOEBIUS_CHECK(usage, info || !o.tokenizer.empty(),
                "data show: expected --tokenizer, since there is no {}.json that names it; got none", o.prefix);
  const std::string name = o.tokenizer.empty() ? info->tokenizer : o.tokenizer;
  check_tokenizer(o.prefix, name, "data show");
  return open_tokenizer(name, {.show_special = true});
}

void show_document(const TokenDataset& data, const Tokenizer& tokenizer, int64_t document, const Options& o) {
  int64_t at = data.document_begins()[document];
  const int64_t tokens = data.document_begins()[document + 1] - at;
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  if (!o.json) fmt::print("document {}: {}\n", document, counted(tokens, "token"));
  for (const DocumentPart& part : document_parts(data, document, o.max_tokens)) {
    check_token_ids(part.ids, tokenizer.vocab_size(), at, o.prefix);
    at += std::ssize(part.ids);
    if (o.json)
      list.push_back({{"loss", part.has_loss}, {"ids", part.ids}, {"text", tokenizer.decode(part.ids)}});
    else
      fmt::print("  {}  {}\n", part.has_loss ? "loss   " : "no loss", quoted_text(part.ids, tokenizer));
  }
  if (o.json) return print_json({{"document", document}, {"tokens", tokens}, {"parts", list}});
  if (tokens > o.max_tokens) fmt::print("  and {}\n", counted(tokens - o.max_tokens, "more token"));
}

int run_show(const Options& o) {
  check_at_least_one("--count", o.count);
  check_at_least_one("--max-tokens", o.max_tokens);
  const TokenDataset data = TokenDataset::open(o.prefix);
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of(o);
  MOEBIUS_CHECK(usage, o.first >= 0 && o.first < data.num_documents(),
                "data show: expected --document from 0 to {}, the documents of {}; got {}", data.num_documents() - 1,
                o.prefix, o.first);
  for (int64_t d = o.first; d - o.first < std::min(o.count, data.num_documents() - o.first); ++d)
    show_document(data, *tokenizer, d, o);
  return 0;
}

}  // namespace

void add_data(Cli& cli) {
  Command* data = cli.program.add_subcommand("data", "builds and describes token datasets");
  data->require_subcommand();
  const auto o = std::make_shared<Options>();

  Command* build =
      data->add_subcommand("build", "makes PREFIX.bin and PREFIX.idx from text and jsonl, also compressed as .zst");
  build->add_option("--input", o->build.inputs, "text, .jsonl or .zst files, read in this order")->required();
  build->add_option("--tokenizer", o->tokenizer, "bytes, or a folder with a tokenizer.json")->required();
  build->add_flag("--parse-special", o->parse_special,
                  "encode special tokens that are spelled out in the text as special tokens, not as text");
  build->add_option("--seq-len", o->seq_len,
                    "also count the documents that training with this train.seq_len would cut");
  add_threads_option(*build, o->threads);
  build->add_option("--out", o->build.out_prefix, "the PREFIX of the dataset to make")->required();
  build->add_flag("--force", o->build.replace, "replace an existing dataset");
  add_json_option(*build, o->json);
  add_example(*build, "moebius data build --input book.txt --tokenizer bytes --out data/book");
  build->callback([&cli, o] {
    cli.run = [&cli, o] {
      o->build.should_stop = stop_on_signal(cli);
      return run_until_signal(cli, "a dataset", [&] { return run_build(cli.log, *o); });
    };
  });

  Command* info = data->add_subcommand("info", "prints what a dataset holds");
  info->add_option("PREFIX", o->prefix, "the PREFIX of PREFIX.bin and PREFIX.idx")->required();
  add_json_option(*info, o->json);
  add_example(*info, "moebius data info data/book");
  info->callback([&cli, o] { cli.run = [o] { return run_info(*o); }; });

  Command* show = data->add_subcommand("show", "prints documents as text, and on which parts the loss is computed");
  show->add_option("PREFIX", o->prefix, "the PREFIX of PREFIX.bin and PREFIX.idx")->required();
  show->add_option("--document", o->first, "number of the first document, from 0")->capture_default_str();
  show->add_option("--count", o->count, "how many documents")->capture_default_str();
  show->add_option("--max-tokens", o->max_tokens, "the maximum number of tokens to print per document")
      ->capture_default_str();
  show->add_option("--tokenizer", o->tokenizer, "bytes, or a folder with a tokenizer.json; default: the dataset's");
  add_json_option(*show, o->json);
  add_example(*show, "moebius data show data/book --document 2");
  show->callback([&cli, o] { cli.run = [o] { return run_show(*o); }; });
}

}  // namespace moebius
