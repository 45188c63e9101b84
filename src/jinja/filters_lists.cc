// Filters of lists, dicts and other values with items.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <unordered_map>

#include "jinja/filters.h"

namespace moebius::jinja {
namespace {

using Items = std::vector<Value>;

// Finds a value by a path such as "function.name" or "0".
Value by_path(Runtime& runtime, Value value, const Value& path, const Value* otherwise = nullptr) {
  if (path.is_integer()) return runtime.item(value, path);
  const std::string text = runtime.str(path);
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('.', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const bool is_number = !part.empty() && part.size() < 18 && part.find_first_not_of("0123456789") == part.npos;
    value = runtime.item(value, is_number ? Value(int64_t{std::stoll(part)}) : Value(part));
    if (otherwise != nullptr && value.is_undefined()) value = *otherwise;
    begin = end + 1;
  }
  return value;
}

Value without_case(Value value) { return value.is_text() ? Value(lower(value.text())) : value; }

// The value that sort, unique, min and max compare items by.
class SortKey {
 public:
  SortKey(Runtime& runtime, bool case_sensitive, Value attribute, bool several = false)
      : runtime_(runtime), case_sensitive_(case_sensitive), attribute_(std::move(attribute)), several_(several) {}

  Value of(const Value& item) const {
    if (attribute_.is_none()) return cased(item);
    if (!several_ || !attribute_.is_text()) return cased(by_path(runtime_, item, attribute_));
    Items keys;
    const std::string& names = attribute_.text();
    for (size_t begin = 0; begin <= names.size();) {
      const size_t end = std::min(names.find(',', begin), names.size());
      keys.push_back(cased(by_path(runtime_, item, names.substr(begin, end - begin))));
      begin = end + 1;
    }
    return Value::list(std::move(keys));
  }

 private:
  Value cased(Value value) const { return case_sensitive_ ? value : without_case(std::move(value)); }

  Runtime& runtime_;
  bool case_sensitive_;
  Value attribute_;
  bool several_;
};

// Sorts stably, and compares each pair once. Equal items keep their order, also in reverse.
Items sorted(Runtime& runtime, const Items& items, bool reverse, const std::function<Value(const Value&)>& key) {
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : items) keyed.emplace_back(key(item), item);
  if (keyed.size() == 1) return items;
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? compare(runtime.budget(), b.first, a.first) < 0 : compare(runtime.budget(), a.first, b.first) < 0;
  });
  Items result;
  for (auto& [k, item] : keyed) result.push_back(std::move(item));
  return result;
}

Value sort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("sort", arguments, {"reverse", "case_sensitive", "attribute"});
  const SortKey key(runtime, p.truth_or(1, false), p.get(2, None{}), /*several=*/true);
  return runtime.list(sorted(runtime, items_of(runtime.budget(), input), p.truth_or(0, false),
                             [&](const Value& item) { return key.of(item); }));
}

Value dictsort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("dictsort", arguments, {"case_sensitive", "by", "reverse"});
  const std::string by = p.text_or(1, "key");
  if (by != "key" && by != "value") throw TemplateError("dictsort: expected by \"key\" or \"value\"");
  if (!input.is_dict()) throw TemplateError(fmt::format("dictsort: expected a dict; got '{}'", input.type_name()));
  Items pairs;
  for (const auto& [key, value] : input.dict().items()) pairs.push_back(Value::tuple({key, value}));
  return runtime.list(sorted(runtime, pairs, p.truth_or(2, false), [&](const Value& pair) {
    const Value& key = pair.items()[by == "value"];
    return p.truth_or(0, false) ? key : without_case(key);
  }));
}

Value unique(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("unique", arguments, {"case_sensitive", "attribute"});
  const SortKey key(runtime, p.truth_or(0, false), p.get(1, None{}));
  Dict seen;
  Items result;
  for (const Value& item : items_of(runtime.budget(), input)) {
    const Value k = key.of(item);
    if (!k.is_text()) runtime.budget().step(std::ssize(seen.items()));
    if (seen.find(k) != nullptr) continue;
    seen.set(k, true);
    result.push_back(item);
  }
  return runtime.generator(std::move(result));
}

Value least(Runtime& runtime, const Value& input, const Arguments& arguments, int sign, const char* who) {
  const Parameters p(who, arguments, {"case_sensitive", "attribute"});
  const SortKey key(runtime, p.truth_or(0, false), p.get(1, None{}));
  const Items items = items_of(runtime.budget(), input);
  if (items.empty()) return Value::undefined("No aggregated item, sequence was empty.");
  size_t best = 0;
  for (size_t i = 1; i < items.size(); ++i)
    if (compare(runtime.budget(), key.of(items[i]), key.of(items[best])) * sign < 0) best = i;
  return items[best];
}
Value min_of(Runtime& runtime, const Value& input, const Arguments& a) { return least(runtime, input, a, 1, "min"); }
Value max_of(Runtime& runtime, const Value& input, const Arguments& a) { return least(runtime, input, a, -1, "max"); }

Value sum(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("sum", arguments, {"attribute", "start"});
  Value total = p.get(1, int64_t{0});
  for (const Value& item : items_of(runtime.budget(), input))
    total = runtime.binary(Expr::Op::add, total, p.is_none(0) ? item : by_path(runtime, item, p.at(0)));
  return total;
}

Value list(Runtime& runtime, const Value& input, const Arguments&) {
  return runtime.list(items_of(runtime.budget(), input));
}

Value join(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("join", arguments, {"d", "attribute"});
  const std::string between = p.has(0) ? runtime.str(p.at(0)) : "";
  std::string out;
  bool first = true;
  for (const Value& item : items_of(runtime.budget(), input)) {
    const std::string text = runtime.str(p.is_none(1) ? item : by_path(runtime, item, p.at(1)));
    runtime.budget().make(text.size() + between.size());
    if (!std::exchange(first, false)) out += between;
    out += text;
  }
  return out;
}

Value first(Runtime& runtime, const Value& input, const Arguments&) {
  Value item;
  if (auto* iterable = dynamic_cast<Iterable*>(input.object()))
    return iterable->take_one(&item) ? item : Value::undefined("No first item, sequence was empty.");
  const Items items = items_of(runtime.budget(), input);
  return items.empty() ? Value::undefined("No first item, sequence was empty.") : items.front();
}

Value last(Runtime& runtime, const Value& input, const Arguments&) {
  const auto* iterable = dynamic_cast<const Iterable*>(input.object());
  if (iterable != nullptr && !iterable->has_length()) throw TemplateError("'generator' object is not reversible");
  const Items items = items_of(runtime.budget(), input);
  return items.empty() ? Value::undefined("No last item, sequence was empty.") : items.back();
}

Value reverse(Runtime& runtime, const Value& input, const Arguments&) {
  Items items = items_of(runtime.budget(), input);
  std::reverse(items.begin(), items.end());
  if (!input.is_text()) return runtime.generator(std::move(items));
  std::string text;
  for (const Value& character : items) text += character.text();
  return runtime.text(std::move(text));
}

Value items(Runtime& runtime, const Value& input, const Arguments&) {
  if (input.is_undefined()) return runtime.generator({});
  if (!input.is_dict()) throw TemplateError(fmt::format("items: expected a dict; got '{}'", input.type_name()));
  Items pairs;
  for (const auto& [key, value] : input.dict().items()) pairs.push_back(Value::tuple({key, value}));
  return runtime.generator(std::move(pairs));
}

Value batch(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("batch", arguments, {"linecount", "fill_with"});
  const int64_t count = p.integer(0);
  if (count < 1 || count > 1'000'000)
    throw TemplateError(fmt::format("batch: expected 1 to 1000000 items; got {}", count));
  Items batches, current;
  for (const Value& item : items_of(runtime.budget(), input)) {
    if (std::ssize(current) == count) batches.push_back(runtime.list(std::exchange(current, {})));
    current.push_back(item);
  }
  if (!current.empty()) {
    while (!p.is_none(1) && std::ssize(current) < count) current.push_back(p.at(1));
    batches.push_back(runtime.list(std::move(current)));
  }
  return runtime.generator(std::move(batches));
}

Value groupby(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("groupby", arguments, {"attribute", "default", "case_sensitive"});
  const Value attribute = p.at(0), otherwise = p.get(1, None{});
  const auto key = [&](const Value& item) {
    const Value found = by_path(runtime, item, attribute, p.is_none(1) ? nullptr : &otherwise);
    return p.truth_or(2, false) ? found : without_case(found);
  };
  Items groups, current;
  const auto flush = [&] {
    if (current.empty()) return;
    const Value name = by_path(runtime, current.front(), attribute, p.is_none(1) ? nullptr : &otherwise);
    groups.push_back(Value::tuple({name, runtime.list(std::exchange(current, {}))}));
  };
  for (const Value& item : sorted(runtime, items_of(runtime.budget(), input), false, key)) {
    if (!current.empty() && !equal(runtime.budget(), key(current.back()), key(item))) flush();
    current.push_back(item);
  }
  flush();
  return runtime.list(std::move(groups));
}

Arguments after(const Arguments& arguments, size_t count) {
  return {{arguments.positional.begin() + static_cast<int64_t>(count), arguments.positional.end()}, arguments.named};
}

// A false value such as None has no items, in Jinja too.
Items items_if_true(Runtime& runtime, const Value& input) {
  return truth(input) ? items_of(runtime.budget(), input) : Items{};
}

// map(attribute="name", default=...) or map("filter", arguments...).
Value map(Runtime& runtime, const Value& input, const Arguments& arguments) {
  Items mapped;
  if (arguments.positional.empty()) {
    const Parameters p("map", arguments, {"attribute", "default"});
    const Value otherwise = p.get(1, None{});
    for (const Value& item : items_if_true(runtime, input))
      mapped.push_back(by_path(runtime, item, p.at(0), p.is_none(1) ? nullptr : &otherwise));
    return runtime.generator(std::move(mapped));
  }
  const std::string name = runtime.str(arguments.positional[0]);
  for (const Value& item : items_if_true(runtime, input))
    mapped.push_back(runtime.filter(name, item, after(arguments, 1)));
  return runtime.generator(std::move(mapped));
}

// The four filters select, reject, selectattr and rejectattr.
struct Choice {
  bool by_attribute;  // tests an attribute of each item, else the item itself
  bool keeps;         // keeps the items for which the test holds, else the others
};
Value choose(Runtime& runtime, const Value& input, const Arguments& arguments, Choice choice) {
  const size_t used = choice.by_attribute ? 1 : 0;
  if (arguments.positional.size() < used)
    throw TemplateError("selectattr: expected the name of an attribute; got none");
  const bool has_test = arguments.positional.size() > used;
  const std::string test = has_test ? runtime.str(arguments.positional[used]) : "";
  Items chosen;
  for (const Value& item : items_if_true(runtime, input)) {
    const Value value = choice.by_attribute ? by_path(runtime, item, arguments.positional[0]) : item;
    const bool holds = has_test ? runtime.test(test, value, after(arguments, used + 1)) : truth(value);
    if (holds == choice.keeps) chosen.push_back(item);
  }
  return runtime.generator(std::move(chosen));
}
Value select(Runtime& r, const Value& input, const Arguments& a) {
  return choose(r, input, a, {.by_attribute = false, .keeps = true});
}
Value reject(Runtime& r, const Value& input, const Arguments& a) {
  return choose(r, input, a, {.by_attribute = false, .keeps = false});
}
Value selectattr(Runtime& r, const Value& input, const Arguments& a) {
  return choose(r, input, a, {.by_attribute = true, .keeps = true});
}
Value rejectattr(Runtime& r, const Value& input, const Arguments& a) {
  return choose(r, input, a, {.by_attribute = true, .keeps = false});
}

}  // namespace

Filter find_list_filter(const std::string& name) {
  static const std::unordered_map<std::string_view, Filter> filters{{"sort", sort},
                                                                    {"dictsort", dictsort},
                                                                    {"unique", unique},
                                                                    {"min", min_of},
                                                                    {"max", max_of},
                                                                    {"sum", sum},
                                                                    {"list", list},
                                                                    {"join", join},
                                                                    {"first", first},
                                                                    {"last", last},
                                                                    {"reverse", reverse},
                                                                    {"items", items},
                                                                    {"batch", batch},
                                                                    {"groupby", groupby},
                                                                    {"map", map},
                                                                    {"select", select},
                                                                    {"reject", reject},
                                                                    {"selectattr", selectattr},
                                                                    {"rejectattr", rejectattr}};
  const auto it = filters.find(name);
  return it == filters.end() ? nullptr : it->second;
}

}  // namespace moebius::jinja
