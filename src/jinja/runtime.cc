#include "jinja/runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <optional>

#include "jinja/filters.h"

namespace moebius::jinja {
namespace {

// The variable `loop` of a for statement. Items that the loop's filter drops do not count. Later items are evaluated
// only when they are needed.
class Loop : public Object {
 public:
  using Pull = std::function<bool(Value*)>;
  Loop(Pull pull, int depth, int level) : pull_(std::move(pull)), depth_(depth), level_(level) {}

  std::string_view type_name() const override { return "LoopContext"; }
  int depth() const override { return depth_; }
  bool is_callable() const override { return true; }

  bool next(Value* item) {
    if (!read_ahead(1)) return false;
    previous_ = std::exchange(current_, ahead_.front());
    ahead_.pop_front();
    *item = current_;
    ++index0_;
    return true;
  }
  int level() const { return level_; }
  void set_recurse(std::function<Value(const Value&)> recurse) { recurse_ = std::move(recurse); }
  // Clears the references of the object, which may be invalid after the loop.
  void end() {
    pull_ = nullptr;
    recurse_ = nullptr;
  }

  Value call(Runtime&, const Arguments& arguments) override {
    if (!recurse_)
      throw TemplateError("expected a loop with \"recursive\" for loop(...); got one without, or one that has ended");
    if (arguments.positional.size() != 1 || !arguments.named.empty())
      throw TemplateError("loop: expected one argument");
    return recurse_(arguments.positional[0]);
  }

  bool attribute(Runtime&, const std::string& name, Value* value) override {
    if (name == "index0") return *value = index0_, true;
    if (name == "index") return *value = index0_ + 1, true;
    if (name == "first") return *value = index0_ == 0, true;
    if (name == "last") return *value = !read_ahead(1), true;
    if (name == "length") return *value = length(), true;
    if (name == "revindex") return *value = length() - index0_, true;
    if (name == "revindex0") return *value = length() - index0_ - 1, true;
    if (name == "depth") return *value = int64_t{level_} + 1, true;
    if (name == "depth0") return *value = int64_t{level_}, true;
    if (name == "previtem")
      return *value = index0_ == 0 ? Value::undefined("there is no previous item") : previous_, true;
    if (name == "nextitem")
      return *value = read_ahead(1) ? ahead_.front() : Value::undefined("there is no next item"), true;
    if (name == "cycle") return *value = cycle(), true;
    if (name == "changed") return *value = changed(), true;
    return false;
  }

 private:
  bool read_ahead(size_t count) {
    Value item;
    while (ahead_.size() < count && pull_ && pull_(&item)) ahead_.push_back(item);
    return ahead_.size() >= std::min(count, size_t{1}) && !ahead_.empty();
  }
  int64_t length() {
    read_ahead(SIZE_MAX);
    return index0_ + 1 + std::ssize(ahead_);
  }
  Value cycle() const {
    const int64_t index = index0_;
    return std::make_shared<Function>("loop.cycle", [index](Runtime&, const Arguments& a) {
      if (a.positional.empty()) throw TemplateError("loop.cycle: expected items; got none");
      return a.positional[static_cast<size_t>(index) % a.positional.size()];
    });
  }
  Value changed() {
    return std::make_shared<Function>("loop.changed", [last = last_](Runtime& runtime, const Arguments& a) -> Value {
      const Value now = Value::list(a.positional);
      if (last->has_value() && equal(runtime.budget(), **last, now)) return false;
      *last = now;
      return true;
    });
  }

  Pull pull_;
  int depth_, level_;
  std::deque<Value> ahead_;
  Value current_, previous_;
  int64_t index0_ = -1;
  std::function<Value(const Value&)> recurse_;
  std::shared_ptr<std::optional<Value>> last_ = std::make_shared<std::optional<Value>>();
};

class Macro : public Object {
 public:
  Macro(const Statement& s, std::string name, Scope* scope) : s_(s), name_(std::move(name)), scope_(scope) {}
  std::string_view type_name() const override { return "Macro"; }
  bool is_callable() const override { return true; }
  bool attribute(Runtime&, const std::string& name, Value* value) override {
    if (name != "name") return false;
    *value = name_;
    return true;
  }

  Value call(Runtime& runtime, const Arguments& arguments) override {
    return runtime.text(runtime.capture(s_.body, scope_, [&](Scope& scope) { bind(runtime, arguments, scope); }));
  }

 private:
  void bind(Runtime& runtime, const Arguments& arguments, Scope& scope) const {
    std::vector<bool> used(arguments.named.size());
    for (size_t i = 0; i < s_.parameters.size(); ++i) {
      const Parameter& parameter = s_.parameters[i];
      scope.set(parameter.name, argument(runtime, arguments, i, &used, scope));
    }
    bind_rest(arguments, used, scope);
  }
  Value argument(Runtime& runtime, const Arguments& arguments, size_t i, std::vector<bool>* used, Scope& scope) const {
    const Parameter& parameter = s_.parameters[i];
    if (i < arguments.positional.size()) return arguments.positional[i];
    for (size_t k = 0; k < arguments.named.size(); ++k) {
      if (arguments.named[k].first != parameter.name) continue;
      (*used)[k] = true;
      return arguments.named[k].second;
    }
    if (parameter.otherwise) return runtime.eval_in(*parameter.otherwise, scope);
    return Value::undefined(fmt::format("parameter '{}' was not provided", parameter.name));
  }
  void bind_rest(const Arguments& arguments, const std::vector<bool>& used, Scope& scope) const {
    const size_t known = s_.parameters.size();
    std::vector<Value> rest;
    for (size_t i = known; i < arguments.positional.size(); ++i) rest.push_back(arguments.positional[i]);
    if (!rest.empty() && !s_.uses_varargs)
      throw TemplateError(
          fmt::format("macro {}: expected at most {} arguments; got {}", name_, known, arguments.positional.size()));
    if (s_.uses_varargs) scope.set("varargs", Value::tuple(std::move(rest)));
    auto kwargs = std::make_shared<Dict>();
    for (size_t k = 0; k < used.size(); ++k) {
      const auto& [name, value] = arguments.named[k];
      if (used[k]) continue;
      if (name == "caller" && s_.uses_caller) {
        scope.set("caller", value);
        continue;
      }
      if (!s_.uses_kwargs)
        throw TemplateError(fmt::format("macro {}: expected no argument \"{}\"; got it", name_, name));
      kwargs->set(name, value);
    }
    if (s_.uses_caller && scope.variables.end() == std::find_if(scope.variables.begin(), scope.variables.end(),
                                                                [](const auto& v) { return v.first == "caller"; }))
      scope.set("caller", Value::undefined("No caller defined"));
    if (s_.uses_kwargs) scope.set("kwargs", DictPtr(kwargs));
  }

  const Statement& s_;
  std::string name_;
  Scope* scope_;
};

}  // namespace

const Value* Scope::find(const std::string& name) const {
  for (const Scope* scope = this; scope != nullptr; scope = scope->parent)
    for (const auto& [key, value] : scope->variables)
      if (key == name) return &value;
  return nullptr;
}

void Scope::set(const std::string& name, Value value) {
  for (auto& [key, old] : variables) {
    if (key != name) continue;
    old = std::move(value);
    return;
  }
  variables.emplace_back(name, std::move(value));
}

bool Namespace::attribute(Runtime&, const std::string& name, Value* value) {
  const Value* found = fields_.find(name);
  if (found != nullptr) *value = *found;
  return found != nullptr;
}

void Namespace::set(const std::string& name, Value value) {
  if (name.starts_with('_'))
    throw TemplateError(fmt::format("expected fields of a namespace without '_' before; got {}", name));
  fields_.set(name, std::move(value));
}

// A scope with its own variables for the duration of a block.
class Runtime::InScope {
 public:
  InScope(Runtime& runtime, Scope* parent)
      : runtime_(runtime), before_(runtime.scope_), scope_(std::make_unique<Scope>(Scope{.parent = parent})) {
    runtime_.scope_ = scope_.get();
  }
  explicit InScope(Runtime& runtime) : InScope(runtime, runtime.scope_) {}
  ~InScope() {
    runtime_.scope_ = before_;
    runtime_.keep_if_captured(std::move(scope_));
  }
  InScope(const InScope&) = delete;
  Scope& scope() { return *scope_; }

 private:
  Runtime& runtime_;
  Scope* before_;
  std::unique_ptr<Scope> scope_;
};

Runtime::~Runtime() {
  for (const auto& space : namespaces_) space->clear();
}

void Runtime::keep_if_captured(std::unique_ptr<Scope> scope) {
  if (!scope->is_captured) return;
  for (Scope* parent = scope->parent; parent != nullptr; parent = parent->parent) parent->is_captured = true;
  kept_.push_back(std::move(scope));
}

std::string Runtime::render(const Body& body, const Dict& variables) {
  for (const auto& [name, value] : variables.items()) root_.set(name.text(), value);
  run(body);
  return std::move(main_output_);
}

Value Runtime::text(std::string text) {
  budget_.make(text.size());
  return text;
}

Value Runtime::list(std::vector<Value> items) {
  budget_.make(items.size() * sizeof(Value));
  return Value::list(std::move(items));
}

Value Runtime::generator(std::vector<Value> items) {
  budget_.make(items.size() * sizeof(Value));
  return std::make_shared<Iterable>(Iterable::Kind::generator, std::move(items));
}

std::shared_ptr<Namespace> Runtime::make_namespace() {
  budget_.make(sizeof(Namespace));
  return namespaces_.emplace_back(std::make_shared<Namespace>());
}

void Runtime::write(const std::string& text) {
  budget_.make(text.size());
  *output_ += text;
}

std::string Runtime::capture(const Body& body, Scope* parent, const std::function<void(Scope&)>& fill) {
  const Nested nested(budget_);
  std::string captured;
  std::string* const before = std::exchange(output_, &captured);
  {
    InScope in(*this, parent);
    if (fill) fill(in.scope());
    run(body);
  }
  output_ = before;
  return captured;
}

Value Runtime::eval_in(const Expr& expr, Scope& scope) {
  Scope* const before = std::exchange(scope_, &scope);
  Value value = eval(expr);
  scope_ = before;
  return value;
}

Runtime::Flow Runtime::run(const Body& body) {
  for (const Statement& s : body) {
    const Flow flow = run(s);
    if (flow != Flow::normal) return flow;
  }
  return Flow::normal;
}

Runtime::Flow Runtime::run(const Statement& s) {
  budget_.step();
  const Nested nested(budget_);
  line_ = s.line;
  switch (s.op) {
    case Statement::Op::text:
      write(s.text);
      break;
    case Statement::Op::print:
      write(str(eval(*s.expr)));
      break;
    case Statement::Op::condition:
      return run_branches(s);
    case Statement::Op::loop:
      return run_loop(s, eval(*s.expr));
    case Statement::Op::set:
      assign(s.target, eval(*s.expr));
      break;
    case Statement::Op::set_block:
      run_set_block(s);
      break;
    case Statement::Op::with:
      return run_with(s);
    case Statement::Op::macro:
      scope_->set(s.text, macro_of(s, s.text));
      break;
    case Statement::Op::call_block:
      run_call_block(s);
      break;
    case Statement::Op::filter_block:
      write(str(through_filters(s.expr.get(), text(capture(s.body, scope_, {})))));
      break;
    case Statement::Op::generation:
      run_generation(s);
      break;
    case Statement::Op::break_loop:
      return Flow::break_loop;
    case Statement::Op::continue_loop:
      return Flow::continue_loop;
  }
  return Flow::normal;
}

Runtime::Flow Runtime::run_branches(const Statement& s) {
  for (const Branch& branch : s.branches) {
    if (branch.condition && !truth(eval(*branch.condition))) continue;
    return run(branch.body);
  }
  return Flow::normal;
}

Runtime::Flow Runtime::run_loop(const Statement& s, const Value& over) {
  const std::vector<Value> items = items_of(budget_, over);
  Scope* const outer = scope_;
  const Value* const around = s.recursive ? outer->find(" recursion") : nullptr;
  const int level = around != nullptr ? static_cast<int>(around->integer()) : 0;
  size_t next = 0;
  const auto pull = [&](Value* item) {
    while (next < items.size()) {
      *item = items[next++];
      if (!s.filter) return true;
      const InScope in(*this, outer);
      assign(s.target, *item);
      if (truth(eval(*s.filter))) return true;
    }
    return false;
  };
  const auto loop = std::make_shared<Loop>(pull, over.depth() + 1, level);
  if (s.recursive)
    loop->set_recurse([this, &s, outer, level](const Value& deeper) {
      InScope in(*this, outer);
      in.scope().set(" recursion", int64_t{level} + 1);
      return text(recurse(s, scope_, deeper));
    });
  Value item;
  bool is_any_whole = false;  // false: {% else %} runs too; as in Jinja, even if every iteration was cut short
  Flow flow = Flow::normal;
  while (flow != Flow::break_loop && loop->next(&item)) {
    budget_.step();
    InScope in(*this);
    in.scope().set("loop", loop);
    assign(s.target, item);
    flow = run(s.body);
    is_any_whole = is_any_whole || flow == Flow::normal;
  }
  loop->end();
  if (is_any_whole) return Flow::normal;
  InScope in(*this);
  return run(s.otherwise);
}

std::string Runtime::recurse(const Statement& loop, Scope* scope, const Value& items) {
  const Nested nested(budget_);
  std::string captured;
  std::string* const before = std::exchange(output_, &captured);
  Scope* const scope_before = std::exchange(scope_, scope);
  run_loop(loop, items);
  scope_ = scope_before;
  output_ = before;
  return captured;
}

// The values belong to the scope around the block.
Runtime::Flow Runtime::run_with(const Statement& s) {
  std::vector<Value> values;
  for (const ExprPtr& expr : s.values) values.push_back(eval(*expr));
  InScope in(*this);
  for (size_t i = 0; i < values.size(); ++i) assign(s.targets[i], values[i]);
  return run(s.body);
}

void Runtime::run_set_block(const Statement& s) {
  const Value captured = text(capture(s.body, scope_, {}));
  assign(s.target, through_filters(s.expr.get(), captured));
}

void Runtime::run_call_block(const Statement& s) {
  Arguments more;
  more.named.emplace_back("caller", macro_of(s, "caller"));
  write(str(eval_call(*s.expr, &more)));
}

void Runtime::run_generation(const Statement& s) {
  if (output_ != &main_output_) lost_generation_ = true;
  const size_t begin = output_->size();
  {
    InScope in(*this);
    run(s.body);
  }
  generated_.push_back({begin, output_->size()});
}

Value Runtime::macro_of(const Statement& s, std::string name) {
  scope_->is_captured = true;
  return std::make_shared<Macro>(s, std::move(name), scope_);
}

void Runtime::assign(const Target& target, const Value& value) {
  if (!target.parts.empty()) {
    const std::vector<Value> items = items_of(budget_, value);
    if (items.size() != target.parts.size())
      throw TemplateError(fmt::format("expected {} values to unpack; got {}", target.parts.size(), items.size()));
    for (size_t i = 0; i < items.size(); ++i) assign(target.parts[i], items[i]);
    return;
  }
  if (target.field.empty()) return scope_->set(target.name, value);
  auto* space = dynamic_cast<Namespace*>(lookup(target.name).object());
  if (space == nullptr)
    throw TemplateError(
        fmt::format("cannot assign attribute on non-namespace object: {}.{}", target.name, target.field));
  space->set(target.field, value);
}

Value Runtime::through_filters(const Expr* filters, Value text) {
  if (filters == nullptr) return text;
  const Value input =
      filters->children[0] ? through_filters(filters->children[0].get(), std::move(text)) : std::move(text);
  return filter(filters->name, input, arguments_of(*filters, 1));
}

}  // namespace moebius::jinja
