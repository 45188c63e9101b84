// Values of templates, with the meaning that Python gives them: None, booleans, integers, floats,
// strings, lists, tuples, dicts, and objects such as macros and namespaces.
//
// Lists, tuples, dicts and strings never change, as in the sandbox of Jinja. So they are shared, and
// contain no cycles. They are nested at most kMaxDepth deep.
// Integers have 64 bits. A result outside them throws TemplateError, where Python would continue.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"
#include "jinja/budget.h"

namespace moebius::jinja {

class Value;
class Object;

struct Undefined {
  std::shared_ptr<const std::string> why;  // the text of the error when it is used
};
struct None {};

struct List {
  std::vector<Value> items;
  int depth = 1;
};
struct Tuple {
  std::shared_ptr<const List> list;
};
class Dict;

using Text = std::shared_ptr<const std::string>;  // UTF-8
// A text after the filter safe. Another text that is added to it with + is escaped for HTML.
struct SafeText {
  Text text;
};
using ListPtr = std::shared_ptr<const List>;
using DictPtr = std::shared_ptr<const Dict>;
using ObjectPtr = std::shared_ptr<Object>;

class Value {
 public:
  static constexpr int kMaxDepth = 200;

  Value() : v_(Undefined{}) {}
  Value(None none) : v_(none) {}                      // NOLINT: a value of each type is a Value
  Value(bool value) : v_(value) {}                    // NOLINT
  Value(int64_t value) : v_(value) {}                 // NOLINT
  Value(double value) : v_(value) {}                  // NOLINT
  Value(DictPtr dict) : v_(std::move(dict)) {}        // NOLINT
  Value(ObjectPtr object) : v_(std::move(object)) {}  // NOLINT
  Value(std::string text) : v_(std::make_shared<const std::string>(std::move(text))) {}  // NOLINT
  Value(const char* text) : Value(std::string(text)) {}                                  // NOLINT
  template <class T>
  Value(std::shared_ptr<T> object)  // NOLINT
      requires std::is_base_of_v<Object, T> : v_(ObjectPtr(std::move(object))) {}
  static Value undefined(std::string why);
  // Returns a list of these items. Throws TemplateError if it would be nested too deep.
  static Value list(std::vector<Value> items);
  static Value tuple(std::vector<Value> items);
  static Value safe_text(std::string text);

  template <class T>
  bool is() const {
    return std::holds_alternative<T>(v_);
  }
  bool is_text() const { return is<Text>() || is<SafeText>(); }
  bool is_safe_text() const { return is<SafeText>(); }
  bool is_list() const { return is<ListPtr>(); }
  bool is_tuple() const { return is<Tuple>(); }
  bool is_dict() const { return is<DictPtr>(); }
  bool is_undefined() const { return is<Undefined>(); }
  bool is_none() const { return is<None>(); }
  bool is_integer() const { return is<int64_t>() || is<bool>(); }  // as in Python, where True is 1
  bool is_number() const { return is_integer() || is<double>(); }

  const std::string& text() const { return is<Text>() ? *std::get<Text>(v_) : *std::get<SafeText>(v_).text; }
  const std::vector<Value>& items() const;  // elements of a list or tuple
  const Dict& dict() const { return *std::get<DictPtr>(v_); }
  Object* object() const { return is<ObjectPtr>() ? std::get<ObjectPtr>(v_).get() : nullptr; }
  const ObjectPtr& object_ptr() const { return std::get<ObjectPtr>(v_); }
  int64_t integer() const { return is<bool>() ? int64_t{std::get<bool>(v_)} : std::get<int64_t>(v_); }
  bool boolean() const { return std::get<bool>(v_); }
  double real() const { return is<double>() ? std::get<double>(v_) : static_cast<double>(integer()); }
  std::string why_undefined() const {
    const auto& why = std::get<Undefined>(v_).why;
    return why ? *why : "the value is undefined";
  }

  // Returns the name of the type in Python: "str", "dict", "NoneType".
  std::string_view type_name() const;
  int depth() const;
  bool is_same_object(const Value& other) const;  // the operator `is` of Python, as far as templates can see it

 private:
  std::variant<Undefined, None, bool, int64_t, double, Text, SafeText, ListPtr, Tuple, DictPtr, ObjectPtr> v_;
};

// Key and value pairs in the order of their insertion.
class Dict {
 public:
  using Item = std::pair<Value, Value>;
  // Replaces the value of a key that exists. Throws TemplateError for a key that Python cannot hash.
  void set(Value key, Value value);
  const Value* find(const Value& key) const;
  const Value* find(const std::string& key) const;
  const std::vector<Item>& items() const { return items_; }
  int depth() const { return depth_; }

 private:
  std::vector<Item> items_;
  std::unordered_map<std::string, size_t> index_;  // indices of the keys that are strings
  int depth_ = 1;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

class Runtime;

// A value with behaviour: a macro, a function, a namespace, a loop, an iterator.
class Object {
 public:
  virtual ~Object() = default;
  virtual std::string_view type_name() const = 0;
  virtual int depth() const { return 1; }
  virtual bool is_callable() const { return false; }
  virtual Value call(Runtime& runtime, const Arguments& arguments);
  // Finds an attribute; returns false when there is none.
  virtual bool attribute(Runtime&, const std::string&, Value*) { return false; }
};

// An iterable that is not a list: Python gives such objects to templates for range, for
// the views of dicts, and for filters such as map and select.
class Iterable : public Object {
 public:
  enum class Kind { range, view, generator };
  Iterable(Kind kind, std::vector<Value> items);
  std::string_view type_name() const override;
  int depth() const override { return depth_; }
  Kind kind() const { return kind_; }
  bool has_length() const { return kind_ != Kind::generator; }
  const std::vector<Value>& items() const { return items_; }
  // Returns the items from here on. A generator has none afterwards.
  std::vector<Value> take_all();
  // Returns false at the end of a generator.
  bool take_one(Value* value);

 private:
  Kind kind_;
  std::vector<Value> items_;
  size_t next_ = 0;
  int depth_;
};

bool truth(const Value& value);
bool equal(Budget& budget, const Value& a, const Value& b);
// Less than zero, zero or more, as a is less than, equal to or more than b. Throws TemplateError when Python cannot
// order them.
int compare(Budget& budget, const Value& a, const Value& b);
// Returns whether value is in container. Throws TemplateError when Python would raise a TypeError.
bool contains(Budget& budget, const Value& container, const Value& value);
// Returns the items of anything that can be iterated over: characters of a string, keys of a dict, none for
// what is undefined. Throws TemplateError for other values.
std::vector<Value> items_of(Budget& budget, const Value& value);
int64_t length_of(Budget& budget, const Value& value);  // throws TemplateError for a value without a length
std::vector<std::string> characters_of(std::string_view text);
int64_t count_characters(std::string_view text);

// Returns Python's str(value), and "" for an undefined value. Throws TemplateError for objects, since Python
// prints their address.
std::string to_text(Budget& budget, const Value& value);
std::string to_repr(Budget& budget, const Value& value);
std::string real_repr(double value);

}  // namespace moebius::jinja
