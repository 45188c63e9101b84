#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "jinja/filters.h"
#include "jinja/parser.h"

namespace moebius::jinja {
namespace {

constexpr int kMaxNesting = 60;  // nested brackets
constexpr int kMaxChain = 250;   // operators, filters and subscripts on one value

ExprPtr make(Expr::Op op, int line, std::vector<ExprPtr> children, std::string name = "") {
  Expr expr{.op = op, .line = line};
  expr.name = std::move(name);
  for (const ExprPtr& child : children)
    if (child) expr.depth = std::max(expr.depth, child->depth + 1);
  if (expr.depth > kMaxChain)
    throw TemplateError(fmt::format("expected at most {} operators on a value; got more", kMaxChain));
  expr.children = std::move(children);
  return std::make_unique<const Expr>(std::move(expr));
}

template <class... Kids>
ExprPtr node(Expr::Op op, int line, Kids... child) {
  std::vector<ExprPtr> children;
  (children.push_back(std::move(child)), ...);
  return make(op, line, std::move(children));
}

ExprPtr constant(int line, Value value) {
  Expr expr{.op = Expr::Op::constant, .line = line};
  expr.value = std::move(value);
  return std::make_unique<const Expr>(std::move(expr));
}

Value integer_of(const std::string& digits) {
  try {
    return int64_t{std::stoll(digits)};
  } catch (const std::out_of_range&) {
    throw TemplateError(fmt::format("expected integers of 64 bits; got {}", digits));
  }
}

Value real_of(const std::string& digits) {
  try {
    return std::stod(digits);
  } catch (const std::out_of_range&) {
    throw TemplateError(fmt::format("expected numbers that a float holds; got {}", digits));
  }
}

class Level {
 public:
  explicit Level(int& depth) : depth_(depth) {
    if (depth_ == kMaxNesting)
      throw TemplateError(fmt::format("expected at most {} nested brackets; got more", kMaxNesting));
    ++depth_;
  }
  ~Level() { --depth_; }
  Level(const Level&) = delete;

 private:
  int& depth_;
};

}  // namespace

bool ExprParser::at_tuple_end() const {
  const Token& current = tokens_.current();
  return current.kind == Token::Kind::print_end || current.kind == Token::Kind::block_end || tokens_.is_symbol(")");
}

ExprPtr ExprParser::tuple(bool with_conditional, bool explicit_parentheses) {
  const int line = tokens_.line();
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty()) tokens_.expect_symbol(",");
    if (at_tuple_end()) break;
    items.push_back(expression(with_conditional));
    if (!tokens_.is_symbol(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && items.size() == 1) return std::move(items.front());
  if (!is_tuple && !explicit_parentheses) tokens_.fail("an expression");
  return make(Expr::Op::tuple, line, std::move(items));
}

ExprPtr ExprParser::expression(bool with_conditional) {
  const Level level(depth_);
  return with_conditional ? conditional() : or_expression();
}

ExprPtr ExprParser::conditional() {
  int line = tokens_.line();
  ExprPtr value = or_expression();
  while (tokens_.skip_name("if")) {
    ExprPtr condition = or_expression(), otherwise;
    if (tokens_.skip_name("else")) {
      const Level level(depth_);
      otherwise = conditional();
    }
    value = node(Expr::Op::conditional, line, std::move(value), std::move(condition), std::move(otherwise));
    line = tokens_.line();
  }
  return value;
}

ExprPtr ExprParser::or_expression() {
  ExprPtr left = and_expression();
  while (tokens_.is_name("or")) {
    const int line = tokens_.next().line;
    ExprPtr right = and_expression();
    left = node(Expr::Op::logical_or, line, std::move(left), std::move(right));
  }
  return left;
}

ExprPtr ExprParser::and_expression() {
  ExprPtr left = not_expression();
  while (tokens_.is_name("and")) {
    const int line = tokens_.next().line;
    ExprPtr right = not_expression();
    left = node(Expr::Op::logical_and, line, std::move(left), std::move(right));
  }
  return left;
}

ExprPtr ExprParser::not_expression() {
  if (!tokens_.is_name("not")) return comparison();
  const Level level(depth_);
  const int line = tokens_.next().line;
  ExprPtr operand = not_expression();
  return node(Expr::Op::logical_not, line, std::move(operand));
}

ExprPtr ExprParser::comparison() {
  const int line = tokens_.line();
  std::vector<ExprPtr> children;
  children.push_back(sum());
  std::vector<std::string> operators;
  for (;;) {
    constexpr std::array<std::string_view, 6> kSymbols{"==", "!=", "<", ">", "<=", ">="};
    const auto* symbol = std::find_if(kSymbols.begin(), kSymbols.end(), [&](auto s) { return tokens_.skip_symbol(s); });
    if (symbol != kSymbols.end()) {
      operators.emplace_back(*symbol);
    } else if (tokens_.skip_name("in")) {
      operators.emplace_back("in");
    } else if (tokens_.is_name("not") && tokens_.peek().kind == Token::Kind::name && tokens_.peek().text == "in") {
      tokens_.next();
      tokens_.next();
      operators.emplace_back("not in");
    } else {
      break;
    }
    children.push_back(sum());
  }
  if (operators.empty()) return std::move(children.front());
  Expr expr{.op = Expr::Op::compare, .line = line};
  for (const ExprPtr& child : children) expr.depth = std::max(expr.depth, child->depth + 1);
  expr.children = std::move(children);
  expr.operators = std::move(operators);
  return std::make_unique<const Expr>(std::move(expr));
}

ExprPtr ExprParser::sum() {
  ExprPtr left = concat();
  while (tokens_.is_symbol("+") || tokens_.is_symbol("-")) {
    const Token token = tokens_.next();
    ExprPtr right = concat();
    left = node(token.text == "+" ? Expr::Op::add : Expr::Op::subtract, token.line, std::move(left), std::move(right));
  }
  return left;
}

ExprPtr ExprParser::concat() {
  const int line = tokens_.line();
  std::vector<ExprPtr> children;
  children.push_back(product());
  while (tokens_.skip_symbol("~")) children.push_back(product());
  return children.size() == 1 ? std::move(children.front()) : make(Expr::Op::concat, line, std::move(children));
}

ExprPtr ExprParser::product() {
  ExprPtr left = power();
  for (;;) {
    constexpr std::array<std::pair<std::string_view, Expr::Op>, 4> kOperators{
        {{"*", Expr::Op::multiply}, {"/", Expr::Op::divide}, {"//", Expr::Op::floor_divide}, {"%", Expr::Op::modulo}}};
    const auto* found =
        std::find_if(kOperators.begin(), kOperators.end(), [&](const auto& o) { return tokens_.is_symbol(o.first); });
    if (found == kOperators.end()) return left;
    const int line = tokens_.next().line;
    ExprPtr right = power();
    left = node(found->second, line, std::move(left), std::move(right));
  }
}

ExprPtr ExprParser::power() {
  ExprPtr left = unary(/*with_filter=*/true);
  while (tokens_.is_symbol("**")) {
    const int line = tokens_.next().line;
    ExprPtr right = unary(/*with_filter=*/true);
    left = node(Expr::Op::power, line, std::move(left), std::move(right));
  }
  return left;
}

ExprPtr ExprParser::unary(bool with_filter) {
  const int line = tokens_.line();
  ExprPtr expr;
  if (tokens_.is_symbol("-") || tokens_.is_symbol("+")) {
    const Level level(depth_);
    const bool minus = tokens_.next().text == "-";
    ExprPtr operand = unary(/*with_filter=*/false);
    expr = node(minus ? Expr::Op::negative : Expr::Op::positive, line, std::move(operand));
  } else {
    expr = primary();
  }
  expr = postfix(std::move(expr));
  return with_filter ? filtered(std::move(expr)) : std::move(expr);
}

ExprPtr ExprParser::primary() {
  const Token token = tokens_.current();
  switch (token.kind) {
    case Token::Kind::name:
      tokens_.next();
      if (token.text == "true" || token.text == "True") return constant(token.line, true);
      if (token.text == "false" || token.text == "False") return constant(token.line, false);
      if (token.text == "none" || token.text == "None") return constant(token.line, None{});
      return make(Expr::Op::name, token.line, {}, token.text);
    case Token::Kind::text_literal: {
      std::string text;
      while (tokens_.current().kind == Token::Kind::text_literal) text += tokens_.next().text;
      return constant(token.line, std::move(text));
    }
    case Token::Kind::integer:
      return constant(token.line, integer_of(tokens_.next().text));
    case Token::Kind::real:
      return constant(token.line, real_of(tokens_.next().text));
    default:
      break;
  }
  if (tokens_.is_symbol("[")) return list();
  if (tokens_.is_symbol("{")) return dict();
  if (!tokens_.skip_symbol("(")) tokens_.fail("an expression");
  ExprPtr inner = tuple(/*with_conditional=*/true, /*explicit_parentheses=*/true);
  tokens_.expect_symbol(")");
  return inner;
}

ExprPtr ExprParser::list() {
  const int line = tokens_.next().line;
  std::vector<ExprPtr> items;
  while (!tokens_.is_symbol("]")) {
    if (!items.empty()) tokens_.expect_symbol(",");
    if (tokens_.is_symbol("]")) break;
    items.push_back(expression());
  }
  tokens_.expect_symbol("]");
  return make(Expr::Op::list, line, std::move(items));
}

ExprPtr ExprParser::dict() {
  const int line = tokens_.next().line;
  std::vector<ExprPtr> items;
  while (!tokens_.is_symbol("}")) {
    if (!items.empty()) tokens_.expect_symbol(",");
    if (tokens_.is_symbol("}")) break;
    items.push_back(expression());
    tokens_.expect_symbol(":");
    items.push_back(expression());
  }
  tokens_.expect_symbol("}");
  return make(Expr::Op::dict, line, std::move(items));
}

ExprPtr ExprParser::postfix(ExprPtr expr) {
  for (;;) {
    if (tokens_.is_symbol(".") || tokens_.is_symbol("["))
      expr = subscript(std::move(expr));
    else if (tokens_.is_symbol("("))
      expr = call(std::move(expr));
    else
      return expr;
  }
}

ExprPtr ExprParser::filtered(ExprPtr expr) {
  for (;;) {
    if (tokens_.is_symbol("|"))
      expr = filters(std::move(expr));
    else if (tokens_.is_name("is"))
      expr = test(std::move(expr));
    else if (tokens_.is_symbol("("))
      expr = call(std::move(expr));
    else
      return expr;
  }
}

ExprPtr ExprParser::subscript(ExprPtr expr) {
  const Token token = tokens_.next();
  if (token.text == ".") {
    const Token& name = tokens_.current();
    if (name.kind == Token::Kind::name) {
      std::vector<ExprPtr> children;
      children.push_back(std::move(expr));
      return make(Expr::Op::attribute, token.line, std::move(children), tokens_.next().text);
    }
    if (name.kind != Token::Kind::integer) tokens_.fail("a name or a number");
    ExprPtr index = constant(token.line, integer_of(tokens_.next().text));
    return node(Expr::Op::item, token.line, std::move(expr), std::move(index));
  }
  ExprPtr item = item_or_slice(std::move(expr), token.line);
  if (tokens_.is_symbol(",")) throw TemplateError("expected one subscript; got several, which is not supported");
  tokens_.expect_symbol("]");
  return item;
}

ExprPtr ExprParser::item_or_slice(ExprPtr of, int line) {
  ExprPtr start;
  if (!tokens_.is_symbol(":")) {
    start = expression();
    if (!tokens_.is_symbol(":")) return node(Expr::Op::item, line, std::move(of), std::move(start));
  }
  tokens_.expect_symbol(":");
  ExprPtr stop, step;
  if (!tokens_.is_symbol(":") && !tokens_.is_symbol("]")) stop = expression();
  if (tokens_.skip_symbol(":") && !tokens_.is_symbol("]")) step = expression();
  return node(Expr::Op::slice, line, std::move(of), std::move(start), std::move(stop), std::move(step));
}

void ExprParser::call_arguments(Expr* call) {
  tokens_.expect_symbol("(");
  for (bool first = true; !tokens_.is_symbol(")"); first = false) {
    if (!first) tokens_.expect_symbol(",");
    if (tokens_.is_symbol(")")) break;
    if (call->more_keywords) tokens_.fail("the end of the arguments, after **");
    if (tokens_.is_symbol("*") || tokens_.is_symbol("**")) {
      ExprPtr& more = tokens_.is_symbol("*") ? call->more_items : call->more_keywords;
      if (more) tokens_.fail("one argument with * at most");
      tokens_.next();
      more = expression();
    } else if (tokens_.current().kind == Token::Kind::name && tokens_.peek().kind == Token::Kind::symbol &&
               tokens_.peek().text == "=") {
      std::string name = tokens_.next().text;
      tokens_.next();
      call->keywords.push_back({std::move(name), expression()});
    } else {
      if (!call->keywords.empty() || call->more_items) tokens_.fail("an argument with a name");
      call->children.push_back(expression());
    }
  }
  tokens_.expect_symbol(")");
  for (const ExprPtr& child : call->children)
    if (child) call->depth = std::max(call->depth, child->depth + 1);
  for (const Keyword& keyword : call->keywords) call->depth = std::max(call->depth, keyword.value->depth + 1);
  for (const ExprPtr* more : {&call->more_items, &call->more_keywords})
    if (*more) call->depth = std::max(call->depth, (*more)->depth + 1);
  if (call->depth > kMaxChain)
    throw TemplateError(fmt::format("expected at most {} operators on a value; got more", kMaxChain));
}

ExprPtr ExprParser::call(ExprPtr callee) {
  Expr expr{.op = Expr::Op::call, .line = tokens_.line()};
  expr.children.push_back(std::move(callee));
  call_arguments(&expr);
  return std::make_unique<const Expr>(std::move(expr));
}

ExprPtr ExprParser::filters(ExprPtr input, bool begins_without_pipe) {
  while (begins_without_pipe || tokens_.skip_symbol("|")) {
    begins_without_pipe = false;
    Expr expr{.op = Expr::Op::filter, .line = tokens_.line()};
    expr.name = tokens_.expect_name();
    check_filter_name(expr.name);
    if (input) expr.depth = input->depth + 1;
    expr.children.push_back(std::move(input));
    if (tokens_.is_symbol("(")) call_arguments(&expr);
    if (expr.depth > kMaxChain)
      throw TemplateError(fmt::format("expected at most {} operators on a value; got more", kMaxChain));
    input = std::make_unique<const Expr>(std::move(expr));
  }
  return input;
}

ExprPtr ExprParser::test(ExprPtr expr) {
  tokens_.expect_name("is");
  const int line = tokens_.line();
  const bool is_negated = tokens_.skip_name("not");
  Expr test{.op = Expr::Op::test, .line = line};
  test.name = tokens_.expect_name();
  check_test_name(test.name);
  test.depth = expr->depth + 1;
  test.children.push_back(std::move(expr));
  const Token& current = tokens_.current();
  const bool is_literal = current.kind == Token::Kind::text_literal || current.kind == Token::Kind::integer ||
                          current.kind == Token::Kind::real || tokens_.is_symbol("[") || tokens_.is_symbol("{");
  const bool is_operator = tokens_.is_name("else") || tokens_.is_name("or") || tokens_.is_name("and");
  if (tokens_.is_symbol("(")) {
    call_arguments(&test);
  } else if (is_literal || (current.kind == Token::Kind::name && !is_operator)) {
    if (tokens_.is_name("is")) tokens_.fail("one test; a second one needs brackets");
    test.children.push_back(postfix(primary()));
  }
  if (test.depth > kMaxChain)
    throw TemplateError(fmt::format("expected at most {} operators on a value; got more", kMaxChain));
  ExprPtr result = std::make_unique<const Expr>(std::move(test));
  return is_negated ? node(Expr::Op::logical_not, line, std::move(result)) : std::move(result);
}

}  // namespace moebius::jinja
