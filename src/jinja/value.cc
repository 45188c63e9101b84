#include "jinja/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "io/unicode.h"

namespace moebius::jinja {
namespace {

int depth_of(const std::vector<Value>& items) {
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.depth());
  if (depth >= Value::kMaxDepth)
    throw TemplateError(fmt::format("expected lists and dicts nested at most {} deep; got more", Value::kMaxDepth));
  return depth + 1;
}

bool same_items(Budget& budget, const std::vector<Value>& a, const std::vector<Value>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!equal(budget, a[i], b[i])) return false;
  return true;
}

bool same_dicts(Budget& budget, const Dict& a, const Dict& b) {
  if (a.items().size() != b.items().size()) return false;
  for (const auto& [key, value] : a.items()) {
    const Value* other = b.find(key);
    if (other == nullptr || !equal(budget, value, *other)) return false;
  }
  return true;
}

int compare_items(Budget& budget, const std::vector<Value>& a, const std::vector<Value>& b) {
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    if (!equal(budget, a[i], b[i])) return compare(budget, a[i], b[i]);
  return a.size() < b.size() ? -1 : a.size() > b.size();
}

// Compares integers and floats exactly, as Python does: 2^53 + 1 equals no float.
bool equal_numbers(const Value& a, const Value& b) {
  if (a.is_integer() && b.is_integer()) return a.integer() == b.integer();
  if (a.is<double>() && b.is<double>()) return a.real() == b.real();
  const double real = a.is<double>() ? a.real() : b.real();
  const int64_t integer = a.is<double>() ? b.integer() : a.integer();
  return std::abs(real) < 0x1p63 && std::trunc(real) == real && static_cast<int64_t>(real) == integer;
}

}  // namespace

Value Value::undefined(std::string why) {
  Value value;
  value.v_ = Undefined{std::make_shared<const std::string>(std::move(why))};
  return value;
}

Value Value::list(std::vector<Value> items) {
  Value value;
  const int depth = depth_of(items);
  value.v_ = std::make_shared<const List>(List{std::move(items), depth});
  return value;
}

Value Value::tuple(std::vector<Value> items) {
  Value value = list(std::move(items));
  value.v_ = Tuple{std::get<ListPtr>(value.v_)};
  return value;
}

const std::vector<Value>& Value::items() const {
  return is_tuple() ? std::get<Tuple>(v_).list->items : std::get<ListPtr>(v_)->items;
}

Value Value::safe_text(std::string text) {
  Value value;
  value.v_ = SafeText{std::make_shared<const std::string>(std::move(text))};
  return value;
}

std::string_view Value::type_name() const {
  if (is_undefined()) return "Undefined";
  if (is_none()) return "NoneType";
  if (is<bool>()) return "bool";
  if (is_integer()) return "int";
  if (is<double>()) return "float";
  if (is_text()) return "str";
  if (is_list()) return "list";
  if (is_tuple()) return "tuple";
  if (is_dict()) return "dict";
  return object()->type_name();
}

int Value::depth() const {
  if (is_list()) return std::get<ListPtr>(v_)->depth;
  if (is_tuple()) return std::get<Tuple>(v_).list->depth;
  if (is_dict()) return dict().depth();
  return is<ObjectPtr>() ? object()->depth() : 0;
}

bool Value::is_same_object(const Value& other) const {
  if (v_.index() != other.v_.index()) return false;
  if (is<ObjectPtr>()) return object() == other.object();
  if (is_list()) return std::get<ListPtr>(v_) == std::get<ListPtr>(other.v_);
  if (is_dict()) return std::get<DictPtr>(v_) == std::get<DictPtr>(other.v_);
  if (is_tuple()) return std::get<Tuple>(v_).list == std::get<Tuple>(other.v_).list;
  if (is_none()) return true;
  if (is<bool>()) return boolean() == other.boolean();
  if (is_text()) return text() == other.text();  // Python shares equal short strings
  if (is_integer()) return integer() == other.integer();
  return false;
}

void Dict::set(Value key, Value value) {
  if (key.is_list() || key.is_dict()) throw TemplateError(fmt::format("unhashable type: '{}'", key.type_name()));
  depth_ = std::max(depth_, depth_of({key, value}));
  if (const Value* found = find(key)) {
    const auto same = [&](const Item& item) { return &item.second == found; };
    std::find_if(items_.begin(), items_.end(), same)->second = std::move(value);
    return;
  }
  if (key.is_text()) index_.emplace(key.text(), items_.size());
  items_.emplace_back(std::move(key), std::move(value));
}

const Value* Dict::find(const std::string& key) const {
  const auto it = index_.find(key);
  return it == index_.end() ? nullptr : &items_[it->second].second;
}

const Value* Dict::find(const Value& key) const {
  if (key.is_text()) return find(key.text());
  if (index_.size() == items_.size()) return nullptr;
  Budget unlimited{Limits{}};
  for (const Item& item : items_)
    if (!item.first.is_text() && equal(unlimited, item.first, key)) return &item.second;
  return nullptr;
}

Value Object::call(Runtime&, const Arguments&) {
  throw TemplateError(fmt::format("'{}' object is not callable", type_name()));
}

Iterable::Iterable(Kind kind, std::vector<Value> items)
    : kind_(kind), items_(std::move(items)), depth_(depth_of(items_)) {}

std::string_view Iterable::type_name() const {
  return kind_ == Kind::range ? "range" : kind_ == Kind::view ? "dict_view" : "generator";
}

std::vector<Value> Iterable::take_all() {
  if (kind_ != Kind::generator) return items_;
  std::vector<Value> rest(items_.begin() + static_cast<int64_t>(next_), items_.end());
  next_ = items_.size();
  return rest;
}

bool Iterable::take_one(Value* value) {
  if (next_ == items_.size()) return false;
  *value = items_[kind_ == Kind::generator ? next_++ : 0];
  return true;
}

bool truth(const Value& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (value.is_integer()) return value.integer() != 0;
  if (value.is<double>()) return value.real() != 0;
  if (value.is_text()) return !value.text().empty();
  if (value.is_list() || value.is_tuple()) return !value.items().empty();
  if (value.is_dict()) return !value.dict().items().empty();
  const auto* iterable = dynamic_cast<const Iterable*>(value.object());
  return iterable == nullptr || !iterable->has_length() || !iterable->items().empty();
}

bool equal(Budget& budget, const Value& a, const Value& b) {
  budget.step();
  if (a.is_number() && b.is_number()) return equal_numbers(a, b);
  if (a.is_text() && b.is_text()) {
    budget.read_text(std::min(a.text().size(), b.text().size()));
    return a.text() == b.text();
  }
  if ((a.is_list() && b.is_list()) || (a.is_tuple() && b.is_tuple())) return same_items(budget, a.items(), b.items());
  if (a.is_dict() && b.is_dict()) return same_dicts(budget, a.dict(), b.dict());
  if (a.is_undefined() && b.is_undefined()) return true;
  return a.is_same_object(b);
}

int compare(Budget& budget, const Value& a, const Value& b) {
  budget.step();
  if (a.is_integer() && b.is_integer()) return a.integer() < b.integer() ? -1 : a.integer() > b.integer();
  if (a.is_number() && b.is_number()) return a.real() < b.real() ? -1 : a.real() > b.real();
  if (a.is_text() && b.is_text()) {
    budget.read_text(std::min(a.text().size(), b.text().size()));
    return a.text().compare(b.text());
  }
  if ((a.is_list() && b.is_list()) || (a.is_tuple() && b.is_tuple()))
    return compare_items(budget, a.items(), b.items());
  for (const Value* value : {&a, &b})
    if (value->is_undefined()) throw TemplateError(value->why_undefined());
  throw TemplateError(fmt::format("expected values with an order; got '{}' and '{}'", a.type_name(), b.type_name()));
}

bool contains(Budget& budget, const Value& container, const Value& value) {
  if (container.is_dict()) {
    budget.step();
    if (value.is_list() || value.is_dict())
      throw TemplateError(fmt::format("unhashable type: '{}'", value.type_name()));
    return container.dict().find(value) != nullptr;
  }
  if (container.is_text()) {
    if (value.is_undefined()) throw TemplateError(value.why_undefined());
    if (!value.is_text())
      throw TemplateError(fmt::format("expected a string left of \"in\"; got '{}'", value.type_name()));
    budget.read_text(container.text().size());
    return memmem(container.text().data(), container.text().size(), value.text().data(), value.text().size()) !=
           nullptr;
  }
  for (const Value& item : items_of(budget, container))
    if (equal(budget, item, value)) return true;
  return false;
}

std::vector<std::string> characters_of(std::string_view text) {
  std::vector<std::string> characters;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    next_char(text, &at);
    characters.emplace_back(text.substr(begin, at - begin));
  }
  return characters;
}

int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
}

std::vector<Value> items_of(Budget& budget, const Value& value) {
  if (value.is_list() || value.is_tuple()) {
    budget.step(std::ssize(value.items()));
    return value.items();
  }
  if (value.is_undefined()) return {};
  std::vector<Value> items;
  if (value.is_text()) {
    budget.step(std::ssize(value.text()));
    budget.make(value.text().size() * sizeof(Value));
    for (std::string& character : characters_of(value.text())) items.emplace_back(std::move(character));
    return items;
  }
  if (value.is_dict()) {
    budget.step(std::ssize(value.dict().items()));
    for (const auto& [key, item] : value.dict().items()) items.push_back(key);
    return items;
  }
  if (auto* iterable = dynamic_cast<Iterable*>(value.object())) {
    budget.step(std::ssize(iterable->items()));
    return iterable->take_all();
  }
  throw TemplateError(fmt::format("'{}' object is not iterable", value.type_name()));
}

int64_t length_of(Budget& budget, const Value& value) {
  if (value.is_list() || value.is_tuple()) return std::ssize(value.items());
  if (value.is_dict()) return std::ssize(value.dict().items());
  if (value.is_undefined()) return 0;
  if (value.is_text()) {
    budget.read_text(value.text().size());
    return count_characters(value.text());
  }
  const auto* iterable = dynamic_cast<const Iterable*>(value.object());
  if (iterable && iterable->has_length()) return std::ssize(iterable->items());
  throw TemplateError(fmt::format("object of type '{}' has no len()", value.type_name()));
}

}  // namespace moebius::jinja
