// The syntax tree of a template.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "jinja/value.h"

namespace moebius::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<const Expr>;

struct Keyword {
  std::string name;
  ExprPtr value;
};

struct Expr {
  enum class Op {
    constant,     // value
    name,         // name
    list,         // children
    tuple,        // children
    dict,         // children: key, value, key, value, ...
    attribute,    // children[0].name
    item,         // children[0][children[1]]
    slice,        // children[0][children[1]:children[2]:children[3]]; a child may be null
    call,         // children[0](children[1], ..., *more_items, keywords, **more_keywords)
    filter,       // children[0] | name(the same); in a filter block children[0] is null
    test,         // children[0] is name(the same)
    logical_not,  // children[0]
    logical_and,
    logical_or,
    conditional,  // children[0] if children[1] else children[2]; the last may be null
    negative,
    positive,
    add,
    subtract,
    multiply,
    divide,
    floor_divide,
    modulo,
    power,
    concat,   // children, as text
    compare,  // children[0] operators[0] children[1] operators[1] children[2] ...
  };
  Op op;
  int line;
  int depth = 1;  // height of the tree of this expression
  std::string name = {};
  Value value = {};
  std::vector<ExprPtr> children = {};
  std::vector<Keyword> keywords = {};
  ExprPtr more_items = {}, more_keywords = {};  // of a call, filter or test: those after * and **
  std::vector<std::string> operators = {};      // "==", "in", "not in", ...
};

// The left side of an assignment: a name, a field of a namespace, or several of these.
struct Target {
  std::string name, field;
  std::vector<Target> parts;  // not empty: the value is unpacked
};

struct Parameter {
  std::string name;
  ExprPtr otherwise;  // null: there is no default
};

struct Statement;
using Body = std::vector<Statement>;

struct Branch {
  ExprPtr condition;  // null: else
  Body body;
};

struct Statement {
  enum class Op {
    text,          // text
    print,         // expr
    condition,     // branches
    loop,          // target in expr, filter, body; otherwise when there was no item
    set,           // target = expr
    set_block,     // target = body, through the filters of expr
    with,          // targets = values, body
    macro,         // name, parameters, body
    call_block,    // expr is the call; parameters and body are those of its caller
    filter_block,  // body through the filters of expr
    generation,    // body
    break_loop,
    continue_loop,
  };
  Op op;
  int line;
  std::string text = {};
  ExprPtr expr = {}, filter = {};
  Target target = {};
  bool recursive = false;
  std::vector<Branch> branches = {};
  Body body = {}, otherwise = {};
  std::vector<Target> targets = {};
  std::vector<ExprPtr> values = {};
  std::vector<Parameter> parameters = {};
  bool uses_varargs = false, uses_kwargs = false, uses_caller = false;  // a macro
};

}  // namespace moebius::jinja
