#include "jinja/parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace moebius::jinja {
namespace {

constexpr int kMaxBlocks = 60;                 // nested block tags
constexpr size_t kMaxBytes = size_t{4} << 20;  // the size of a template

std::string shown(const Token& token) {
  switch (token.kind) {
    case Token::Kind::text:
      return "text";
    case Token::Kind::print_begin:
      return "{{";
    case Token::Kind::print_end:
      return "}}";
    case Token::Kind::block_begin:
      return "{%";
    case Token::Kind::block_end:
      return "%}";
    case Token::Kind::end:
      return "the end of the template";
    case Token::Kind::text_literal:
      return "a string";
    default:
      return fmt::format("\"{}\"", token.text);
  }
}

bool mentions(const Expr* expr, std::string_view name);
bool mentions(const Body& body, std::string_view name);

bool mentions(const ExprPtr& expr, std::string_view name) { return mentions(expr.get(), name); }

bool mentions(const Expr* expr, std::string_view name) {
  if (expr == nullptr) return false;
  if (expr->op == Expr::Op::name && expr->name == name) return true;
  return std::any_of(expr->children.begin(), expr->children.end(),
                     [&](const ExprPtr& child) { return mentions(child, name); }) ||
         std::any_of(expr->keywords.begin(), expr->keywords.end(),
                     [&](const Keyword& keyword) { return mentions(keyword.value, name); });
}

bool mentions(const Statement& s, std::string_view name) {
  return mentions(s.expr, name) || mentions(s.filter, name) || mentions(s.body, name) || mentions(s.otherwise, name) ||
         std::any_of(s.values.begin(), s.values.end(), [&](const ExprPtr& e) { return mentions(e, name); }) ||
         std::any_of(s.branches.begin(), s.branches.end(),
                     [&](const Branch& b) { return mentions(b.condition, name) || mentions(b.body, name); });
}

bool mentions(const Body& body, std::string_view name) {
  return std::any_of(body.begin(), body.end(), [&](const Statement& s) { return mentions(s, name); });
}

class Parser {
 public:
  Parser(std::vector<Token> tokens, int* line) : tokens_(std::move(tokens), line), exprs_(tokens_) {}

  Body run() {
    Body body = statements({});
    if (tokens_.current().kind != Token::Kind::end) tokens_.fail("no end of a block that was not begun");
    return body;
  }

 private:
  using Ends = std::vector<std::string_view>;
  bool at_end_of(const Ends& ends) const {
    return tokens_.current().kind == Token::Kind::block_begin &&
           std::any_of(ends.begin(), ends.end(), [&](std::string_view end) {
             return tokens_.peek().kind == Token::Kind::name && tokens_.peek().text == end;
           });
  }

  // Statements up to a tag of one of these names, or to the end of the template if there are none.
  Body statements(const Ends& ends) {
    if (++blocks_ > kMaxBlocks)
      throw TemplateError(fmt::format("expected at most {} tags in each other; got more", kMaxBlocks));
    Body body;
    while (!at_end_of(ends)) {
      if (tokens_.current().kind == Token::Kind::end) {
        if (!ends.empty()) tokens_.fail(fmt::format("{{% {} %}}", fmt::join(ends, " %} or {% ")));
        break;
      }
      body.push_back(statement());
    }
    --blocks_;
    return body;
  }
  // Reads the body of a tag: %} statements {% END. Returns END, after which the tag may continue.
  std::string body_until(const Ends& ends, Body* body) {
    end_tag();
    *body = statements(ends);
    tokens_.next();
    return tokens_.expect_name();
  }
  void end_tag() { tokens_.expect(Token::Kind::block_end, "%}"); }

  Statement statement() {
    const Token token = tokens_.next();
    if (token.kind == Token::Kind::text) return {.op = Statement::Op::text, .line = token.line, .text = token.text};
    Statement s{.op = Statement::Op::print, .line = token.line};
    if (token.kind == Token::Kind::print_begin) {
      s.expr = exprs_.tuple();
      tokens_.expect(Token::Kind::print_end, "}}");
      return s;
    }
    const std::string tag = tokens_.expect_name();
    read_tag(tag, &s);
    end_tag();
    return s;
  }

  void read_tag(const std::string& tag, Statement* s) {
    if (tag == "if") return condition(s);
    if (tag == "for") return loop(s);
    if (tag == "set") return assignment(s);
    if (tag == "with") return with(s);
    if (tag == "macro") return macro(s);
    if (tag == "call") return call_block(s);
    if (tag == "filter") return filter_block(s);
    if (tag == "generation") return generation(s);
    if (tag == "break" || tag == "continue") return leave_loop(tag, s);
    constexpr std::array<std::string_view, 9> kRefused{"include", "import", "from",  "extends",   "block",
                                                       "do",      "trans",  "debug", "autoescape"};
    if (std::find(kRefused.begin(), kRefused.end(), tag) != kRefused.end())
      throw TemplateError(fmt::format("expected a tag of chat templates; got {{% {} %}}, which is not supported", tag));
    throw TemplateError(fmt::format("expected a known tag; got {{% {} %}}", tag));
  }

  void condition(Statement* s) {
    s->op = Statement::Op::condition;
    for (std::string tag = "if"; tag != "endif";) {
      Branch branch;
      if (tag != "else") branch.condition = exprs_.tuple(/*with_conditional=*/false);
      const Ends ends = tag == "else" ? Ends{"endif"} : Ends{"elif", "else", "endif"};
      tag = body_until(ends, &branch.body);
      s->branches.push_back(std::move(branch));
    }
  }

  void loop(Statement* s) {
    s->op = Statement::Op::loop;
    s->target = target(/*with_field=*/false);
    tokens_.expect_name("in");
    s->expr = exprs_.tuple(/*with_conditional=*/false);
    if (tokens_.skip_name("if")) s->filter = exprs_.expression();
    s->recursive = tokens_.skip_name("recursive");
    ++loops_;
    const std::string tag = body_until({"endfor", "else"}, &s->body);
    --loops_;
    if (tag == "else") body_until({"endfor"}, &s->otherwise);
  }

  void leave_loop(const std::string& tag, Statement* s) {
    if (loops_ == 0) throw TemplateError(fmt::format("expected {{% {} %}} in a loop; got it outside", tag));
    s->op = tag == "break" ? Statement::Op::break_loop : Statement::Op::continue_loop;
  }

  void assignment(Statement* s) {
    s->op = Statement::Op::set;
    s->target = target(/*with_field=*/true);
    if (tokens_.skip_symbol("=")) {
      s->expr = exprs_.tuple();
      return;
    }
    s->op = Statement::Op::set_block;
    s->expr = exprs_.filters(nullptr);
    body_until({"endset"}, &s->body);
  }

  void with(Statement* s) {
    s->op = Statement::Op::with;
    while (tokens_.current().kind != Token::Kind::block_end) {
      if (!s->targets.empty()) tokens_.expect_symbol(",");
      s->targets.push_back(target(/*with_field=*/false, /*one=*/true));
      tokens_.expect_symbol("=");
      s->values.push_back(exprs_.expression());
    }
    body_until({"endwith"}, &s->body);
  }

  void macro(Statement* s) {
    s->op = Statement::Op::macro;
    s->text = tokens_.expect_name();
    parameters(s);
    function_body(s, {"endmacro"});
  }

  void call_block(Statement* s) {
    s->op = Statement::Op::call_block;
    if (tokens_.is_symbol("(")) parameters(s);
    s->expr = exprs_.expression();
    if (s->expr->op != Expr::Op::call) tokens_.fail("a call");
    function_body(s, {"endcall"});
  }

  // A loop around a macro cannot be left from inside.
  void function_body(Statement* s, const Ends& ends) {
    const int loops = std::exchange(loops_, 0);
    body_until(ends, &s->body);
    loops_ = loops;
    s->uses_varargs = mentions(s->body, "varargs");
    s->uses_kwargs = mentions(s->body, "kwargs");
    s->uses_caller = mentions(s->body, "caller");
  }

  void parameters(Statement* s) {
    tokens_.expect_symbol("(");
    while (!tokens_.is_symbol(")")) {
      if (!s->parameters.empty()) tokens_.expect_symbol(",");
      Parameter parameter{tokens_.expect_name(), nullptr};
      if (tokens_.skip_symbol("="))
        parameter.otherwise = exprs_.expression();
      else if (!s->parameters.empty() && s->parameters.back().otherwise)
        tokens_.fail("a default, as the parameter before has one");
      s->parameters.push_back(std::move(parameter));
    }
    tokens_.expect_symbol(")");
  }

  void filter_block(Statement* s) {
    s->op = Statement::Op::filter_block;
    s->expr = exprs_.filters(nullptr, /*begins_without_pipe=*/true);
    body_until({"endfilter"}, &s->body);
  }

  void generation(Statement* s) {
    if (in_generation_) throw TemplateError("expected no {% generation %} in another; got one");
    s->op = Statement::Op::generation;
    in_generation_ = true;
    function_body(s, {"endgeneration"});
    in_generation_ = false;
  }

  Target target(bool with_field, bool one = false) {
    std::vector<Target> parts;
    bool is_tuple = false;
    for (;;) {
      parts.push_back(simple_target(with_field));
      if (one || !tokens_.skip_symbol(",")) break;
      is_tuple = true;
      if (tokens_.is_name("in") || tokens_.is_symbol("=") || tokens_.is_symbol(")")) break;
    }
    if (!is_tuple) return std::move(parts.front());
    Target several;
    several.parts = std::move(parts);
    return several;
  }

  Target simple_target(bool with_field) {
    if (tokens_.skip_symbol("(")) {
      Target inner = target(with_field);
      tokens_.expect_symbol(")");
      return inner;
    }
    Target simple;
    simple.name = tokens_.expect_name();
    constexpr std::array<std::string_view, 6> kConstants{"true", "false", "none", "True", "False", "None"};
    if (std::find(kConstants.begin(), kConstants.end(), simple.name) != kConstants.end())
      throw TemplateError(fmt::format("expected a name to assign to; got {}", simple.name));
    if (with_field && tokens_.skip_symbol(".")) simple.field = tokens_.expect_name();
    return simple;
  }

  TokenStream tokens_;
  ExprParser exprs_;
  int blocks_ = 0, loops_ = 0;
  bool in_generation_ = false;
};

}  // namespace

Token TokenStream::next() {
  *line_ = current().line;
  return at_ + 1 < tokens_.size() ? tokens_[at_++] : tokens_[at_];
}

bool TokenStream::is_symbol(std::string_view symbol) const {
  return current().kind == Token::Kind::symbol && current().text == symbol;
}

bool TokenStream::is_name(std::string_view name) const {
  return current().kind == Token::Kind::name && current().text == name;
}

bool TokenStream::skip_symbol(std::string_view symbol) {
  const bool found = is_symbol(symbol);
  if (found) next();
  return found;
}

bool TokenStream::skip_name(std::string_view name) {
  const bool found = is_name(name);
  if (found) next();
  return found;
}

std::string TokenStream::expect_name() {
  if (current().kind != Token::Kind::name) fail("a name");
  return next().text;
}

void TokenStream::expect_name(std::string_view name) {
  if (!skip_name(name)) fail(fmt::format("\"{}\"", name));
}

void TokenStream::expect_symbol(std::string_view symbol) {
  if (!skip_symbol(symbol)) fail(fmt::format("\"{}\"", symbol));
}

void TokenStream::expect(Token::Kind kind, std::string_view what) {
  if (current().kind != kind) fail(what);
  next();
}

void TokenStream::fail(std::string_view expected) const {
  *line_ = current().line;
  throw TemplateError(fmt::format("expected {}; got {}", expected, shown(current())));
}

Body parse_template(std::string_view source, int* line) {
  if (source.size() > kMaxBytes)
    throw TemplateError(
        fmt::format("expected a template of at most {} MiB; got {} bytes", kMaxBytes >> 20, source.size()));
  return Parser(tokens_of(source, line), line).run();
}

}  // namespace moebius::jinja
