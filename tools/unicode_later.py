#!/usr/bin/env python3
"""Writes src/io/unicode_later_table.h: the characters that Hugging Face's library knows and Unicode 14
does not.

    python3.11 tools/unicode_later.py

The library itself says what each character is. Categories, Alphabetic and scripts are the matches
of its regular expressions, and lower case is the result of its normalizer.
The table has the characters for which Python's own tables (they must be Unicode 14's) differ. Each
has a stand-in: the nearest older character of the same category, Alphabetic, script and length in
UTF-8. Where the script has none, the stand-in is of another script.
Characters that are unassigned in the library are in the table too, with a stand-in that is
unassigned forever. So tables newer than the library's change nothing. Two bytes of UTF-8 have no
such character, and their unassigned characters are left out.
Needs the package tokenizers and clang-format-14.
"""

import bisect
import subprocess
import unicodedata
from pathlib import Path

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

TABLE = Path(__file__).resolve().parent.parent / "src" / "io" / "unicode_later_table.h"
CHARACTERS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
TEXT = "".join(map(chr, CHARACTERS))
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co Cn".split()
SCRIPTS = "Han Hiragana Katakana Hangul Bopomofo Latin Greek Cyrillic Arabic Hebrew Devanagari Thai".split()
NONCHARACTERS = {3: 0xFDD0, 4: 0x1FFFE}


def members(expression):
    splitter = pre_tokenizers.Split(Regex(f"(?:{expression})+"), "removed", invert=True)
    for _, (begin, end) in splitter.pre_tokenize_str(TEXT):
        yield from CHARACTERS[begin:end]


def bytes_of(c):
    return 1 if c < 0x80 else 2 if c < 0x800 else 3 if c < 0x10000 else 4


def signatures():
    category = {c: name for name in CATEGORIES for c in members(rf"\p{{{name}}}")}
    alphabetic = set(members(r"\p{Alphabetic}"))
    script = {c: name for name in SCRIPTS for c in members(rf"\p{{{name}}}")}
    return {c: (category[c], c in alphabetic, script.get(c), bytes_of(c)) for c in CHARACTERS}


def nearest(ordered, c):
    at = bisect.bisect(ordered, c)
    return min(ordered[max(at - 1, 0):at + 1], key=lambda other: abs(other - c))


def later_rows(signature):
    """Yields [first, last, stand-in] of each longest run of one signature."""
    older, later = {}, []
    for c, (category, alphabetic, script, size) in signature.items():
        if category == "Cn" and size in NONCHARACTERS:
            later.append(c)
        elif category != unicodedata.category(chr(c)):
            assert size > 2, hex(c)
            later.append(c)
        else:
            for key in (signature[c], (category, alphabetic, size)):
                older.setdefault(key, []).append(c)
    rows = []
    for c in later:
        if rows and rows[-1][1] == c - 1 and signature[rows[-1][0]] == signature[c]:
            rows[-1][1] = c
            continue
        category, alphabetic, _, size = signature[c]
        candidates = older.get(signature[c]) or older.get((category, alphabetic, size))
        rows.append([c, c, NONCHARACTERS[size] if category == "Cn" else nearest(candidates, c)])
    return rows


def lower_rows():
    lower = normalizers.Lowercase()
    return [(c, ord(lower.normalize_str(chr(c)))) for c in CHARACTERS if c != 0x130 and
            lower.normalize_str(chr(c)) != chr(c).lower()]


def main():
    assert unicodedata.unidata_version == "14.0.0", "run it with Python 3.11"
    rows = [", ".join(hex(c) for c in row) for row in later_rows(signatures())]
    lowers = [f"{hex(upper)}, {hex(lower)}" for upper, lower in lower_rows()]
    TABLE.write_text(
        f"// Generated: python3.11 tools/unicode_later.py, with tokenizers {tokenizers.__version__} and Unicode 14.0.0.\n"
        "#pragma once\n\nnamespace moebius {\n\n"
        "struct LaterRange {\n  char32_t first, last, substitute;\n};\n"
        f"inline constexpr LaterRange kLaterRanges[] = {{{', '.join(f'{{{row}}}' for row in rows)}}};\n\n"
        "struct LaterLower {\n  char32_t upper, lower;\n};\n"
        f"inline constexpr LaterLower kLaterLower[] = {{{', '.join(f'{{{row}}}' for row in lowers)}}};\n\n"
        "}  // namespace moebius\n")
    subprocess.run(["clang-format-14", "-i", str(TABLE)], check=True)
    print(f"{len(rows)} ranges, {len(lowers)} lower-case letters")


if __name__ == "__main__":
    main()
