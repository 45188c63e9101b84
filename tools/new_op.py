#!/usr/bin/env python3
"""Starts an op: its folder with a working example (rows times a number), and its lines in the list of backends.

usage: new_op.py NAME [ROOT]      NAME in snake_case, for example layer_norm
"""

import pathlib
import re
import shutil
import subprocess
import sys

from words import BAD_NAME

TEMPLATES = pathlib.Path(__file__).resolve().parent / "op_template"


def fail(message):
    sys.exit(f"new-op: {message}")


def check_name(name, folder):
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        fail(f"the name must be snake_case, for example layer_norm; got '{name}'")
    if BAD_NAME.search(name):
        fail(f"an op is named after its formula; got '{name}'")
    if folder.exists():
        fail(f"{folder} is there already")


def write_files(name, folder):
    """The templates with @op@ and @Op@ filled in."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    for template in sorted(TEMPLATES.rglob("*.in")):
        text = template.read_text().replace("@op@", name).replace("@Op@", camel)
        file = folder / template.relative_to(TEMPLATES).parent / re.sub("^op", name, template.name).removesuffix(".in")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return camel


def insert(path, before, lines):
    """lines in front of the one line that is `before`."""
    text = path.read_text()
    if text.count(before) != 1:
        fail(f"{path}: expected '{before.strip()}' once; got it {text.count(before)} times")
    path.write_text(text.replace(before, lines + before))


def declare(name, camel, ops):
    """The lines in backends.h, for both devices."""
    backends = ops / "backends.h"
    insert(backends, "\nnamespace cpu {\n", f"struct {camel}Fwd;\nstruct {camel}Bwd;\n")
    declarations = f"void {name}_fwd(Stream& s, const {camel}Fwd& a);\nvoid {name}_bwd(Stream& s, const {camel}Bwd& a);\n"
    for device in ("cpu", "cuda"):
        insert(backends, f"}}  // namespace {device}\n", declarations)


def format_files(files):
    formatter = shutil.which("clang-format-14")
    if formatter:
        subprocess.run([formatter, "-i", *files], check=True)


def main():
    if len(sys.argv) not in (2, 3):
        fail("usage: ./dev new-op NAME")
    name = sys.argv[1]
    root = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else TEMPLATES.parent.parent
    ops = root / "src" / "ops"
    folder = ops / name
    check_name(name, folder)
    camel = write_files(name, folder)
    declare(name, camel, ops)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()] + [ops / "backends.h"]
    format_files(files)
    for file in files:
        print(file.relative_to(root))
    print(f"an example that scales rows is in place and passes its test; docs/design/adding-an-op.md says how it becomes {name}")


if __name__ == "__main__":
    main()
