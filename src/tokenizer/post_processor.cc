#include "tokenizer/post_processor.h"

namespace moebius {
namespace {

std::vector<int32_t> special_ids(const JsonField& field, const JsonField& piece) {
  std::vector<int32_t> ids;
  const JsonField token = field.at("special_tokens").at(piece.at("SpecialToken").at("id").string());
  for (const JsonField& id : token.at("ids").items()) ids.push_back(static_cast<int32_t>(id.integer(0, INT32_MAX)));
  return ids;
}

PostProcessor read_template(const JsonField& field) {
  PostProcessor processor;
  bool has_text = false;
  for (const JsonField& piece : field.at("single").items()) {
    if (piece.has("Sequence")) {
      if (has_text || piece.at("Sequence").at("id").string() != "A") piece.fail("exactly one sequence A");
      has_text = true;
    } else {
      auto& side = has_text ? processor.after : processor.before;
      const std::vector<int32_t> ids = special_ids(field, piece);
      side.insert(side.end(), ids.begin(), ids.end());
    }
  }
  if (!has_text) field.at("single").fail("a template with the sequence A");
  return processor;
}

}  // namespace

PostProcessor PostProcessor::read(const JsonField& field) {
  const std::string& type = field.at("type").string();
  if (type == "ByteLevel") return {};  // it changes offsets only, which are not used here
  if (type == "TemplateProcessing") return read_template(field);
  if (type != "Sequence")
    field.at("type").fail("TemplateProcessing, ByteLevel or Sequence", "this post-processor is not supported");
  PostProcessor all;
  for (const JsonField& item : field.at("processors").items()) {
    const PostProcessor one = read(item);
    all.before.insert(all.before.begin(), one.before.begin(), one.before.end());
    all.after.insert(all.after.end(), one.after.begin(), one.after.end());
  }
  return all;
}

}  // namespace moebius
