// The filters and tests of Jinja that templates can use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "jinja/runtime.h"

namespace moebius::jinja {

using Filter = Value (*)(Runtime&, const Value& input, const Arguments&);
using Test = bool (*)(Runtime&, const Value& value, const Arguments&);

// Throws TemplateError with the name, for a filter of Jinja that is not supported and for an unknown test. An unknown
// filter fails only when it runs, as in Jinja, so that a branch that does not run may contain it.
void check_filter_name(const std::string& name);
void check_test_name(const std::string& name);
Filter find_filter(const std::string& name);  // returns null for other names
Test find_test(const std::string& name);

// These return the filters of filters_text.cc, filters_lists.cc and json.cc.
Filter find_text_filter(const std::string& name);
Filter find_list_filter(const std::string& name);
Value tojson(Runtime&, const Value& input, const Arguments&);

// These do the same as the methods and filters of their names.
std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string title_case(std::string_view text);             // str.title() of Python
std::vector<std::string> lines_of(std::string_view text);  // str.splitlines() of Python
std::string capitalize(std::string_view text);
enum class StripSide { both, left, right };
// characters: those that are stripped; null: white space, as Python defines it.
std::string_view strip(std::string_view text, const std::string* characters, StripSide side = StripSide::both);
std::string replace_all(Budget& budget, std::string_view text, std::string_view from, std::string_view to,
                        int64_t count);
std::string repeat(Budget& budget, std::string_view text, int64_t count);
// Returns format % arguments, as Python formats a string.
std::string percent_format(Runtime& runtime, const std::string& format, const Value& arguments);

}  // namespace moebius::jinja
