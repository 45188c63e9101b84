#!/usr/bin/env python3
"""Writes sources that include several sources each: batches, which compile in about half the time.

Files of one batch share a translation unit, and so their unnamed namespaces.
Two files are never in one batch if a name of the unnamed namespaces of one occurs in the other,
or is declared by a header that only the other includes.
Headers of the kernel define what headers of the C library of the same name do, so that they are apart too.
cmake/batches.cmake runs this before it compiles, with the paths of the batches and of a list of files.
"""

import pathlib
import re
import sys

NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)
SYSTEM = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(linux|net|netinet|sys)/(\w+)\.h>", re.M)
DEFINE = re.compile(r"^[ \t]*#[ \t]*(?:define|undef)[ \t]+(\w+)", re.M)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
NAMESPACE = re.compile(r"(?:inline )?namespace\b([\w: ]*)$")
# A name after one of these is a member of something that is named there.
UNQUALIFIED = re.compile(r"(?<![.\w:])(?<!->)[A-Za-z_]\w*")
TYPE = re.compile(r"\b(?:struct|class|union|enum(?: class| struct)?)\b(?:\s*\[\[.*?\]\]|\s+alignas\([^)]*\))*\s+(\w+)")
ALIAS = re.compile(r"\busing\s+(?:namespace\s+)?(?:\w*::)*(\w+)")
TEST = re.compile(r"\b(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)")


def names_of_head(head):
    """Returns the names that a declaration gives, of which `head` is the text before its body or value."""
    head = " ".join(head.split())
    if found := TEST.search(head):
        return {"_".join((*found.groups(), "Test"))}
    while found := re.match(r"template\s*<", head):  # the parameters of a template
        depth = 0
        for position in range(found.end() - 1, len(head)):
            depth += {"<": 1, ">": -1}.get(head[position], 0)
            if depth == 0:
                break
        head = head[position + 1:].lstrip()
    if found := ALIAS.match(head):
        return {found.group(1)}
    before = head.split("(")[0]
    names = {found.group(1)} if (found := TYPE.search(before)) else set()
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\[[^\]]*\]$", "", before))
    return names | set(words[-1:])


def declarations(code):
    """Yields (whether in an unnamed namespace, names) of each declaration at the level of namespaces."""
    spaces, depth, start, position = [], 0, 0, 0
    head = None  # of the declaration whose body or value is being read
    for found in re.finditer(r"[{};]|(?<![=!<>])=(?!=)", code):
        mark, position = found.group(), found.end()
        text = code[start:found.start()]
        if mark == "{":
            space = NAMESPACE.search(text.strip()) if depth == 0 and head is None else None
            if space:
                spaces.append(space.group(1).strip())
                start = position
                continue
            if depth == 0 and head is None:
                head = text
            depth += 1
        elif mark == "}":
            if depth == 0:
                if spaces:
                    spaces.pop()
                start, head = position, None
                continue
            depth -= 1
            if depth == 0 and not re.match(r"\s*[;,=\w{]", code[position:position + 40].split("\n")[0] or " "):
                yield "" in spaces, names_of_head(head)
                if found := re.match(r"\s*enum\s+\w", head):  # its values have the scope of the enumeration's own
                    yield "" in spaces, set(re.findall(r"[A-Za-z_]\w*", code[start:position]))
                start, head = position, None
        elif depth == 0:
            if head is None:
                head = text
            if mark == ";":
                if head.strip():
                    yield "" in spaces, names_of_head(head)
                start, head = position, None


class Sources:
    def __init__(self, roots):
        self.roots, self.files, self.closures = roots, {}, {}

    def parse(self, path):
        """Returns the headers of a file, its own unnamed names, its other names, and its words."""
        if path not in self.files:
            text = path.read_text(encoding="utf-8", errors="replace")
            headers = [file for name in INCLUDE.findall(text) for root in (*self.roots, path.parent) if (file := root / name).is_file()]
            system = {f"<{name}>" for _, name in SYSTEM.findall(text)}
            kernel = {f"<{name}>" for folder, name in SYSTEM.findall(text) if folder == "linux"}
            text = NO_CODE.sub('""', text)
            code = DIRECTIVE.sub("", text)
            own, others = set(DEFINE.findall(text)), set()
            for unnamed, names in declarations(code):
                (own if unnamed or any(re.search(r"\bstatic\b", name) for name in names) else others).update(names)
            self.files[path] = headers, own | kernel, others, set(UNQUALIFIED.findall(code)) | system
        return self.files[path]

    def closure(self, path):
        """Returns all headers of the project that a file includes, directly or not."""
        if path not in self.closures:
            found, todo = set(), [path]
            while todo:
                new = [header for header in self.parse(todo.pop())[0] if header not in found]
                found.update(new)
                todo += new
            self.closures[path] = found
        return self.closures[path]

    def conflicts(self, files):
        """Returns the files that each file cannot share a batch with."""
        declaring = {}  # the headers that declare a name
        for header in set().union(*map(self.closure, files)):
            for name in self.parse(header)[2]:
                declaring.setdefault(name, set()).add(header)
        users = {}  # the files that use a name
        for file in files:
            for word in self.parse(file)[3] | self.parse(file)[1]:
                users.setdefault(word, set()).add(file)
        found = {file: set() for file in files}
        for file in files:
            for name in self.parse(file)[1]:
                others = set(users.get(name, ()))
                headers = declaring.get(name, set()) - self.closure(file)
                others.update(other for other in files if headers and headers & self.closure(other))
                for other in others - {file}:
                    found[file].add(other)
                    found[other].add(file)
        return found


def distribute(files, conflicts, size, count):
    """Returns `count` lists of files, of `size` files where names allow it. Neighbours stay together where they can."""
    batches = [[] for _ in range(count)]
    for file in sorted(files):
        fitting = [batch for batch in batches if not conflicts[file].intersection(batch)]
        if not fitting:
            raise SystemExit(f"batches: {file} has a name in common with a file of each of {count} batches; rename what is in its "
                             "unnamed namespace")
        begun = [batch for batch in fitting if 0 < len(batch) < size]
        same = [batch for batch in begun if any(other.parent == file.parent for other in batch)]
        empty = [batch for batch in fitting if not batch]
        (same or begun[-1:] or empty or [min(fitting, key=len)])[0].append(file)
    return batches


def write(path, text):
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    size, listed, *outputs = sys.argv[1:]
    files = [pathlib.Path(line) for line in pathlib.Path(listed).read_text().splitlines()]
    known = Sources((root / "src", root))
    batches = distribute(files, known.conflicts(files), int(size), len(outputs))
    for output, batch in zip(map(pathlib.Path, outputs), batches):
        output.parent.mkdir(parents=True, exist_ok=True)
        write(output, "".join(f'#include "{file}"\n' for file in batch))


if __name__ == "__main__":
    sys.exit(main())
