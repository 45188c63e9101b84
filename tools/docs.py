#!/usr/bin/env python3
"""Checks that people can read the documents: narrow lines, one sentence a line, links that exist, the
words of docs/terms.md.
"""

import re
import sys

import plot_measurements
from sources import read, report, root_from_arguments
from terms import checked_in

PAGES = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")
MAX_COLUMNS = 100
README_LINES = 150
GLOSSARY = "docs/terms.md"  # its table quotes words that other pages must not use

FENCE = re.compile(r"\s*(```|~~~)")
MARKER = re.compile(r"^\s*([-*+]|\d+\.|>)\s+")
CODE = re.compile(r"(`+)(.+?)\1")
TARGET = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")
ATTRIBUTE = re.compile(r"\b(?:src|srcset|href)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:")
SHORT_FORM = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|approx)\.", re.IGNORECASE)
SENTENCE_ENDS = re.compile(r"(?<=[^\s.])[.!?][\"')*\]]*\s+[\"'(*\[]*[A-Z0-9]")
SOURCE_LINES = re.compile(r"^L(\d+)(?:-L(\d+))?$")


def pages(root):
    found = [root / name for name in PAGES] + sorted((root / "docs").rglob("*.md"))
    return [path.relative_to(root) for path in found if path.is_file()]


def is_code_by_indent(line, before):
    return line.startswith("    ") and (not before.strip() or before.startswith("    ")) and not MARKER.match(line)


def prose(text):
    """Yields (line number, line) of all text that is neither code nor an HTML comment."""
    fenced = commented = False
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            commented = commented or line.lstrip().startswith("<!--")
            if not commented and not is_code_by_indent(line, before):
                yield number, line
            commented = commented and "-->" not in line
        before = line


def without_code(line):
    return CODE.sub("CODE", line)


def without_targets(line):
    return TARGET.sub(r"\1", line)


def is_set_by_machine(line):
    """Returns whether a line is a heading, a row of a table or HTML, which need no lines or sentences
    of their own.
    """
    return line.lstrip().startswith(("#", "|", "<"))


def is_links_alone(line):
    """Returns whether a line has nothing but links and separators."""
    left = TARGET.sub("", MARKER.sub("", line))
    return left != line and not re.search(r"\w", left)


def check_lines(path, text):
    for number, line in prose(text):
        if is_set_by_machine(line) or is_links_alone(line):
            continue
        columns = len(without_targets(line))
        if columns > MAX_COLUMNS:
            yield f"{path}:{number}: {columns} columns beside the targets of links, at most {MAX_COLUMNS}"
        said = SHORT_FORM.sub("CODE", without_targets(without_code(MARKER.sub("", line))))
        if SENTENCE_ENDS.search(said):
            yield f"{path}:{number}: two sentences on one line: {SENTENCE_ENDS.search(said).group()!r}; begin a new line"


def check_words(path, text, retired):
    if str(path) == GLOSSARY:
        return
    for number, line in prose(text):
        for term in retired:
            found = term.pattern.search(without_targets(without_code(line)))
            if found:
                yield f"{path}:{number}: '{found.group()}' is retired ({GLOSSARY}); say: {term.use}"


def slug(heading):
    """Returns the anchor that GitHub gives a heading."""
    words = TARGET.sub(lambda found: found.group(1).strip("![]"), heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")


def anchors(text):
    found = {}
    for _, line in prose(text):
        if re.match(r"#{1,6} ", line):
            name = slug(line.lstrip("#"))
            found[name] = found.get(name, -1) + 1
    return {name if again == 0 else f"{name}-{again}" for name, last in found.items() for again in range(last + 1)}


def targets(line):
    said = CODE.sub("", line)
    return [found[1] for found in TARGET.findall(said)] + ATTRIBUTE.findall(said)


def why_broken(root, path, target):
    """Returns what is wrong with a link of a page, or None if its target exists."""
    name, _, anchor = target.partition("#")
    file = (root / path.parent / name).resolve() if name else root / path
    if not file.exists():
        return "there is no such file"
    if not anchor:
        return None
    if file.suffix == ".md":
        return None if anchor in anchors(file.read_text(encoding="utf-8")) else "the page has no such heading"
    lines = SOURCE_LINES.match(anchor)
    if not lines:
        return "an anchor in a file that is no page must be #L with a line number"
    last = int(lines.group(2) or lines.group(1))
    return None if last <= len(file.read_text(encoding="utf-8").splitlines()) else "the file has fewer lines"


def check_links(root, path, text):
    for number, line in prose(text):
        for target in targets(line):
            why = None if ELSEWHERE.match(target) else why_broken(root, path, target)
            if why:
                yield f"{path}:{number}: the link to {target} is broken: {why}"


def check_length(path, text):
    lines = len(text.splitlines())
    if str(path) == "README.md" and lines > README_LINES:
        yield f"{path}: {lines} lines, at most {README_LINES}: move what a newcomer needs later to docs/guide"


def check_page(root, path, retired):
    text = read(root, path)
    yield from check_length(path, text)
    yield from check_lines(path, text)
    yield from check_links(root, path, text)
    yield from check_words(path, text, retired)


def main():
    root = root_from_arguments()
    retired = checked_in(root, "docs")
    complaints = [complaint for path in pages(root) for complaint in check_page(root, path, retired)]
    complaints += plot_measurements.stale(root)
    return report("docs", complaints, f"{len(pages(root))} pages, {len(retired)} retired words")


if __name__ == "__main__":
    sys.exit(main())
