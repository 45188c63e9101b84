#include "io/json_text.h"

#include <functional>
#include <unordered_set>
#include <vector>

#include "core/error.h"
#include "io/files.h"
#include "io/flat_json.h"
#include "io/lfs_pointer.h"

namespace moebius {
namespace {

constexpr int kMaxDepth = 100;

// A callback for the parser's events that refuses a key used twice in one object.
class KeyWatch {
 public:
  explicit KeyWatch(const std::string& who) : who_(who) {}

  bool operator()(int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    MOEBIUS_CHECK(input, depth <= kMaxDepth, "{}: expected JSON nested at most {} deep; got more; correct it", who_,
                  kMaxDepth);
    if (event == Event::object_start) open_.emplace_back();
    if (event == Event::object_end) open_.pop_back();
    if (event != Event::key) return true;
    const auto& key = parsed.get_ref<const std::string&>();
    MOEBIUS_CHECK(input, open_.back().insert(key).second,
                  "{}: expected JSON with distinct keys; got \"{}\" twice; correct it", who_, key);
    return true;
  }

 private:
  const std::string& who_;
  std::vector<std::unordered_set<std::string>> open_;
};

// Returns the reason in such a text, without its brackets:
//   [json.exception.parse_error.101] parse error at line 1, column 3: syntax error ...
std::string_view reason_of(std::string_view what) {
  const size_t end = what.find("] ");
  return end == std::string_view::npos ? what : what.substr(end + 2);
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& who) {
  if (auto flat = parse_flat_object(text)) return std::move(*flat);
  KeyWatch watch(who);
  try {
    return nlohmann::json::parse(text, std::ref(watch));
  } catch (const nlohmann::json::exception& error) {
    MOEBIUS_CHECK(input, !text.starts_with(kLfsPointer),
                  "{}: expected JSON; got a Git LFS pointer to it; run git lfs pull in its folder", who);
    MOEBIUS_FAIL(input, "{}: expected JSON; got a {}; correct it", who, reason_of(error.what()));
  }
}

nlohmann::json read_json(const std::string& path) { return parse_json(read_file(path), path); }

}  // namespace moebius
