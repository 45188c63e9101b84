#!/usr/bin/env python3
"""cmake/cuda.cmake with toolkits that cannot build the CUDA backend: `auto` goes on without it, `on` says what is missing.

usage: tools/cuda_auto_test.py CMAKE
"""
import os
import pathlib
import subprocess
import sys
import tempfile

CUDA = pathlib.Path(__file__).resolve().parent.parent / "cmake" / "cuda.cmake"
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES NONE)
include({})
message(STATUS "backend: ${{MOEBIUS_HAS_CUDA}}")
"""
SAYS_VERSION = '[ "$1" = --version ] && {{ echo "Cuda compilation tools, release {}, V1"; exit 0; }}\n'
COMPILES = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && : >"$2"; shift; done\n'

# name, the toolkit's nvcc, more options, what is said
CASES = [
    ("no toolkit of that age", SAYS_VERSION.format("12.4"), [], "expected CUDA 13.0 or later; got '12.4'"),
    ("an nvcc that is broken", SAYS_VERSION.format("13.0") + "echo 'nvcc fatal: no cicc' >&2; exit 1\n", [],
     "does not compile a kernel for sm_90a (nvcc fatal: no cicc)"),
    ("no development files", SAYS_VERSION.format("13.0") + COMPILES, ["-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=TRUE"],
     "lacks cudart_static cublasLt"),
]


def configure(cmake, folder, name, options):
    """Return the exit status and all that was said, without line breaks."""
    env = dict(os.environ, CUDA_HOME=str(folder / "toolkit"))
    ran = subprocess.run([cmake, "-S", str(folder), "-B", str(folder / name), *options], env=env, capture_output=True,
                         text=True, check=False)
    return ran.returncode, " ".join((ran.stdout + ran.stderr).split())


def main():
    failed = 0
    for name, nvcc, options, said in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            (folder / "CMakeLists.txt").write_text(PROJECT.format(CUDA.as_posix()))
            (folder / "toolkit" / "bin").mkdir(parents=True)
            program = folder / "toolkit" / "bin" / "nvcc"
            program.write_text("#!/bin/sh\n" + nvcc)
            program.chmod(0o755)
            status, text = configure(sys.argv[1], folder, "auto", ["-DMOEBIUS_CUDA=auto", *options])
            good = status == 0 and "backend: FALSE" in text and said in text and "built for the CPU alone" in text
            status, insisted = configure(sys.argv[1], folder, "on", ["-DMOEBIUS_CUDA=on", *options])
            good = good and status != 0 and said in insisted
            print(f"{name}: {'right' if good else 'WRONG:'} {'' if good else text + ' | ' + insisted}")
            failed += not good
    sys.exit(failed != 0)


main()
