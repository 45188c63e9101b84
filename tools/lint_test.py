#!/usr/bin/env python3
"""Tests that each lint passes a good tree, and fails on each bad sample with the words that explain why."""

import pathlib
import subprocess
import sys
import tempfile

TOOLS = pathlib.Path(__file__).resolve().parent

GOOD = {
    "src/core/shape.h": "// A shape.\n#pragma once\n\nnamespace moebius {\nint rank();\n"
                        "template <class T>\nstruct Kind {\n};\ntemplate <>\nstruct Kind<int> {\n};\n}\n",
    "src/core/shape.cc": '#include "core/shape.h"\n\n#include <vector>\n\nnamespace moebius {\nint rank() { return 1; }\n}\n',
    "src/ops/norm/norm.h": '// A norm.\n#pragma once\n\n#include "core/shape.h"\n',
    "src/ops/norm/norm_test.cc": '#include "ops/norm/norm.h"\n\n#include <gtest/gtest.h>\n\n#include <cstdio>\n',
    "README.md": "# Name\n\nA sentence of its own, e.g. `this. One`.\nA link to [a heading](docs/terms.md#some-terms-of-2).\n",
    "docs/terms.md": "# Terms\n\n## Some *terms*, of `2`\n\n| retired | use | checked | where |\n| --- | --- | --- | --- |\n"
                     "| oldword, older | newword | `\\bold(word\\|er)\\b` | docs |\n| odd | even | no | all |\n"
                     "| Thingy | Item | `\\bThingy\\b` | all |\n",
    "docs/a.md": "# A\n\nAn oldie, and `oldword` in code.\n\n    Two. Lines oldword.\n\n```\nTwo. Lines oldword.\n```\n",
    "src/core/sums.cc": "// sum[t] = x[t] + y[t]   (when y is given; x itself otherwise)\n// out[t] = sum[t] * scale\n"
                        "//   row   an item that fills its line up to the last column, so that what follows it is in a line of its own,\n"
                        "//         under its words\n",
    "src/core/older.cc": "// A sum.\n// Of `oldword` it is the code.\nint oldword = 1;  // what is added\nauto url = \"http://oldie\";\n",
    "src/cli/main.cc": '#include <cstdlib>\n\n#include "ops/norm/norm.h"\n\nint main() { std::exit(std::getenv("A") != nullptr); }\n',
}
HEADER = "#pragma once\n"
NAMESPACE = "namespace moebius {\n"
LONG = "\n" * 501
MEASURED = '{"title": "", "subtitle": "", "sources": {}, "layers": []}'
FULL = "all that fills a line, " * 5  # and leaves no room for a word of the next line
CONDITIONALS = "#ifdef __A__\n#endif\n" * 4

# lint, file, text, words of the complaint
BAD = [
    ("layers", "src/core/a.cc", '#include "ops/norm/norm.h"\n', "ops (layer 3) is above core (layer 0)"),
    ("layers", "src/io/a.cc", '#include "comm/b.h"\n', "comm (layer 2) is a sibling of io (layer 2)"),
    ("layers", "src/core/a.cc", '#include "shape.h"\n', "must be its full path from src/"),
    ("layers", "src/core/a.cc", '#include "core/none.h"\n', "is not a file below src/"),
    ("layers", "src/odd/a.cc", "", "is in no folder of the layers"),
    ("layers", "src/ops/norm/a.cc", '#include "ops/norm/norm_ref.h"\n', "only tests may include it"),
    ("layers", "src/engine/a.cc", '#include "ops/norm/cpu/norm.h"\n', "is private to src/ops"),
    ("layers", "tests/a.cc", '#include "ops/norm/cpu/norm.h"\n', "is private to src/ops"),
    ("layers", "src/model/a.cc", "#include <oneapi/dnnl/dnnl.hpp>\n", "is for ops, cli only"),
    ("layers", "src/core/a.cc", "#include <gtest/gtest.h>\n", "is for tests only"),
    ("layers", "src/core/a.cc", "#include <boost/any.hpp>\n", "is of no library that the project knows"),
    ("headers", "src/core/a.h", HEADER + "inline std::vector<int> f() { return {}; }\n", "src/core/a.h: does not compile alone"),
    ("headers", "src/core/a.cc", "int f() { return std::max(1, 2); }\n", "src/core/a.cc: must include <algorithm> for std::max"),
    ("headers", "src/core/a.h", "int f();\n", "must be #pragma once"),
    ("headers", "src/core/shape.cc", '#include <vector>\n#include "core/shape.h"\n', 'must include "core/shape.h" first; got vector'),
    ("size", "src/core/a.cc", LONG, "501 lines, at most 500"),
    ("size", "src/core/a.cc", "#ifdef MOEBIUS_CUDA\n#endif\n", "a feature is a file"),
    ("size", "src/core/a.cc", CONDITIONALS, "4 preprocessor conditionals in src, at most 3"),
    ("names", "src/core/shape.cc", NAMESPACE + "struct A {\n};\n", "moebius::A is defined in src/comm/b.h:3 too"),
    ("names", "src/core/a.cc", NAMESPACE + "struct alignas(64) A {\n};\n", "moebius::A is defined in"),
    ("names", "src/core/a.cc", NAMESPACE + "class [[nodiscard]] A final : public B,\n    public C {\n};\n", "moebius::A is defined in"),
    ("names", "src/core/a.cc", NAMESPACE + "template <class T, class U = B<T>> struct A {\n};\n", "moebius::A is defined in"),
    ("words", "src/core/a.cc", "// na\u00efve\n", "not ASCII"),
    ("words", "src/core/a.cc", "// /" + "home/me/data\n", "a path of one machine"),
    ("words", "docs/a.md", "see /" + "home/me/data\n", "docs/a.md:1: a path of one machine"),
    ("words", "src/core/a.cc", "int a; \n", "blanks at the end"),
    ("words", "src/core/a.cc", "void f() { std::cout << 1; }\n", "never prints"),
    ("words", "src/core/a.cc", 'void f() { printf("a"); }\n', "never prints"),
    ("words", "src/core/a.cc", "void f() { std::exit(1); }\n", "never ends the process"),
    ("words", "src/core/a.cc", 'auto a = std::getenv("A");\n', "read in cli only"),
    ("words", "src/core/a.cc", "using namespace std;\n", "no using namespace"),
    ("words", "src/core/string_utils.h", HEADER, "not 'utils'"),
    ("words", "src/cli/a.cc", "struct Thingy;\n", "src/cli/a.cc:1: 'Thingy' is retired (docs/terms.md); say: Item"),
    ("words", "tests/cli/a_test.cc", 'auto a = "a Thingy";\n', "'Thingy' is retired"),
    ("words", "tools/a.py", "# a thingy\n", "'thingy' is retired"),
    ("words", "src/core/a.cc", "// A row.\n//\n// An older one.\n", "a.cc:3: 'older' is retired (docs/terms.md); say: newword"),
    ("words", "src/io/a.cc", "int a;  // an oldword\n", "'oldword' is retired"),
    ("words", "src/io/a.cc", 'log("an oldword");\n', "a.cc:1: 'oldword' is retired"),
    ("words", "src/comm/gpu/a.h", "// Of rows.\n" + HEADER, "a comment begins with 'Of'"),
    ("words", "src/comm/gpu/a.h", "// Whether rows are there.\n" + HEADER, "a comment begins with 'Whether'"),
    ("words", "src/comm/gpu/a.h", "// Where rows begin.\n" + HEADER, "a comment begins with 'Where'"),
    ("words", "src/comm/gpu/a.h", "// When rows arrive.\n" + HEADER, "a comment begins with 'When'"),
    ("words", "src/comm/gpu/a.h", "// Whose rows these are.\n" + HEADER, "a comment begins with 'Whose'"),
    ("words", "src/comm/gpu/a.h", "// Why rows wait.\n" + HEADER, "a comment begins with 'Why'"),
    ("words", "src/core/a.cc", "int a;  // of\n  // What a row is.\n", "a.cc:2: a comment begins with 'What'"),
    ("docs", "README.md", "# Name\n" * 151, "151 lines, at most 150"),
    ("docs", "docs/a.md", "word " * 21 + "\n", "docs/a.md:1: 105 columns"),
    ("docs", "docs/a.md", "One sentence. Another one.\n", "two sentences on one line"),
    ("docs", "docs/a.md", "- Say `a.b`. (Then more.)\n", "two sentences on one line"),
    ("docs", "docs/a.md", "See [it](b.md).\n", "the link to b.md is broken: there is no such file"),
    ("docs", "docs/a.md", '<img src="b.svg">\n', "the link to b.svg is broken"),
    ("docs", "docs/a.md", "See [it](terms.md#none).\n", "the page has no such heading"),
    ("docs", "docs/a.md", "See [it](../src/core/shape.cc#L9).\n", "the file has fewer lines"),
    ("docs", "docs/a.md", "An older word.\n", "'older' is retired (docs/terms.md); say: newword"),
    ("docs", "docs/a.md", "| An | Oldword |\n", "'Oldword' is retired"),
    ("docs", "docs/measurements/moe_layers.json", MEASURED, "moe_layers.svg is not the picture of"),
    ("comments", "src/core/a.cc", f"// sum[t] = x[t] + y[t]   (when {FULL}\n// of y) out[t] = sum[t] * scale\n", "a.cc:2: a formula merged into prose"),
    ("comments", "src/core/a.cc", f"// {FULL} Of these too\n// many are left. best = score[t] + bias\n", "a.cc:2: a formula merged into prose"),
    ("comments", "src/core/a.cc", f"//   row   {FULL}\n//   results\n//         are summed\n", "a.cc:2: an item of a list continues"),
    ("comments", "src/core/a.cc", f"//         {FULL}\n// results are summed\n", "a.cc:2: an item of a list continues"),
    ("comments", "src/core/a.cc", f"int a;\n// {FULL}\n// begin.\n", "a.cc:3: a word left over: begin."),
    ("comments", "src/core/a.cc", f"// {FULL}\n// of all, in\n// the order of their ranks\n", "a.cc:2: a line broken in the middle of a sentence"),
]


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run(lint, files):
    """Returns (exit status, output) of the lint over the good tree with these files on top."""
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder), {**GOOD, **files})
        result = subprocess.run([sys.executable, TOOLS / f"{lint}.py", folder], capture_output=True, text=True, check=False)
        return result.returncode, result.stdout + result.stderr


def main():
    failures = []
    for lint in ("layers", "headers", "names", "size", "words", "comments", "docs"):
        status, output = run(lint, {})
        if status != 0:
            failures.append(f"{lint}: fails on the good tree:\n{output}")
    for lint, name, text, words in BAD:
        # A lint of siblings needs two of them.
        status, output = run(lint, {"src/comm/b.h": HEADER + NAMESPACE + "struct A {\n};\n}\n", "src/ops/norm/norm_ref.h": HEADER, name: text})
        if status != 1 or words not in output:
            failures.append(f"{lint}: must fail with '{words}' on {name}; got status {status}:\n{output}")
    status, output = run("size", {f"src/core/a{i}.cc": "" for i in range(40)})
    if status != 1 or "src/core: 44 files, at most 40" not in output:
        failures.append(f"size: must fail on a folder of 44 files; got status {status}:\n{output}")
    for failure in failures:
        print(f"lint_test: {failure}")
    print(f"lint_test: {len(BAD)} bad samples, {len(failures)} not caught")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
