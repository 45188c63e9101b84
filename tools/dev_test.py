#!/usr/bin/env python3
"""Tests `./dev build` with tools that only print: what it repeats of the configuration, and where it
looks for nvcc.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

DEV = pathlib.Path(__file__).resolve().parent.parent / "dev"
CMAKE = """#!/bin/sh
[ "$1" = --preset ] || exit 0
cat <<'T'
-- The CXX compiler identification is GNU 12.2.0
{}
-- Configuring done
[1/1] Linking CXX executable moebius
T
"""
# Leaves a mark when the wheel with the headers of cuDNN's frontend is requested.
PYTHON = '#!/bin/sh\ncase "$*" in *"pip download"*) touch build/asked ;; esac\n'

# name, output of the configuration, what is repeated of it
CASES = [
    ("without CUDA", "-- CUDA: expected CUDA 13.0 or later; built for the CPU only",
     "   CUDA: expected CUDA 13.0 or later; built for the CPU only\n"),
    ("without cuDNN", "-- CUDA: 13.0.88, a/nvcc\n-- cuDNN: what is missing:\n  its headers\n-- NCCL: nccl.h was not found",
     "   CUDA: 13.0.88, a/nvcc\n   cuDNN: what is missing:\n     its headers\n   NCCL: nccl.h was not found\n"),
]


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def build(folder, configuration, arguments=()):
    """Returns the output of `./dev build` in a folder of its own, where only CUDA_HOME has an nvcc."""
    folder = pathlib.Path(folder)
    shutil.copy(DEV, folder / "dev")
    for name, text in [("cmake", CMAKE.format(configuration)), ("ninja", "#!/bin/sh\n"), ("g++", "#!/bin/sh\n"),
                       ("python3", PYTHON)]:
        write_program(folder / "bin" / name, text)
    write_program(folder / "toolkit" / "bin" / "nvcc", "#!/bin/sh\n")
    env = dict(os.environ, PATH=f"{folder / 'bin'}:/usr/bin:/bin", CUDA_HOME=str(folder / "toolkit"))
    env.pop("MOEBIUS_SETUP", None)
    ran = subprocess.run([folder / "dev", "build", *arguments], env=env, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


def check(name, configuration, expected):
    with tempfile.TemporaryDirectory() as folder:
        said = build(folder, configuration)
        good = expected in said and "identification" not in said and "Linking" not in said
    if not good:
        print(f"{name}: expected '{expected}'; got '{said}'")
    return good


def check_wheels():
    """The headers are requested if CUDA_HOME has an nvcc, unless CUDA is off."""
    with tempfile.TemporaryDirectory() as auto, tempfile.TemporaryDirectory() as off:
        build(auto, "")
        build(off, "", ["--cuda", "off"])
        asked = [(pathlib.Path(folder) / "build" / "asked").exists() for folder in (auto, off)]
    if asked != [True, False]:
        print(f"the headers of cuDNN's frontend: expected to be asked for with CUDA alone; got {asked}")
    return asked == [True, False]


def main():
    results = [*(check(*case) for case in CASES), check_wheels()]
    print(f"dev: {sum(results)} of {len(results)} cases right")
    sys.exit(not all(results))


main()
