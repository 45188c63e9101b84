"""Reads the retired words of docs/terms.md, their only source."""

import re
from typing import NamedTuple

PAGE = "docs/terms.md"
HEAD = ["retired", "use", "checked", "where"]


class Term(NamedTuple):
    retired: str
    use: str
    pattern: re.Pattern  # None where only a person can judge
    where: str  # "docs" or "all"


def cells(line):
    """Returns the cells of a row of a Markdown table. \\| is a bar inside a cell."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def term_of(row):
    retired, use, checked, where = row
    pattern = None if checked == "no" else re.compile(checked.strip("`"), re.IGNORECASE)
    return Term(retired, use, pattern, where)


def terms(root):
    """Returns every row of the table; none without the page. Raises ValueError for an incomplete row."""
    page = root / PAGE
    if not page.is_file():
        return []
    rows = [cells(line) for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    bad = [row for row in rows if len(row) != len(HEAD)]
    if bad:
        raise ValueError(f"{PAGE}: expected rows with the cells {', '.join(HEAD)}; got {bad[0]}")
    return [term_of(row) for row in rows if row != HEAD and set(row[0]) != {"-"}]


def checked_in(root, where):
    """Returns the terms that a script refuses. `where` is "docs" for Markdown pages, "all" for sources."""
    return [term for term in terms(root) if term.pattern and where in ("docs", term.where)]
