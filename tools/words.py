#!/usr/bin/env python3
"""Words that a source may not have, each with its reason: names of machines, calls, and the retired words of docs/terms.md."""

import re
import sys

from sources import CPP, documents, is_test, read, report, root_from_arguments, sources
from terms import PAGE, checked_in

MACHINE_PATH = re.compile(r"/(home|root|work|Users)/[\w.-]+")
SPOKEN = ("src", "tests", "tools", "bench", "examples")  # folders that say nothing with a retired word
PROSE_CHECKED = ("src", "tests")  # and whose comments are read as prose
# Beginnings of comments without a subject. "Where X, Y happens" is a sentence, and so is one with "When".
TELEGRAM = re.compile(r"(Of|What|As|Who|Whose|Whether|Which|Why)\b|(Where|When)\b[^,]*$")
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


def comments(text):
    """(number, words, whether they are the first of their block) of each line with a C++ comment."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        code, slashes, words = re.sub(r'"(\\.|[^"\\])*"', '""', line).partition("//")
        if slashes:
            yield number, words.strip(), not inside and not code.strip()
        inside = bool(slashes) and not code.strip()


def quoted_texts(text):
    """(number, text) of each text in quotes on a line that is not a comment: messages, above all."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith(("//", "#include")):
            yield from ((number, quoted) for quoted in re.findall(r'"((?:\\.|[^"\\])*)"', line))


def check_retired(path, number, words, retired):
    for term in retired:
        found = term.pattern.search(words)
        if found:
            yield f"{path}:{number}: '{found.group()}' is retired ({PAGE}); say: {term.use}"


def check_words(path, text, everywhere):
    for number, line in enumerate(text.splitlines(), 1):
        yield from check_retired(path, number, line, everywhere)


def check_prose(path, text, in_prose):
    """Words that are wrong in prose, and beginnings without a subject. `Code` in prose is not looked at."""
    for number, words, is_first in comments(text):
        yield from check_retired(path, number, re.sub("`[^`]*`", "", words), in_prose)
        if is_first and TELEGRAM.match(words):
            yield f"{path}:{number}: a comment begins with '{words.split()[0]}'; write a sentence with a subject"
    for number, quoted in quoted_texts(text):
        yield from check_retired(path, number, re.sub("`[^`]*`", "", quoted), in_prose)


def check_terms(root, files):
    everywhere = checked_in(root, "all")
    in_prose = [term for term in checked_in(root, "docs") if term.where != "all"]
    for path in files:
        if path.parts[0] in SPOKEN:
            yield from check_words(path, read(root, path), everywhere)
        if path.suffix in CPP and any(path.is_relative_to(folder) for folder in PROSE_CHECKED):
            yield from check_prose(path, read(root, path), in_prose)


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
    complaints += check_terms(root, files)
    complaints += [complaint for path in documents(root) for complaint in check_paths(path, read(root, path))]
    return report("words", complaints, f"{len(files)} files, {len(documents(root))} documents")


if __name__ == "__main__":
    sys.exit(main())
