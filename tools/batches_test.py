#!/usr/bin/env python3
"""Tests which sources tools/batches.py puts together, and which it keeps apart."""

import pathlib
import sys
import tempfile

import batches

HEADER = '#pragma once\nnamespace moebius {\nint rows_of(int x);\nstruct Shared {};\n}\n'


def source(inner, outer="", includes=""):
    return f"{includes}\nnamespace moebius {{\nnamespace {{\n{inner}\n}}  // namespace\n{outer}\n}}\n"


# what is tested, two sources, whether they may be in one batch
CASES = [
    ("other names", source("int a() { return 1; }"), source("int b() { return 2; }"), True),
    ("one function", source("int a() { return 1; }"), source("int a() { return 2; }"), False),
    ("one constant", source("constexpr int kSize = 1;"), source("const char* const kSize[] = {}; "), False),
    ("one type", source("struct A {\n  int x;\n};"), source("enum class A { x };"), False),
    ("one template", source("template <class T, class U = V<T>>\nvoid a(T x) {}"), source("void a(int x) {}"), False),
    ("one alias", source("using A = int;"), source("struct A;"), False),
    ("a value of an enumeration", source("enum Kind { red, blue };"), source("int red = 1;"), False),
    ("one macro", "#define A 1\n", "int b() { return A; }\n", False),
    ("one test", source("TEST(A, B) {}"), source("TEST(A, B) {}"), False),
    ("two tests", source("TEST(A, B) {}"), source("TEST(A, C) {}"), True),
    ("a use", source("int a(int x) { return x; }"), source("", "int c() { return a(1L); }"), False),
    ("a member of that name", source("int a() { return 1; }"), source("", "int c(S& s) { return s.a() + s->a() + S::a(); }"), True),
    ("a name in a comment", source("int a() { return 1; }"), source('const char* b() { return "a"; }  // a'), True),
    ("local names", source("int b() { int a = 1; return a; }"), source("int c() { int a = 2; return a; }"), True),
    ("a name of a header", source("int rows_of(int x) { return x; }"), source("int b();", includes='#include "a.h"'), False),
    ("after a body", source("struct A {\n};\nint b() { return 1; }"), source("int b() { return 2; }"), False),
    ("after a namespace", source("int a();", "namespace n {\nint b();\n}") + source("int d();"), source("int d();"), False),
    ("the kernel's header", "#include <linux/tcp.h>\n", "#include <netinet/tcp.h>\n", False),
    ("other headers", "#include <linux/tcp.h>\n", "#include <netinet/in.h>\n", True),
]


def may_share(folder, first, second):
    (folder / "a.h").write_text(HEADER)
    files = [folder / "first.cc", folder / "second.cc"]
    for file, text in zip(files, (first, second)):
        file.write_text(text)
    return not batches.Sources((folder,)).conflicts(files)[files[0]]


def check(name, first, second, expected):
    with tempfile.TemporaryDirectory() as folder:
        got = [may_share(pathlib.Path(folder), *pair) for pair in ((first, second), (second, first))]
    if got != [expected, expected]:
        print(f"{name}: expected that they {'may' if expected else 'must not'} share a batch; got {got}")
    return got == [expected, expected]


def check_distribution():
    """Files of a folder stay together, and each file is in one batch."""
    files = [pathlib.Path(folder) / f"{name}.cc" for folder in "ab" for name in range(4)]
    apart = {file: {files[1]} if file == files[0] else {files[0]} if file == files[1] else set() for file in files}
    found = [[str(file) for file in batch] for batch in batches.distribute(files, apart, 3, 4)]
    expected = [["a/0.cc", "a/2.cc", "a/3.cc"], ["a/1.cc", "b/0.cc", "b/1.cc"], ["b/2.cc", "b/3.cc"], []]
    if found != expected:
        print(f"distribution: expected {expected}; got {found}")
    return found == expected


def main():
    results = [*(check(*case) for case in CASES), check_distribution()]
    print(f"batches: {sum(results)} of {len(results)} cases right")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
