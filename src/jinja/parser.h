// Parses a template. Constructs that are not supported are refused by name.
#pragma once

#include <algorithm>
#include <string_view>

#include "jinja/lexer.h"
#include "jinja/syntax.h"

namespace moebius::jinja {

// Throws TemplateError for a syntax error and for what is not supported. Then *line is the line of the error.
Body parse_template(std::string_view source, int* line);

// A cursor over the tokens of a template.
class TokenStream {
 public:
  TokenStream(std::vector<Token> tokens, int* line) : tokens_(std::move(tokens)), line_(line) {}

  const Token& current() const { return tokens_[at_]; }
  const Token& peek(size_t count = 1) const { return tokens_[std::min(at_ + count, tokens_.size() - 1)]; }
  int line() const { return current().line; }
  Token next();
  bool is_symbol(std::string_view symbol) const;
  bool is_name(std::string_view name) const;
  bool skip_symbol(std::string_view symbol);  // if this symbol is next, skips it and returns true
  bool skip_name(std::string_view name);
  std::string expect_name();
  void expect_name(std::string_view name);
  void expect_symbol(std::string_view symbol);
  void expect(Token::Kind kind, std::string_view what);
  [[noreturn]] void fail(std::string_view expected) const;

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int* line_;
};

// Parses expressions with the precedence and grouping of Jinja's own parser.
class ExprParser {
 public:
  explicit ExprParser(TokenStream& tokens) : tokens_(tokens) {}

  // Parses one expression, or a tuple of several with commas between them.
  ExprPtr tuple(bool with_conditional = true, bool explicit_parentheses = false);
  ExprPtr expression(bool with_conditional = true);
  ExprPtr primary();
  ExprPtr postfix(ExprPtr expr);
  ExprPtr filters(ExprPtr input, bool begins_without_pipe = false);
  void call_arguments(Expr* call);

 private:
  ExprPtr conditional();
  ExprPtr or_expression();
  ExprPtr and_expression();
  ExprPtr not_expression();
  ExprPtr comparison();
  ExprPtr sum();
  ExprPtr concat();
  ExprPtr product();
  ExprPtr power();
  ExprPtr unary(bool with_filter);
  ExprPtr filtered(ExprPtr expr);
  ExprPtr subscript(ExprPtr expr);
  ExprPtr item_or_slice(ExprPtr of, int line);
  ExprPtr call(ExprPtr callee);
  ExprPtr test(ExprPtr expr);
  ExprPtr list();
  ExprPtr dict();
  bool at_tuple_end() const;

  TokenStream& tokens_;
  int depth_ = 0;
};

}  // namespace moebius::jinja
