#!/usr/bin/env python3
"""Runs all checks that need a GPU: the tests that other machines skip, and compute-sanitizer's
memcheck and racecheck over the op tests.
The sanitizers run in parallel parts, each with a limit of time. With `--only bench` it times the
workloads of gpu_bench.py as one table.

usage: tools/gpu_check.py [--build DIR] [--only tests,memcheck,racecheck,bench] [--parts N] [--jobs
N] [--limit SECONDS] [--log DIR]

Exit status 0 when every test and workload passed, every part ended in time, and no finding is
outside KNOWN_RACES.
The last line is `N passed, N failed, N skipped`. A part of a sanitizer and a workload each count as
one.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import gpu_bench

# Programs, and the tests of each that need a GPU. The op tests run on each device by themselves.
PROGRAMS = [
    ("device_test", "OnAccelerator*:*OnGpu*"),
    ("ops_test", "*"),
    ("precision_test", "ProductPrecision*"),
    ("engine_test", "*Gpu*:*FallbackKernels*"),
    ("checkpoint_test", "*Gpu*"),
    ("train_test", "*Gpu*"),
    ("bench_test", "BenchAttention*"),
    ("tests_equivalence", "*OnGpu*:*OnAGpu*"),
    ("tests_golden", "Cases/Golden.*cuda*"),
    ("tests_distributed", "*Gpu*"),
    ("tests_nccl", "*Gpu*"),
    ("tests_faults", "*OnGpu*"),
    ("tests_cli", "*Gpu*"),
]

# Functions, by the beginnings of their names, for which racecheck reports races that are none.
# Their warps hand over shared memory by an mbarrier that the copy engine's bytes complete. A write
# is followed by an arrival (release), and a read follows a wait for that phase (acquire).
# racecheck does not see this order. See docs/measurements/correctness.md, "compute-sanitizer".
# The second name is the partner of the race. It is empty where every partner is known.
KNOWN_RACES = [
    ("produce_queries", ""),  # attention_bwd: rows of lse and delta (ops/attention/sm90/attention_bwd.cu)
    # expert_wgrad: the next note is written after all readers of the last one have arrived, from
    # both blocks of the cluster.
    ("read_note", "write_note"),
    ("write_note", "read_note"),
    ("nvjet_", ""),  # cuBLASLt's products
    ("cudnn_", ""),  # cuDNN's attention
]
FIRST_TEST = "OnAccelerator.AGraphDoesItsWorkAtEachReplay"  # it says whether there is a GPU
FOUND_SOMETHING = 99  # the sanitizer's exit status after a finding


class Totals:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0


def run(command, limit, log, env=None):
    """Runs a command with all output to a file. Returns its exit status, or None when it took longer
    than `limit` seconds.
    """
    with open(log, "w", encoding="utf-8") as out:
        with subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})},
                              start_new_session=True) as started:
            try:
                return started.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)  # with all processes that it has started
                return None


def why_no_gpu(options):
    """Returns why the first test of the accelerator was skipped. It is empty where there is a GPU."""
    log = options.log / "gpu.txt"
    program = options.build / "tests" / "device_test"
    if not program.exists():
        return f"{program} is not there; build with MOEBIUS_CUDA=on"
    run([program, "--gtest_filter=" + FIRST_TEST], 120, log)
    text = log.read_text(encoding="utf-8")
    if "[  SKIPPED ]" not in text:
        return "" if "[  PASSED  ] 1 test" in text else "the first test of it failed:\n" + text
    return text.split("Skipped", 1)[1].split("\n[", 1)[0].strip()


def run_program(options, name, names):
    """Returns passed, failed, skipped of a test program. A program that died or ran too long counts as
    one more failed test.
    """
    report = options.log / (name + ".json")
    report.unlink(missing_ok=True)
    if not (options.build / "tests" / name).exists():
        print(f"{name} is not there: build all of it")
        return 0, 1, 0
    status = run([options.build / "tests" / name, "--gtest_filter=" + names, "--gtest_brief=1",
                  "--gtest_output=json:" + str(report)], options.limit, options.log / (name + ".txt"))
    try:  # missing when the program died; gtest breaks its report where something fails outside a test
        suites = json.loads(report.read_text(encoding="utf-8"))["testsuites"]
    except (OSError, ValueError):
        return 0, 1, 0
    tests = [t for suite in suites for t in suite["testsuite"]]
    skipped = sum(t.get("result") == "SKIPPED" for t in tests)
    failed = sum("failures" in t for t in tests)
    if not tests or (status != 0 and failed == 0):
        failed += 1
    return max(0, len(tests) - skipped - failed), failed, skipped


def run_tests(options, totals):
    for name, names in PROGRAMS:
        begin = time.time()
        passed, failed, skipped = run_program(options, name, names)
        print(f"{name:<20} {passed} passed, {failed} failed, {skipped} skipped, {time.time() - begin:.0f} s", flush=True)
        totals.passed += passed
        totals.failed += failed
        totals.skipped += skipped


def find_sanitizer():
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=home + "/bin")


def function_of(race):
    """Returns the name of the function in a line of racecheck, without its namespaces and arguments."""
    named = re.sub(r"(<unnamed>|\(anonymous namespace\))::", "", race.partition(" access at ")[2])
    return re.split(r"[<(+]", named)[0].split(" ")[-1].split("::")[-1]


def is_known(race, partners):
    first = function_of(race)
    return any(first.startswith(name) and all(function_of(p).startswith(other) for p in partners) and (partners or not other)
               for name, other in KNOWN_RACES)


def findings_of(text):
    """Returns the first lines of findings, and those among them that are known races with all their
    partners.
    """
    found, known = [], []
    blocks = re.findall(r"^========= +(?:Error: |Warning: )?((?:Race reported|Invalid|Misaligned|Uninitialized|Program hit|"
                        r"Leaked|Out-of-range|Barrier error|Potential).*)((?:\n=========  +and .*)*)", text, re.MULTILINE)
    for line, others in blocks:
        found.append(line)
        if is_known(line, others.split("\n")[1:]):
            known.append(line)
    return found, known


def run_part(options, sanitizer, tool, part):
    """Returns 'clean', or what is wrong with this part, and how many known races it reported."""
    log = options.log / f"{tool}.{part}.txt"
    status = run([sanitizer, "--tool", tool, "--error-exitcode", str(FOUND_SOMETHING), options.build / "tests" / "ops_test", "--gtest_brief=1"],
                 options.limit, log, {"GTEST_TOTAL_SHARDS": str(options.parts), "GTEST_SHARD_INDEX": str(part)})
    text = log.read_text(encoding="utf-8", errors="replace")
    found, known = findings_of(text)
    new = list((collections.Counter(found) - collections.Counter(known)).elements())
    if new:
        return f"{len(new)} findings, the first: {new[0][:160]}", len(known)
    if status is None:
        return f"not ended within {options.limit} s, and nothing new found until then", len(known)
    if not re.search(r"test suites? ran\.", text) or "[  FAILED  ]" in text:
        return f"a test failed: the end of {log}", len(known)
    if status != (FOUND_SOMETHING if known else 0):
        return f"exit status {status}: the end of {log}", len(known)
    return "clean", len(known)


def run_sanitizer(options, tool, totals):
    sanitizer = find_sanitizer()
    if not sanitizer:
        print(f"{tool}: compute-sanitizer was not found; it comes with the CUDA toolkit (set CUDA_HOME)")
        totals.failed += 1
        return
    begin, known_races = time.time(), 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        parts = list(pool.map(lambda part: run_part(options, sanitizer, tool, part), range(options.parts)))
    for part, (result, known) in enumerate(parts):
        known_races += known
        totals.passed += result == "clean"
        totals.failed += result != "clean"
        if result != "clean":
            print(f"{tool}, part {part} of {options.parts}: {result}")
    clean = sum(result == "clean" for result, _ in parts)
    print(f"{tool:<20} {clean} of {options.parts} parts clean, {known_races} known reports, {time.time() - begin:.0f} s", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"))
    parser.add_argument("--only", default="tests,memcheck,racecheck", help="some of these, and bench")
    parser.add_argument("--parts", type=int, default=56, help="of the op tables under a sanitizer")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="parts at a time")
    parser.add_argument("--limit", type=int, default=900, help="seconds of one program, one part or one workload")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("build/log/gpu-check"))
    parser.add_argument("--check-arguments", action="store_true", help="end when the arguments are understood")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - {"tests", "memcheck", "racecheck", "bench"}
    if unknown:
        parser.error("--only: expected some of tests,memcheck,racecheck,bench; got " + ", ".join(sorted(unknown)))
    return options


def main():
    options, totals = parse(), Totals()
    if options.check_arguments:
        return
    options.log.mkdir(parents=True, exist_ok=True)
    if why := why_no_gpu(options):
        print("gpu-check: " + why)
        sys.exit(1)
    wanted = options.only.split(",")
    if "tests" in wanted:
        run_tests(options, totals)
    for tool in ("memcheck", "racecheck"):
        if tool in wanted:
            run_sanitizer(options, tool, totals)
    if "bench" in wanted:
        gpu_bench.run_benches(options, run, totals)
    print(f"{totals.passed} passed, {totals.failed} failed, {totals.skipped} skipped")
    sys.exit(totals.failed != 0 or totals.passed == 0)


if __name__ == "__main__":
    main()
