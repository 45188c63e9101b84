#!/usr/bin/env python3
"""Tests cmake/cuda.cmake with toolkits that cannot build the CUDA backend: `auto` leaves it out, and
`on` says what is missing.
Tests a toolkit other than that of the last configuration too, and cmake/cudnn.cmake with a cuDNN
that attention does not use.

usage: tools/cuda_auto_test.py CMAKE GENERATOR      the generator of this build: the default one may have no program here
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

CMAKE = pathlib.Path(__file__).resolve().parent.parent / "cmake"
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES {})
include({})
message(STATUS "backend: ${{MOEBIUS_HAS_CUDA}}; compiler: ${{CMAKE_CUDA_COMPILER}};")
"""
SAYS_VERSION = '[ "$1" = --version ] && {{ echo "Cuda compilation tools, release {}, V1"; exit 0; }}\n'
COMPILES = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && : >"$2"; shift; done\n'
OLD = SAYS_VERSION.format("12.4")
BROKEN = SAYS_VERSION.format("13.0") + "echo 'nvcc fatal: no cicc' >&2; exit 1\n"

# name, the toolkit's nvcc (None: there is no such folder), more options, expected output
CASES = [
    ("no toolkit of that age", OLD, [], "expected CUDA 13.0 or later; got '12.4'"),
    ("an nvcc that says nothing", "exit 0\n", [], "expected CUDA 13.0 or later; got '' from "),
    ("an nvcc that does not start", "echo 'nvcc: no libstdc++' >&2; exit 127\n", [],
     "bin/nvcc --version failed (nvcc: no libstdc++); repair the toolkit or set CUDA_HOME to another"),
    ("a CUDA_HOME that is not there", None, [], "/toolkit has no bin/nvcc; set CUDA_HOME to a CUDA toolkit, or unset it"),
    ("an nvcc that is broken", BROKEN, [], "does not compile a kernel for sm_90a (nvcc fatal: no cicc)"),
    ("no development files", SAYS_VERSION.format("13.0") + COMPILES, ["-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=TRUE"],
     "lacks cudart_static cublasLt"),
]


class Project:
    """A project that includes one of our scripts, in a folder with toolkits."""

    def __init__(self, folder, languages="NONE", script="cuda.cmake"):
        self.folder = pathlib.Path(folder)
        (self.folder / "CMakeLists.txt").write_text(PROJECT.format(languages, (CMAKE / script).as_posix()))
        (self.folder / "cmake").mkdir()
        (self.folder / "cmake" / "nccl.cmake").touch()

    def add_toolkit(self, name, nvcc):
        program = self.folder / name / "bin" / "nvcc"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n" + nvcc)
        program.chmod(0o755)
        return program

    def configure(self, toolkit, build, *options):
        """Returns the exit status and all output, without line breaks."""
        env = dict(os.environ, CUDA_HOME=str(self.folder / toolkit))
        ran = subprocess.run([sys.argv[1], "-G", sys.argv[2], "-S", str(self.folder), "-B", str(self.folder / build), *options], env=env,
                             capture_output=True, text=True, check=False)
        return ran.returncode, " ".join((ran.stdout + ran.stderr).split())


def report(name, good, *said):
    print(f"{name}: {'right' if good else 'WRONG:'} {'' if good else ' | '.join(said)}")
    return not good


def check_unfit(name, nvcc, options, said):
    with tempfile.TemporaryDirectory() as temporary:
        project = Project(temporary)
        if nvcc:
            project.add_toolkit("toolkit", nvcc)
        status, text = project.configure("toolkit", "auto", "-DMOEBIUS_CUDA=auto", *options)
        good = status == 0 and "backend: FALSE" in text and said in text and "built for the CPU only" in text
        status, insisted = project.configure("toolkit", "on", "-DMOEBIUS_CUDA=on", *options)
        return report(name, good and status != 0 and said in insisted, text, insisted)


def check_unfit_then_another():
    with tempfile.TemporaryDirectory() as temporary:
        project = Project(temporary)
        project.add_toolkit("old", OLD)
        broken = project.add_toolkit("broken", BROKEN)
        _, first = project.configure("old", "build")
        _, second = project.configure("broken", "build")
        good = "got '12.4'" in first and f"{broken} does not compile" in second
        return report("an unfit toolkit, then another", good, first, second)


def real_nvcc():
    places = [os.environ.get("CUDA_HOME", "") + "/bin", "/usr/local/cuda/bin", os.environ.get("PATH", "")]
    return shutil.which("nvcc", path=os.pathsep.join(places))


def check_fit_then_another():
    """Tests two toolkits that forward to the installed one."""
    name = "a fit toolkit, then another"
    with tempfile.TemporaryDirectory() as temporary:
        project = Project(temporary, "CXX")
        programs = {t: project.add_toolkit(t, f'exec {real_nvcc()} "$@"\n') for t in ("one", "two")}
        said = [project.configure(toolkit, "build")[1] for toolkit in ("one", "two")]
        if "backend: TRUE" not in said[0]:
            print(f"{name}: not checked, no toolkit here that is fit")
            return False
        good = all(f"backend: TRUE; compiler: {program};" in text for program, text in zip(programs.values(), said))
        return report(name, good, *said)


def check_cudnn(minor, said):
    with tempfile.TemporaryDirectory() as temporary:
        project = Project(temporary, script="cudnn.cmake")
        for name in ("cudnn.h", "cudnn_frontend.h", "cudnn_version.h", "libcudnn.so"):
            (project.folder / name).write_text(f"#define CUDNN_MAJOR 9\n#define CUDNN_MINOR {minor}\n")
        found = {"CUDNN_INCLUDE_DIR": "", "CUDNN_FRONTEND_INCLUDE_DIR": "", "CUDNN_LIBRARY": "libcudnn.so"}
        _, text = project.configure("none", "build", *(f"-D{n}={project.folder / f}" for n, f in found.items()))
        return report(f"cuDNN 9.{minor}", said in text, text)


def main():
    failed = sum(check_unfit(*case) for case in CASES) + check_unfit_then_another() + check_fit_then_another()
    failed += check_cudnn(19, "cuDNN: 9.19, ") + check_cudnn(20, "cuDNN: 9.20 (not used: attention uses only 9.19), ")
    failed += check_cudnn(8, "cuDNN: attention runs on our own kernels only")
    sys.exit(failed != 0)


main()
