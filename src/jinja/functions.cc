// Global functions, and the arguments of functions.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "jinja/runtime.h"

namespace moebius::jinja {
namespace {

constexpr int64_t kMaxRange = 100'000;  // as in the sandbox of Jinja

Value range(Runtime& runtime, const Arguments& arguments) {
  const size_t given = arguments.positional.size();
  const Parameters p("range", arguments, {"start", "stop", "step"});
  const int64_t start = given > 1 ? p.integer(0) : 0, stop = given > 1 ? p.integer(1) : p.integer(0),
                step = p.integer_or(2, 1);
  if (step == 0) throw TemplateError("range: expected a step other than 0");
  const double length = (static_cast<double>(stop) - static_cast<double>(start)) / static_cast<double>(step);
  if (length > kMaxRange) throw TemplateError(fmt::format("range: expected at most {} numbers; got more", kMaxRange));
  std::vector<Value> numbers;
  for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
    numbers.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  runtime.budget().make(numbers.size() * sizeof(Value));
  return std::make_shared<Iterable>(Iterable::Kind::range, std::move(numbers));
}

// Sets fields from one dict, or from named arguments.
template <class Set>
void each_field(Runtime& runtime, const Arguments& arguments, const Set& set) {
  if (arguments.positional.size() > 1) throw TemplateError("expected at most one argument without a name");
  for (const Value& from : arguments.positional) {
    if (from.is_dict()) {
      for (const auto& [key, value] : from.dict().items()) set(key, value);
      continue;
    }
    for (const Value& pair : items_of(runtime.budget(), from)) {
      const std::vector<Value> two = items_of(runtime.budget(), pair);
      if (two.size() != 2)
        throw TemplateError(fmt::format("expected pairs of key and value; got {} items", two.size()));
      set(two[0], two[1]);
    }
  }
  for (const auto& [name, value] : arguments.named) set(Value(name), value);
}

Value dict(Runtime& runtime, const Arguments& arguments) {
  auto made = std::make_shared<Dict>();
  each_field(runtime, arguments, [&](const Value& key, const Value& value) { made->set(key, value); });
  runtime.budget().make(made->items().size() * sizeof(Dict::Item));
  return DictPtr(made);
}

Value namespace_function(Runtime& runtime, const Arguments& arguments) {
  const std::shared_ptr<Namespace> made = runtime.make_namespace();
  each_field(runtime, arguments, [&](const Value& key, const Value& value) { made->set(runtime.str(key), value); });
  return made;
}

Value raise_exception(Runtime& runtime, const Arguments& arguments) {
  const Parameters p("raise_exception", arguments, {"message"});
  throw TemplateError(fmt::format("the template refuses this: {}", runtime.str(p.at(0))));
}

Value strftime_now(Runtime& runtime, const Arguments& arguments) {
  const Parameters p("strftime_now", arguments, {"format"});
  const std::string format = p.text(0);
  if (format.size() > 256) throw TemplateError("strftime_now: expected a format of at most 256 bytes");
  std::array<char, 4096> buffer{};
  const size_t length =
      format.empty() ? 0 : std::strftime(buffer.data(), buffer.size(), format.c_str(), &runtime.now());
  return runtime.text(std::string(buffer.data(), length));
}

class Cycler : public Object {
 public:
  explicit Cycler(const std::vector<Value>& items) : state_(std::make_shared<State>(State{items})) {
    if (items.empty()) throw TemplateError("cycler: expected items; got none");
    depth_ = Value::list(items).depth() + 1;
  }
  std::string_view type_name() const override { return "Cycler"; }
  int depth() const override { return depth_; }
  bool attribute(Runtime&, const std::string& name, Value* value) override {
    if (name == "current") return *value = state_->items[state_->at], true;
    if (name != "next" && name != "reset") return false;
    const auto step = [state = state_, moves = name == "next"](Runtime&, const Arguments&) -> Value {
      if (!moves) return state->at = 0, Value(None{});
      const Value now = state->items[state->at];
      state->at = (state->at + 1) % state->items.size();
      return now;
    };
    *value = std::make_shared<Function>(name, step, depth_ + 1);
    return true;
  }

 private:
  struct State {
    std::vector<Value> items;
    size_t at = 0;
  };
  std::shared_ptr<State> state_;
  int depth_ = 1;
};

Value joiner(Runtime&, const Arguments& arguments) {
  const Parameters p("joiner", arguments, {"sep"});
  auto used = std::make_shared<bool>(false);
  return std::make_shared<Function>("joiner", [used, between = p.text_or(0, ", ")](Runtime&, const Arguments&) {
    return Value(std::exchange(*used, true) ? between : "");
  });
}

}  // namespace

Value global_function(const std::string& name) {
  const auto function = [&](Value (*body)(Runtime&, const Arguments&)) -> Value {
    return std::make_shared<Function>(name, body);
  };
  if (name == "range") return function(range);
  if (name == "dict") return function(dict);
  if (name == "namespace") return function(namespace_function);
  if (name == "raise_exception") return function(raise_exception);
  if (name == "strftime_now") return function(strftime_now);
  if (name == "joiner") return function(joiner);
  if (name == "cycler")
    return function([](Runtime&, const Arguments& a) -> Value { return std::make_shared<Cycler>(a.positional); });
  if (name == "lipsum")
    throw TemplateError("expected a function of chat templates; got lipsum, which is not supported");
  return {};
}

Parameters::Parameters(std::string who, const Arguments& arguments, std::vector<std::string> names)
    : who_(std::move(who)), names_(std::move(names)), values_(names_.size()) {
  if (arguments.positional.size() > names_.size())
    throw TemplateError(
        fmt::format("{}: expected at most {} arguments; got {}", who_, names_.size(), arguments.positional.size()));
  for (size_t i = 0; i < arguments.positional.size(); ++i) values_[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.named) {
    const auto it = std::find(names_.begin(), names_.end(), name);
    if (it == names_.end()) throw TemplateError(fmt::format("{}: expected no argument \"{}\"; got it", who_, name));
    const Value*& slot = values_[static_cast<size_t>(it - names_.begin())];
    if (slot != nullptr) throw TemplateError(fmt::format("{}: expected \"{}\" once; got it twice", who_, name));
    slot = &value;
  }
}

const Value& Parameters::at(size_t i) const {
  if (!has(i)) throw TemplateError(fmt::format("{}: expected the argument \"{}\"; got none", who_, names_[i]));
  return *values_[i];
}

std::string Parameters::text(size_t i) const {
  if (!at(i).is_text())
    throw TemplateError(fmt::format("{}: expected a string as \"{}\"; got '{}'", who_, names_[i], at(i).type_name()));
  return at(i).text();
}

int64_t Parameters::integer(size_t i) const {
  if (!at(i).is_integer())
    throw TemplateError(fmt::format("{}: expected an integer as \"{}\"; got '{}'", who_, names_[i], at(i).type_name()));
  return at(i).integer();
}

}  // namespace moebius::jinja
