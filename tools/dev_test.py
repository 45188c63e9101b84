#!/usr/bin/env python3
"""Tests `./dev` with tools that only print: what a build repeats of the configuration, where it looks
for nvcc, and that arguments are checked before anything is built.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

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


# arguments of ./dev that are refused, a part of the message
REFUSED = [
    (["bench", "foo"], "dev: bench: expected names among "),
    (["bench", "gemm", "foo"], "; got 'foo'"),
    (["gpu-check", "--only", "foo"], "--only: expected some of tests,memcheck,racecheck,bench; got foo"),
    (["lint", "x"], "dev: lint: unknown argument 'x'; usage: ./dev lint"),
    (["setup", "x"], "dev: setup: unknown argument 'x'"),
    (["demo", "x"], "dev: demo: unknown argument 'x'"),
    (["test", "x"], "dev: test: unknown argument 'x'"),
    (["build", "x"], "dev: build: unknown argument 'x'"),
]


# Writes what a ctest reports: seven tests, of which two fail and one is skipped. Three of them are processes that share
# tests: one passes with a skipped test, in another two tests fail, and the third crashes.
CTEST = """#!/bin/sh
while [ "$1" != --output-junit ]; do shift; done
mkdir -p build/log/release
cat >"$2" <<'T'
<testsuite name="a" tests="7" failures="2" disabled="0" skipped="1">
  <testcase name="shards/a.1" classname="shards/a.1" time="0.1" status="run">
  <testcase name="shards/a.2" classname="shards/a.2" time="0.1" status="fail">
  <testcase name="shards/a.3" classname="shards/a.3" time="0.1" status="fail">
    <failure message="SEGFAULT"/>
T
cat >build/log/release/shards-a.1.xml <<'T'
<testsuites tests="3" failures="0" disabled="0" errors="0">
  <testsuite name="A" tests="3" failures="0" disabled="0" skipped="1" errors="0">
    <testcase name="One" status="run" result="completed" classname="A" />
    <testcase name="Two" status="run" result="completed" classname="A" />
    <testcase name="Three" status="run" result="skipped" classname="A">
      <skipped message="no GPU"><![CDATA[no GPU]]></skipped>
    </testcase>
T
cat >build/log/release/shards-a.2.xml <<'T'
<testsuites tests="4" failures="2" disabled="0" errors="0">
  <testsuite name="A" tests="4" failures="2" disabled="0" skipped="0" errors="0">
    <testcase name="Four" status="run" result="completed" classname="A">
    <testcase name="Five" status="run" result="completed" classname="A">
    <testcase name="Six" status="run" result="completed" classname="A" />
    <testcase name="Seven" status="run" result="completed" classname="A" />
T
exit 8
"""


def build(folder, configuration, arguments=("build",), more=None):
    """Returns the output of `./dev` in a folder of its own, where only CUDA_HOME has an nvcc. more: variables."""
    folder = pathlib.Path(folder)
    shutil.copy(DEV, folder / "dev")
    for name, text in [("cmake", CMAKE.format(configuration)), ("ninja", "#!/bin/sh\n"), ("g++", "#!/bin/sh\n"),
                       ("python3", PYTHON), ("ctest", CTEST)]:
        write_program(folder / "bin" / name, text)
    write_program(folder / "toolkit" / "bin" / "nvcc", "#!/bin/sh\n")
    env = dict(os.environ, PATH=f"{folder / 'bin'}:/usr/bin:/bin", CUDA_HOME=str(folder / "toolkit"))
    env.pop("MOEBIUS_SETUP", None)
    env.update(more or {})
    ran = subprocess.run([folder / "dev", *arguments], env=env, capture_output=True, text=True, check=False)
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
        build(off, "", ["build", "--cuda", "off"])
        asked = [(pathlib.Path(folder) / "build" / "asked").exists() for folder in (auto, off)]
    if asked != [True, False]:
        print(f"the headers of cuDNN's frontend: expected to be asked for with CUDA alone; got {asked}")
    return asked == [True, False]


def check_refused(arguments, expected):
    """The arguments are refused at once: cmake is not called."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        shutil.copy(DEV, folder / "dev")
        shutil.copytree(DEV.parent / "tools", folder / "tools")
        write_program(folder / "bin" / "cmake", "#!/bin/sh\ntouch called\n")
        env = dict(os.environ, PATH=f"{folder / 'bin'}:{os.environ['PATH']}", MOEBIUS_SETUP="skip")
        ran = subprocess.run([folder / "dev", *arguments], env=env, capture_output=True, text=True, check=False)
        good = ran.returncode != 0 and expected in ran.stderr and not (folder / "called").exists()
    if not good:
        print(f"{arguments}: expected '{expected}'; got {ran.returncode}, '{ran.stdout + ran.stderr}'")
    return good


def check_counts():
    """The tests of a process that left a report count one by one. A failed one without a report is named."""
    expected = ["   shards/a.3 ended early: its other tests did not run", "7 passed, 3 failed, 2 skipped"]
    with tempfile.TemporaryDirectory() as folder:
        said = build(folder, "", ["test", "--fast"], {"MOEBIUS_SETUP": "skip"}).splitlines()
    got = [line for line in said if "ended early" in line] + said[-1:]
    if got != expected:
        print(f"the count of tests: expected {expected}; got {said}")
    return got == expected


def check_bare_root():
    """tools/bare_debian.sh removes its root at the end, so it refuses a folder that has something in it."""
    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(folder) / "kept.txt"
        kept.write_text("mine")
        env = dict(os.environ, MOEBIUS_BARE_ROOT=folder)
        ran = subprocess.run([DEV.parent / "tools" / "bare_debian.sh"], env=env, capture_output=True, text=True, check=False)
        good = ran.returncode == 1 and "expected a new or an empty folder" in ran.stderr and kept.exists()
    if not good:
        print(f"bare_debian.sh: expected to refuse a folder in use; got {ran.returncode}, '{ran.stdout + ran.stderr}'")
    return good


def check_bare_stopped():
    """A signal ends the running command of tools/bare_debian.sh with all that it started, and removes the root."""
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        stubs = {"id": "echo 0", "git": "true", "debootstrap": f"sleep 60 & echo $! >{here}/child.tmp; mv {here}/child.tmp {here}/child; wait"}
        for name, body in stubs.items():
            stub = here / name
            stub.write_text(f"#!/bin/sh\n{body}\n")
            stub.chmod(0o755)
        env = dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}", MOEBIUS_BARE_ROOT=f"{folder}/root")
        script = subprocess.Popen([DEV.parent / "tools" / "bare_debian.sh"], env=env)
        child = here / "child"
        while not child.exists() and script.poll() is None:
            time.sleep(0.05)
        script.terminate()
        try:
            status = script.wait(timeout=30)
        except subprocess.TimeoutExpired:
            script.kill()
            status = "none in 30 s"
        pid, deadline = int(child.read_text()), time.monotonic() + 10
        while is_running(pid) and time.monotonic() < deadline:  # a killed process takes a moment to go
            time.sleep(0.05)
        left = is_running(pid)
        root_is_left = (here / "root").exists()
    good = status == 143 and not left and not root_is_left
    if not good:
        print(f"bare_debian.sh after TERM: expected exit 143, no process and no root; got exit {status}, "
              f"a process: {left}, a root: {root_is_left}")
    return good


def is_running(pid):
    """Returns whether a process has neither ended nor is a zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_workloads():
    """The names that `./dev bench` takes are those of `moebius bench`."""
    source = (DEV.parent / "src" / "cli" / "bench" / "options.cc").read_text()
    ours = re.search(r"^workloads=\((.*)\)$", DEV.read_text(), re.M).group(1).split()
    theirs = re.findall(r'"([^"]+)"', re.search(r"kWorkloads\{(.*?)\}", source, re.S).group(1))
    if ours != theirs:
        print(f"the names of benchmarks: expected {theirs}; got {ours}")
    return ours == theirs


def main():
    results = [*(check(*case) for case in CASES), check_wheels(), *(check_refused(*case) for case in REFUSED),
               check_workloads(), check_counts(), check_bare_root(), check_bare_stopped()]
    print(f"dev: {sum(results)} of {len(results)} cases right")
    sys.exit(not all(results))


main()
