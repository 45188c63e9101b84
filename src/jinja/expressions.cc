// Runtime::eval: the value of an expression.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "jinja/filters.h"
#include "jinja/runtime.h"

namespace moebius::jinja {
namespace {

std::string html_escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&#34;";
    else if (c == '\'')
      out += "&#39;";
    else
      out += c;
  }
  return out;
}

bool reads_safe_text(std::string_view name) {
  return name == "safe" || name == "string" || name == "length" || name == "count" || name == "tojson";
}

[[noreturn]] void fail_undefined(const Value& value) { throw TemplateError(value.why_undefined()); }

std::string object_name(const Value& object) {
  return object.is_none() ? "None" : fmt::format("{} object", object.type_name());
}

Value no_attribute(const Value& object, const std::string& name) {
  return Value::undefined(fmt::format("'{}' has no attribute '{}'", object_name(object), name));
}

// Returns the position of a Python index in a sequence of this size; -1 outside of it.
int64_t position(int64_t index, int64_t size) {
  if (index < 0) index += size;
  return index >= 0 && index < size ? index : -1;
}

// Returns the items that list[start:stop:step] has, by their positions.
std::vector<int64_t> sliced(int64_t size, const Value& start, const Value& stop, const Value& step) {
  for (const Value* part : {&start, &stop, &step})
    if (!part->is_none() && !part->is_integer()) throw TemplateError("slice indices must be integers or None");
  const int64_t stride = step.is_none() ? 1 : step.integer();
  if (stride == 0) throw TemplateError("slice step cannot be zero");
  const auto bound = [&](const Value& part, int64_t otherwise) {
    if (part.is_none()) return otherwise;
    int64_t at = part.integer();
    if (at < 0) at = std::max(at + size, stride < 0 ? int64_t{-1} : int64_t{0});
    return std::min(at, stride < 0 ? size - 1 : size);
  };
  const int64_t first = bound(start, stride < 0 ? size - 1 : 0), last = bound(stop, stride < 0 ? -1 : size);
  std::vector<int64_t> positions;
  for (int64_t at = first; stride > 0 ? at < last : at > last;) {
    positions.push_back(at);
    if (__builtin_add_overflow(at, stride, &at)) break;
  }
  return positions;
}

int64_t floor_div(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? quotient - 1 : quotient;
}

double floor_mod(double a, double b) {
  const double rest = std::fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

[[noreturn]] void fail_overflow() { throw TemplateError("expected a result of 64 bits; got a larger integer"); }

Value integer_power(int64_t base, int64_t exponent) {
  if (exponent < 0) return std::pow(static_cast<double>(base), static_cast<double>(exponent));
  int64_t result = 1;
  for (; exponent > 0 && base != 1 && base != 0; --exponent) {
    if (base == -1) return exponent % 2 == 0 ? result : -result;
    if (__builtin_mul_overflow(result, base, &result)) fail_overflow();
  }
  return exponent > 0 && base == 0 ? int64_t{0} : result;
}

Value of_integers(Expr::Op op, int64_t a, int64_t b) {
  int64_t result = 0;
  if (op == Expr::Op::add && __builtin_add_overflow(a, b, &result)) fail_overflow();
  if (op == Expr::Op::subtract && __builtin_sub_overflow(a, b, &result)) fail_overflow();
  if (op == Expr::Op::multiply && __builtin_mul_overflow(a, b, &result)) fail_overflow();
  if (op == Expr::Op::power) return integer_power(a, b);
  if (op == Expr::Op::divide || op == Expr::Op::floor_divide || op == Expr::Op::modulo) {
    if (b == 0) throw TemplateError("division by zero");
    if (op == Expr::Op::divide) return static_cast<double>(a) / static_cast<double>(b);
    if (b == -1) return op == Expr::Op::modulo ? Value(int64_t{0}) : of_integers(Expr::Op::subtract, 0, a);
    result = op == Expr::Op::floor_divide ? floor_div(a, b) : a - floor_div(a, b) * b;
  }
  return result;
}

Value of_reals(Expr::Op op, double a, double b) {
  if (op == Expr::Op::add) return a + b;
  if (op == Expr::Op::subtract) return a - b;
  if (op == Expr::Op::multiply) return a * b;
  if (op == Expr::Op::power) {
    if ((a < 0 && std::trunc(b) != b) || (a == 0 && b < 0)) throw TemplateError("expected a real power; got none");
    return std::pow(a, b);
  }
  if (b == 0) throw TemplateError("division by zero");
  if (op == Expr::Op::divide) return a / b;
  return op == Expr::Op::floor_divide ? std::floor((a - floor_mod(a, b)) / b + 0.5) : floor_mod(a, b);
}

std::string_view symbol_of(Expr::Op op) {
  switch (op) {
    case Expr::Op::add:
      return "+";
    case Expr::Op::subtract:
      return "-";
    case Expr::Op::multiply:
      return "*";
    case Expr::Op::divide:
      return "/";
    case Expr::Op::floor_divide:
      return "//";
    case Expr::Op::modulo:
      return "%";
    default:
      return "**";
  }
}

std::vector<Value> repeated(Budget& budget, const std::vector<Value>& items, int64_t count) {
  std::vector<Value> result;
  for (int64_t i = 0; i < count && !items.empty(); ++i) {
    budget.make(items.size() * sizeof(Value));
    budget.step(std::ssize(items));
    result.insert(result.end(), items.begin(), items.end());
  }
  return result;
}

// Adds the arguments of a call that come from a dict after **.
void add_keywords(const Value& from, Arguments* to) {
  if (!from.is_dict()) throw TemplateError(fmt::format("expected a dict after **; got '{}' object", from.type_name()));
  for (const auto& [key, value] : from.dict().items()) {
    if (!key.is_text()) throw TemplateError("expected texts as the keys of a dict after **");
    const std::string& name = key.text();
    for (const auto& [other, unused] : to->named)
      if (other == name) throw TemplateError(fmt::format("expected the argument {} once; got it again after **", name));
    to->named.emplace_back(name, value);
  }
}

}  // namespace

Value Runtime::lookup(const std::string& name) {
  if (const Value* found = scope_->find(name)) return *found;
  Value global = global_function(name);
  return global.is_undefined() ? Value::undefined(fmt::format("'{}' is undefined", name)) : global;
}

Value Runtime::eval(const Expr& expr) {
  budget_.step();
  const Nested nested(budget_);
  line_ = expr.line;
  return eval_node(expr);
}

Value Runtime::eval_node(const Expr& expr) {
  using Op = Expr::Op;
  switch (expr.op) {
    case Op::constant:
      return expr.value;
    case Op::name:
      return lookup(expr.name);
    case Op::list:
    case Op::tuple:
    case Op::dict:
    case Op::concat:
      return eval_items(expr);
    case Op::attribute:
      return attribute(eval(*expr.children[0]), expr.name);
    case Op::item: {
      const Value object = eval(*expr.children[0]);
      return item(object, eval(*expr.children[1]));
    }
    case Op::slice:
      return eval_slice(expr);
    case Op::call:
      return eval_call(expr);
    case Op::filter:
    case Op::test:
      return eval_call(expr);
    case Op::logical_not:
      return !truth(eval(*expr.children[0]));
    case Op::logical_and: {
      Value left = eval(*expr.children[0]);
      return truth(left) ? eval(*expr.children[1]) : left;
    }
    case Op::logical_or: {
      Value left = eval(*expr.children[0]);
      return truth(left) ? left : eval(*expr.children[1]);
    }
    case Op::conditional:
      if (truth(eval(*expr.children[1]))) return eval(*expr.children[0]);
      if (expr.children[2]) return eval(*expr.children[2]);
      return Value::undefined("the inline if-expression evaluated to false and no else section was defined");
    case Op::compare:
      return eval_compare(expr);
    default:
      return eval_number(expr);
  }
}

Value Runtime::eval_number(const Expr& expr) {
  Value left = eval(*expr.children[0]);
  if (expr.op != Expr::Op::negative && expr.op != Expr::Op::positive) {
    const Value right = eval(*expr.children[1]);
    line_ = expr.line;
    return binary(expr.op, left, right);
  }
  if (left.is_undefined()) fail_undefined(left);
  if (!left.is_number()) throw TemplateError(fmt::format("bad operand type for unary -: '{}'", left.type_name()));
  const bool minus = expr.op == Expr::Op::negative;
  if (left.is<double>()) return minus ? -left.real() : left.real();
  return of_integers(minus ? Expr::Op::subtract : Expr::Op::add, 0, left.integer());
}

Value Runtime::binary(Expr::Op op, const Value& a, const Value& b) {
  using Op = Expr::Op;
  if (a.is_integer() && b.is_integer()) return of_integers(op, a.integer(), b.integer());
  if (a.is_number() && b.is_number()) return of_reals(op, a.real(), b.real());
  if (op == Op::modulo && a.is_text()) return text(percent_format(*this, a.text(), b));
  for (const Value* operand : {&a, &b})
    if (operand->is_undefined()) fail_undefined(*operand);
  if (op == Op::add && a.is_text() && b.is_text()) return add_texts(a, b);
  if (op == Op::add && ((a.is_list() && b.is_list()) || (a.is_tuple() && b.is_tuple()))) {
    std::vector<Value> items = items_of(budget_, a);
    for (const Value& item : items_of(budget_, b)) items.push_back(item);
    return a.is_list() ? list(std::move(items)) : Value::tuple(std::move(items));
  }
  if (op == Op::multiply && (a.is_integer() || b.is_integer())) {
    const Value& other = a.is_integer() ? b : a;
    const int64_t count = a.is_integer() ? a.integer() : b.integer();
    if (other.is_text()) return repeat(budget_, other.text(), count);
    if (other.is_list()) return Value::list(repeated(budget_, other.items(), count));
    if (other.is_tuple()) return Value::tuple(repeated(budget_, other.items(), count));
  }
  throw TemplateError(
      fmt::format("unsupported operand types for {}: '{}' and '{}'", symbol_of(op), a.type_name(), b.type_name()));
}

// The class Markup of Jinja escapes the part that is not safe.
Value Runtime::add_texts(const Value& a, const Value& b) {
  if (!a.is_safe_text() && !b.is_safe_text()) return text(a.text() + b.text());
  const auto escaped = [&](const Value& part) {
    budget_.make(part.text().size() * 5);
    return part.is_safe_text() ? part.text() : html_escaped(part.text());
  };
  return Value::safe_text(escaped(a) + escaped(b));
}

Value Runtime::eval_items(const Expr& expr) {
  if (expr.op == Expr::Op::dict) {
    auto dict = std::make_shared<Dict>();
    for (size_t i = 0; i < expr.children.size(); i += 2) {
      Value key = eval(*expr.children[i]);
      dict->set(std::move(key), eval(*expr.children[i + 1]));
    }
    budget_.make(expr.children.size() * sizeof(Value));
    return DictPtr(dict);
  }
  std::vector<Value> items;
  for (const ExprPtr& child : expr.children) items.push_back(eval(*child));
  if (expr.op == Expr::Op::tuple) return Value::tuple(std::move(items));
  if (expr.op == Expr::Op::list) return list(std::move(items));
  std::string joined;
  for (const Value& item : items) joined += str(item);
  return text(std::move(joined));
}

Value Runtime::eval_compare(const Expr& expr) {
  Value left = eval(*expr.children[0]);
  for (size_t i = 0; i < expr.operators.size(); ++i) {
    Value right = eval(*expr.children[i + 1]);
    line_ = expr.line;
    const std::string& op = expr.operators[i];
    bool holds = false;
    if (op == "==" || op == "!=")
      holds = equal(budget_, left, right) == (op == "==");
    else if (op == "in" || op == "not in")
      holds = contains(budget_, right, left) == (op == "in");
    else if (left.is_number() && right.is_number() && (std::isnan(left.real()) || std::isnan(right.real())))
      holds = false;
    else
      holds = op == "<"    ? compare(budget_, left, right) < 0
              : op == ">"  ? compare(budget_, left, right) > 0
              : op == "<=" ? compare(budget_, left, right) <= 0
                           : compare(budget_, left, right) >= 0;
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

Value Runtime::eval_slice(const Expr& expr) {
  const Value object = eval(*expr.children[0]);
  std::vector<Value> parts;
  for (size_t i = 1; i < 4; ++i) parts.push_back(expr.children[i] ? eval(*expr.children[i]) : Value(None{}));
  line_ = expr.line;
  if (object.is_undefined()) fail_undefined(object);
  const auto* iterable = dynamic_cast<const Iterable*>(object.object());
  const bool is_range = iterable != nullptr && iterable->kind() == Iterable::Kind::range;
  if (!object.is_text() && !object.is_list() && !object.is_tuple() && !is_range)
    throw TemplateError(fmt::format("'{}' has no slices", object_name(object)));
  const std::vector<Value> items = is_range ? iterable->items() : items_of(budget_, object);
  std::vector<Value> chosen;
  for (const int64_t at : sliced(std::ssize(items), parts[0], parts[1], parts[2])) chosen.push_back(items[at]);
  if (object.is_tuple()) return Value::tuple(std::move(chosen));
  if (is_range) return std::make_shared<Iterable>(Iterable::Kind::range, std::move(chosen));
  if (object.is_list()) return list(std::move(chosen));
  std::string joined;
  for (const Value& character : chosen) joined += character.text();
  return text(std::move(joined));
}

Value Runtime::attribute(const Value& object, const std::string& name) {
  if (object.is_undefined()) fail_undefined(object);
  Value found;
  if (object.object() != nullptr && object.object()->attribute(*this, name, &found)) return found;
  if (method_of(object, name, &found)) return found;
  if (object.is_dict())
    if (const Value* value = object.dict().find(name)) return *value;
  return no_attribute(object, name);
}

Value Runtime::item(const Value& object, const Value& key) {
  if (object.is_undefined()) fail_undefined(object);
  if (object.is_dict() && !key.is_list() && !key.is_dict()) {
    if (const Value* value = object.dict().find(key)) return *value;
  } else if (key.is_integer()) {
    const auto* iterable = dynamic_cast<const Iterable*>(object.object());
    const bool is_range = iterable != nullptr && iterable->kind() == Iterable::Kind::range;
    if (object.is_list() || object.is_tuple() || is_range) {
      const std::vector<Value>& items = is_range ? iterable->items() : object.items();
      const int64_t at = position(key.integer(), std::ssize(items));
      if (at >= 0) return items[at];
    } else if (object.is_text()) {
      budget_.step(std::ssize(object.text()) / 16);
      const std::vector<std::string> characters = characters_of(object.text());
      const int64_t at = position(key.integer(), std::ssize(characters));
      if (at >= 0) return characters[at];
    }
  }
  Value found;
  if (key.is_text()) {
    if (object.object() != nullptr && object.object()->attribute(*this, key.text(), &found)) return found;
    if (method_of(object, key.text(), &found)) return found;
    return no_attribute(object, key.text());
  }
  return Value::undefined(fmt::format("{} has no element {}", object_name(object), to_repr(budget_, key)));
}

Arguments Runtime::arguments_of(const Expr& expr, size_t first) {
  Arguments arguments;
  for (size_t i = first; i < expr.children.size(); ++i) arguments.positional.push_back(eval(*expr.children[i]));
  for (const Keyword& keyword : expr.keywords) arguments.named.emplace_back(keyword.name, eval(*keyword.value));
  if (expr.more_items)
    for (const Value& value : items_of(budget_, eval(*expr.more_items))) arguments.positional.push_back(value);
  if (expr.more_keywords) add_keywords(eval(*expr.more_keywords), &arguments);
  return arguments;
}

// Evaluates calls, filters and tests. `more`: arguments besides those in the call.
Value Runtime::eval_call(const Expr& expr, const Arguments* more) {
  const Value first = eval(*expr.children[0]);
  Arguments arguments = arguments_of(expr, 1);
  if (more != nullptr) arguments.named.insert(arguments.named.end(), more->named.begin(), more->named.end());
  line_ = expr.line;
  Value result;
  if (expr.op == Expr::Op::filter)
    result = filter(expr.name, first, arguments);
  else if (expr.op == Expr::Op::test)
    result = test(expr.name, first, arguments);
  else
    result = call(first, arguments);
  line_ = expr.line;
  return result;
}

Value Runtime::call(const Value& callee, const Arguments& arguments) {
  budget_.step();
  if (callee.is_undefined()) fail_undefined(callee);
  if (callee.object() == nullptr) throw TemplateError(fmt::format("'{}' object is not callable", callee.type_name()));
  const ObjectPtr keep = callee.object_ptr();
  return keep->call(*this, arguments);
}

Value Runtime::filter(const std::string& name, const Value& input, const Arguments& arguments) {
  const Filter found = find_filter(name);
  if (found == nullptr) throw TemplateError(fmt::format("expected a known filter; got \"{}\"", name));
  if (input.is_text()) budget_.read_text(input.text().size() * 16);
  if (input.is_safe_text() && !reads_safe_text(name))
    throw TemplateError(
        fmt::format("expected no filter {} after the filter safe; got it, which is not supported", name));
  return found(*this, input, arguments);
}

bool Runtime::test(const std::string& name, const Value& value, const Arguments& arguments) {
  const Test found = find_test(name);
  if (found == nullptr) check_test_name(name);
  if (value.is_text()) budget_.read_text(value.text().size());
  return found(*this, value, arguments);
}

}  // namespace moebius::jinja
