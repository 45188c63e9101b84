#include "io/data_build.h"

#include <filesystem>

#include "core/error.h"
#include "io/files.h"
#include "io/json_text.h"
#include "io/text_input.h"
#include "io/token_data.h"

namespace moebius {
namespace {

void add_documents(const std::string& path, const Tokenizer& tokenizer, TokenDatasetWriter* writer, DatasetInfo* info) {
  TextInput input(path);
  std::string text;
  std::vector<int32_t> ids;
  while (input.next(&text)) {
    if (text.empty()) continue;
    ids.clear();
    tokenizer.encode(text, &ids);
    if (info->append_eod) ids.push_back(tokenizer.eod_id());
    writer->add_tokens(ids);
    writer->end_document();
    info->text_bytes += static_cast<int64_t>(text.size());
  }
}

void write_dataset_info(const std::string& prefix, const DatasetInfo& info) {
  const nlohmann::ordered_json json{{"tokenizer", info.tokenizer},   {"vocab_size", info.vocab_size},
                                    {"append_eod", info.append_eod}, {"documents", info.documents},
                                    {"tokens", info.tokens},         {"text_bytes", info.text_bytes}};
  write_file_atomic(prefix + ".json", json.dump(2) + "\n");
}

}  // namespace

DatasetInfo build_dataset(const DataBuild& build, const Tokenizer& tokenizer) {
  DatasetInfo info{.tokenizer = tokenizer.name(), .vocab_size = tokenizer.vocab_size(), .append_eod = build.append_eod};
  for (const std::string& path : build.inputs) TextInput{path};  // all can be opened, before anything is written
  std::filesystem::create_directories(parent_dir(build.out_prefix));
  TokenDatasetWriter writer(build.out_prefix, token_type_for_vocab(info.vocab_size));
  for (const std::string& path : build.inputs) add_documents(path, tokenizer, &writer, &info);
  info.documents = writer.num_documents();
  info.tokens = writer.num_tokens();
  MOEBIUS_CHECK(input, info.tokens > 0, "data build {}: expected some text; got none in {} files; give it other files",
                build.out_prefix, build.inputs.size());
  // The .idx is what makes a dataset: gone first and back last, so that sidecar and tokens always belong together.
  std::filesystem::remove(build.out_prefix + ".idx");
  write_dataset_info(build.out_prefix, info);
  writer.close();
  return info;
}

std::optional<DatasetInfo> read_dataset_info(const std::string& prefix) {
  const std::string path = prefix + ".json";
  if (!std::filesystem::exists(path)) return std::nullopt;
  const nlohmann::json json = read_json(path);
  try {
    return DatasetInfo{.tokenizer = json.at("tokenizer"),
                       .vocab_size = json.at("vocab_size"),
                       .append_eod = json.at("append_eod"),
                       .documents = json.at("documents"),
                       .tokens = json.at("tokens"),
                       .text_bytes = json.at("text_bytes")};
  } catch (const nlohmann::json::exception& error) {
    MOEBIUS_FAIL(input, "{}: expected the fields of a dataset's sidecar; got {}; build the dataset again", path,
                 error.what());
  }
}

}  // namespace moebius
