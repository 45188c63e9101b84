// The state of one rendering of a template: its scopes, its output, and its remaining budget.
#pragma once

#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "jinja/syntax.h"

namespace moebius::jinja {

// The variables of a block. Names that it lacks are looked up in the parent.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<std::string, Value>> variables = {};
  bool is_captured = false;  // a macro was defined in this scope, and may be called after the block has ended

  const Value* find(const std::string& name) const;
  void set(const std::string& name, Value value);
};

// The mutable fields of namespace(...).
class Namespace : public Object {
 public:
  std::string_view type_name() const override { return "Namespace"; }
  bool attribute(Runtime& runtime, const std::string& name, Value* value) override;
  void set(const std::string& name, Value value);
  void clear() { fields_ = {}; }

 private:
  Dict fields_;
};

// A part of the output, in bytes: [begin, end).
struct OutputSpan {
  size_t begin = 0, end = 0;
};

class Runtime {
 public:
  Runtime(const Limits& limits, const std::tm& now) : budget_(limits), now_(now) {}
  ~Runtime();
  Runtime(const Runtime&) = delete;

  // Renders the body with these variables.
  std::string render(const Body& body, const Dict& variables);
  // The parts of the output in {% generation %}.
  const std::vector<OutputSpan>& generated() const { return generated_; }
  // Returns whether {% generation %} was used where its position in the output is unknown, such as in a macro.
  bool lost_generation() const { return lost_generation_; }
  int line() const { return line_; }

  Budget& budget() { return budget_; }
  const std::tm& now() const { return now_; }
  // These make a value and charge its bytes to the budget.
  Value text(std::string text);
  Value list(std::vector<Value> items);
  Value generator(std::vector<Value> items);  // a generator is truthy, and can be iterated over only once, as in Python
  std::string str(const Value& value) { return to_text(budget_, value); }
  Value call(const Value& callee, const Arguments& arguments);
  Value attribute(const Value& object, const std::string& name);
  Value item(const Value& object, const Value& key);
  Value binary(Expr::Op op, const Value& a, const Value& b);
  Value filter(const std::string& name, const Value& input, const Arguments& arguments);
  bool test(const std::string& name, const Value& value, const Arguments& arguments);
  std::shared_ptr<Namespace> make_namespace();

  // Runs a body in a new scope and returns its output.
  std::string capture(const Body& body, Scope* parent, const std::function<void(Scope&)>& fill);
  Value eval_in(const Expr& expr, Scope& scope);
  std::string recurse(const Statement& loop, Scope* scope, const Value& items);

 private:
  enum class Flow { normal, break_loop, continue_loop };
  class InScope;
  struct ForSource;

  Flow run(const Body& body);
  Flow run(const Statement& s);
  Flow run_branches(const Statement& s);
  Flow run_loop(const Statement& s, const Value& items);
  Flow run_with(const Statement& s);
  void run_set_block(const Statement& s);
  void run_call_block(const Statement& s);
  void run_generation(const Statement& s);
  Value macro_of(const Statement& s, std::string name);
  void assign(const Target& target, const Value& value);
  void write(const std::string& text);
  Value through_filters(const Expr* filters, Value text);

  Value eval(const Expr& expr);
  Value eval_node(const Expr& expr);
  Value eval_slice(const Expr& expr);
  Value eval_compare(const Expr& expr);
  Value eval_items(const Expr& expr);
  Value add_texts(const Value& a, const Value& b);
  Value eval_call(const Expr& expr, const Arguments* more = nullptr);
  Value eval_number(const Expr& expr);
  Value lookup(const std::string& name);
  Arguments arguments_of(const Expr& expr, size_t first);
  void keep_if_captured(std::unique_ptr<Scope> scope);

  Budget budget_;
  std::tm now_;
  int line_ = 1;
  Scope root_;
  Scope* scope_ = &root_;
  std::vector<std::unique_ptr<Scope>> kept_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;  // cleared at the end, since they may refer to each other
  std::string main_output_;
  std::string* output_ = &main_output_;
  std::vector<OutputSpan> generated_;
  bool lost_generation_ = false;
};

// Returns a global function of templates, or a method of strings and dicts; undefined for other names.
Value global_function(const std::string& name);
bool method_of(const Value& object, const std::string& name, Value* method);

// A function that is implemented in C++.
class Function : public Object {
 public:
  using Body = std::function<Value(Runtime&, const Arguments&)>;
  Function(std::string name, Body body, int depth = 1)
      : name_(std::move(name)), body_(std::move(body)), depth_(depth) {}
  std::string_view type_name() const override { return "function"; }
  bool is_callable() const override { return true; }
  int depth() const override { return depth_; }
  Value call(Runtime& runtime, const Arguments& arguments) override { return body_(runtime, arguments); }

 private:
  std::string name_;
  Body body_;
  int depth_;
};

// The arguments of a call to such a function, by the names of its parameters.
class Parameters {
 public:
  // Throws TemplateError for too many arguments, and for one with an unknown name.
  Parameters(std::string who, const Arguments& arguments, std::vector<std::string> names);
  bool has(size_t i) const { return values_[i] != nullptr; }
  const Value& at(size_t i) const;  // throws TemplateError if the argument is missing
  Value get(size_t i, Value otherwise) const { return has(i) ? *values_[i] : std::move(otherwise); }
  std::string text(size_t i) const;
  std::string text_or(size_t i, const char* otherwise) const { return has(i) ? text(i) : otherwise; }
  int64_t integer(size_t i) const;
  int64_t integer_or(size_t i, int64_t otherwise) const { return has(i) ? integer(i) : otherwise; }
  bool truth_or(size_t i, bool otherwise) const { return has(i) ? jinja::truth(*values_[i]) : otherwise; }
  bool is_none(size_t i) const { return !has(i) || values_[i]->is_none(); }

 private:
  std::string who_;
  std::vector<std::string> names_;
  std::vector<const Value*> values_;
};

}  // namespace moebius::jinja
