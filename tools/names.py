#!/usr/bin/env python3
"""Checks that a type of namespace moebius has one definition. Two definitions in different files are
undefined behaviour that no compiler sees.
The linker keeps one copy of std::vector<T> for both, and one of the two then writes past its
elements.
"""

import collections
import re
import sys

from sources import CPP, read, report, root_from_arguments, sources

# The format puts every namespace, and every type outside other types, in the first column.
OPEN = re.compile(r"(?:inline )?namespace\s*([\w:]*)\s*\{")
CLOSE = re.compile(r"\}\s*// namespace")
TEMPLATE = re.compile(r"template <.*>\s+(?=struct |class |union )")
TYPE = re.compile(r"(?:struct|class|union|enum class|enum)\s+(?:(?:alignas\([^)]*\)|\[\[[^\]]*\]\])\s*)*"
                  r"(\w+)\b(?!\s*(?:::|<))[^;({]*\{")
MOST_LINES = 8  # from the first word of a type to its brace


def types(text):
    """Yields (line number, full name) of the types that other files can see, without specializations."""
    namespaces = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if match := OPEN.match(line):
            namespaces.append(match[1])
        elif CLOSE.match(line) and namespaces:
            namespaces.pop()
        elif "" not in namespaces:
            start = TEMPLATE.sub("", line)
            if match := TYPE.match(" ".join([start, *lines[number + 1:number + MOST_LINES]])):
                yield number + 1, "::".join([*namespaces, match[1]])


def main():
    root = root_from_arguments()
    places = collections.defaultdict(list)
    files = [path for path in sources(root, CPP) if path.parts[0] != "tools"]
    for path in files:
        for number, name in types(read(root, path)):
            places[name].append(f"{path}:{number}")
    complaints = [f"{found[-1]}: {name} is defined in {found[0]} too; rename one, or put it into an unnamed namespace"
                  for name, found in sorted(places.items()) if len(found) > 1]
    return report("names", complaints, f"{len(places)} types")


if __name__ == "__main__":
    sys.exit(main())
