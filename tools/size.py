#!/usr/bin/env python3
"""Checks sizes: C++ files of at most 500 lines, other files of at most 800, folders of at most 40 files, and
hardly any preprocessor conditionals. Reports lines and lengths of functions.

Lengths of functions are an estimate from braces. A brace after a parameter list, at namespace or
class level, opens a function.
"""

import collections
import re
import statistics
import sys

from sources import CPP, is_test, read, report, root_from_arguments, sources

MAX_LINES = {True: 500, False: 800}  # of C++, of other files
MAX_FILES = 40  # of a folder of src or tests
CONDITIONALS_PER_1000 = 1
LONG_FUNCTION = 100
CONDITIONAL = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b")
FEATURE = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*\bMOEBIUS_")
SCOPE = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b[^()=]*\{")
HEAD = re.compile(r"([~\w:]+|operator\S+)\s*\(")


def strip(line):
    line = re.sub(r"'(\\.|[^'\\])'|\"(\\.|[^\"\\])*\"", "", line)
    return line.split("//")[0].strip()


def functions(text):
    """Yields (name, first line, lines) of each function."""
    found, depth, head, head_line, inside = [], 0, "", 0, None
    for number, line in enumerate(map(strip, text.splitlines()), 1):
        if inside is None:
            if not head:
                head_line = number
            head = f"{head} {line}".strip()
            named = HEAD.search(head.split("{")[0])
            if "{" in line and named and not SCOPE.search(head):
                inside = (named.group(1), head_line, depth)
            if "{" in line or line.endswith((";", "}", ":")) or line.startswith("#"):
                head = ""
        depth += line.count("{") - line.count("}")
        if inside and depth <= inside[2]:
            found.append((inside[0], inside[1], number - inside[1] + 1))
            inside = None
    return found


def check_lengths(texts):
    for path, text in texts.items():
        lines, most = len(text.splitlines()), MAX_LINES[path.suffix in CPP]
        if lines > most:
            yield f"{path}: {lines} lines, at most {most}: split it by what its parts are for"


def check_folders(texts):
    counts = collections.Counter(path.parent for path in texts if path.parts[0] in ("src", "tests"))
    for folder, count in sorted(counts.items()):
        if count > MAX_FILES:
            yield f"{folder}: {count} files, at most {MAX_FILES}: make subfolders"


def check_conditionals(texts):
    """Features are files. The remaining conditionals are for compilers and instruction sets."""
    places = []
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if FEATURE.match(line):
                yield f"{path}:{number}: a feature is a file chosen by the build, not a conditional: {line.strip()}"
            if CONDITIONAL.match(line):
                places.append(f"{path}:{number}")
    budget = max(3, sum(len(text.splitlines()) for text in texts.values()) * CONDITIONALS_PER_1000 // 1000)
    if len(places) > budget:
        yield f"{len(places)} preprocessor conditionals in src, at most {budget} wanted: {', '.join(places)}"


def percentile(values, fraction):
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


def print_lines(texts):
    sizes = {}
    for path, text in texts.items():
        size = sizes.setdefault("/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0], [0, 0])
        size[is_test(path)] += len(text.splitlines())
    for name, (code, test) in sorted(sizes.items()):
        print(f"size: {name:20} {code:6} lines, tests {test:6}")


def print_functions(texts):
    found = [(length, path, line, name) for path, text in texts.items() for name, line, length in functions(text)]
    if not found:
        return
    lengths = [item[0] for item in found]
    print(f"size: {len(found)} functions, lines median {statistics.median(lengths):.0f}, p90 {percentile(lengths, 0.9)}, "
          f"p99 {percentile(lengths, 0.99)}")
    for length, path, line, name in sorted(found, key=lambda item: -item[0]):
        if length > LONG_FUNCTION:
            print(f"size: {path}:{line}: {name} has {length} lines; is it one idea?")


def main():
    root = root_from_arguments()
    texts = {path: read(root, path) for path in sources(root)}
    cpp = {path: text for path, text in texts.items() if path.suffix in CPP}
    library = {path: text for path, text in cpp.items() if path.parts[0] == "src"}
    complaints = [*check_lengths(texts), *check_folders(texts), *check_conditionals(library)]
    print_lines(texts)
    print_functions(cpp)
    return report("size", complaints, f"{len(texts)} files, {sum(len(text.splitlines()) for text in texts.values())} lines")


if __name__ == "__main__":
    sys.exit(main())
