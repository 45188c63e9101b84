#!/usr/bin/env python3
"""Refuses words that must not be in a source, each with its reason."""

import re
import sys

from sources import CPP, documents, is_test, read, report, root_from_arguments, sources

MACHINE_PATH = re.compile(r"/(home|root|work|Users)/[\w.-]+")
BAD_NAME = re.compile(r"(^|_)(utils?|helpers?|manager|fast|optimized|v2|new|misc|common)(_|$)")

# These hold for the library, which is all of src/ except cli, tests, and the files named here.
LIBRARY_RULES = [
    (re.compile(r"\bstd::(cout|cerr|clog)\b|\bf?printf\s*\(|\bfmt::print\b|\bputs\s*\(|\bperror\s*\("),
     "the library never prints; it logs through core/log.h", ("log.cc",)),
    (re.compile(r"(?<!void )(?<![\w.>:])(std::|::)?(exit|_exit|quick_exit|abort|terminate)\s*\("),
     "the library never ends the process; it throws", ()),
    (re.compile(r"\b(secure_)?(get|set|put|unset)env\s*\("), "the environment is read in cli only", ("fault_points.cc",)),
    (re.compile(r"\busing\s+namespace\b"), "no using namespace", ()),
]


def strip(line):
    """Returns the line without comment and string contents. These rules need no full lexer."""
    return re.sub(r'"(\\.|[^"\\])*"', '""', line).split("//")[0]


def check_paths(path, text):
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield f"{path}:{number}: a path of one machine: {MACHINE_PATH.search(line).group()}"


def check_text(path, text):
    for number, line in enumerate(text.splitlines(), 1):
        if not line.isascii():
            yield f"{path}:{number}: not ASCII: {next(c for c in line if not c.isascii())!r}"
        if line != line.rstrip():
            yield f"{path}:{number}: blanks at the end of the line"


def check_library(path, text):
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, reason, exceptions in LIBRARY_RULES:
            if path.name not in exceptions and pattern.search(strip(line)):
                yield f"{path}:{number}: {reason}"


def check_file(path, text):
    yield from check_text(path, text)
    yield from check_paths(path, text)
    if path.suffix in CPP and BAD_NAME.search(path.stem):
        yield f"{path}: a file is named after what it is for, not '{BAD_NAME.search(path.stem).group(2)}'"
    if path.suffix in CPP and path.parts[0] == "src" and path.parts[1] != "cli" and not is_test(path):
        yield from check_library(path, text)


def main():
    root = root_from_arguments()
    files = sources(root)
    complaints = [complaint for path in files for complaint in check_file(path, read(root, path))]
    complaints += [complaint for path in documents(root) for complaint in check_paths(path, read(root, path))]
    return report("words", complaints, f"{len(files)} files, {len(documents(root))} documents")


if __name__ == "__main__":
    sys.exit(main())
