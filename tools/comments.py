#!/usr/bin/env python3
"""Finds comments that a formatter has filled anew: formulas and lists merged into prose, and words
left over in a line.
"""

import re
import sys

from sources import CPP, read, report, root_from_arguments, sources

COLUMNS = 100  # to which comments are filled
SHORT = 16  # letters of a word that looks lost in a line of its own
COMMENT = re.compile(r"( *)//( *)(.*)")
FORMULA = re.compile(r"\w+(\[[^]]*\])? [+*]?= ")
INSIDE = re.compile(r"[\w.)\]] \w+(\[[^]]*\])? [+*]?= \w+\[")  # a formula after other words
ITEM = re.compile(r"\S  +\S")  # a name and its meaning


class Line:
    def __init__(self, text):
        code, blanks, self.words = COMMENT.fullmatch(text).groups()
        self.length, self.place, self.indent = len(text), len(code), len(blanks)

    def fits(self, after):
        """Returns whether this line had room for the first word of the line after it."""
        return self.length + 1 + len(after.words.split()[0]) <= COLUMNS


def paragraphs(text):
    """Yields (number of the first line, lines) of comments on lines of their own. Empty lines separate
    them.
    """
    block = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        match = COMMENT.fullmatch(line)
        if block and not (match and match[3] and len(match[1]) == block[0].place):
            yield number - len(block), block
            block = []
        if match and match[3]:
            block.append(Line(line))


def wrong(before, line, after):
    """Returns what is wrong with a line of a paragraph, given its neighbours (None where there is none)."""
    if before is None or before.fits(line):
        return None  # the writer began the line here; only lines that a formatter may have begun are checked
    prose = re.match(r"[a-z]+\b(?![._])", line.words)
    under_item = line.indent < before.indent or line.indent == before.indent > 1 and ITEM.search(before.words)
    if prose and under_item and not ITEM.search(line.words):
        return "an item of a list continues without its indentation"
    if FORMULA.match(before.words) and line.indent == before.indent or INSIDE.search(line.words):
        return "a formula merged into prose; give it a line of its own, and indent what continues it"
    if " " not in line.words and len(line.words) <= SHORT:
        return f"a word left over: {line.words}"
    early = after is not None and line.fits(after) and line.length < COLUMNS - SHORT and line.words[-1] not in ".:;)"
    if early and line.indent == after.indent == 1 and after.words[0].islower():
        return "a line broken in the middle of a sentence"
    return None


def check_file(path, text):
    for first, lines in paragraphs(text):
        for i, line in enumerate(lines):
            complaint = wrong(lines[i - 1] if i else None, line, lines[i + 1] if i + 1 < len(lines) else None)
            if complaint:
                yield f"{path}:{first + i}: {complaint}"


def main():
    root = root_from_arguments()
    files = sources(root, CPP)
    complaints = [complaint for path in files for complaint in check_file(path, read(root, path))]
    return report("comments", complaints, f"{len(files)} files")


if __name__ == "__main__":
    sys.exit(main())
