"""Finds the project's own source files for the lints."""

import pathlib
import sys

FOLDERS = ("src", "tests", "bench", "examples", "tools", "cmake")
CPP = (".h", ".cc", ".cu", ".cuh")
SUFFIXES = (*CPP, ".py", ".sh", ".cmake", ".txt")


def sources(root, suffixes=SUFFIXES):
    """Returns paths relative to root, sorted."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in suffixes]
    return sorted(path.relative_to(root) for path in found if path.is_file())


def documents(root):
    """Returns the documents that people read and edit beside the sources."""
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("recipes/**/*.toml"), root / "dev"]
    return sorted(path.relative_to(root) for path in found if path.is_file())


def is_test(path):
    """Returns whether a file belongs to tests: tests, references and shared parts of tests."""
    return path.parts[0] == "tests" or path.stem.endswith(("_test", "_ref", "testing"))


def read(root, path):
    return (root / path).read_text(encoding="utf-8", errors="replace")


def root_from_arguments():
    """Returns the folder named on the command line, or the one above this file."""
    return pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()


def report(name, complaints, summary):
    """Prints every complaint, or one line when there is none. Returns the exit status."""
    for complaint in complaints:
        print(f"{name}: {complaint}")
    print(f"{name}: {len(complaints)} to mend" if complaints else f"{name}: {summary}")
    return 1 if complaints else 0
