#!/usr/bin/env python3
"""What ./dev new-op writes compiles, passes its own test, needs no formatting and keeps to the lints.

usage: new_op_test.py LIBRARY [FILE...]      the library of the project, as the build left it, and what it needs beside
                                             the libraries of every build
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

TOOLS = pathlib.Path(__file__).resolve().parent
ROOT = TOOLS.parent
COMPILE = ["g++", "-std=c++20", "-O1", "-march=native", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers",
           "-fopenmp"]
LIBRARIES = ["-lgtest", "-lgtest_main", "-lfmt", "-ldnnl", "-pthread", "-ldl", "-lrt"]


def run(*command):
    """The output; ends the test when the command fails."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout


def expect_refusal(root, name, words):
    result = subprocess.run([sys.executable, TOOLS / "new_op.py", name, root], capture_output=True, text=True, check=False)
    if result.returncode == 0 or words not in result.stderr:
        sys.exit(f"new_op.py {name}: must be refused with '{words}'; got {result.returncode}: {result.stderr}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        shutil.copytree(ROOT / "src", root / "src")
        shutil.copy(ROOT / ".clang-format", root)
        run(sys.executable, TOOLS / "new_op.py", "row_scale", root)
        op = root / "src/ops/row_scale"
        sources = sorted(op.rglob("*.cc"))
        program = root / "row_scale_test"
        run(*COMPILE, f"-I{root}/src", "-o", program, *sources, *sys.argv[1:], *LIBRARIES)
        print(run(program).splitlines()[-1])
        if shutil.which("clang-format-14"):
            run("clang-format-14", "--dry-run", "-Werror", *(file for file in op.rglob("*") if file.is_file()))
        for lint in ("layers", "words"):
            run(sys.executable, TOOLS / f"{lint}.py", root)
        expect_refusal(root, "row_scale", "is there already")
        expect_refusal(root, "RowScale", "must be snake_case")
        expect_refusal(root, "norm_v2", "named after its formula")


if __name__ == "__main__":
    main()
