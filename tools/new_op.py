#!/usr/bin/env python3
"""Starts an op: a folder that holds a working example, which multiplies rows by a number.

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


def format_files(files):
    formatter = shutil.which("clang-format-14")
    if formatter:
        subprocess.run([formatter, "-i", *files], check=True)


def main():
    if len(sys.argv) not in (2, 3):
        fail("usage: ./dev new-op NAME")
    name = sys.argv[1]
    root = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else TEMPLATES.parent.parent
    folder = root / "src" / "ops" / name
    check_name(name, folder)
    write_files(name, folder)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    format_files(files)
    for file in files:
        print(file.relative_to(root))
    print(f"an example that scales rows is in place and passes its test; docs/design/adding-an-op.md says how it becomes {name}")


if __name__ == "__main__":
    main()
