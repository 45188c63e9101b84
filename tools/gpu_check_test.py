#!/usr/bin/env python3
"""Tests gpu_check.py on programs that only print: what it counts, and what it treats as a failure."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import gpu_bench
import gpu_check

PROGRAM = """#!/bin/sh
case "$*" in
  *{first}) {gpu} ;;
esac
for word in "$@"; do
  case "$word" in --gtest_output=json:*) cat >"${{word#--gtest_output=json:}}" <<'J'
{report}
J
  esac
done
[ -n "$GTEST_SHARD_INDEX" ] && echo "[==========] 2 tests from 1 test suite ran."
exit {status}
"""
GPU = "echo '[  PASSED  ] 1 test.'; exit 0"
NO_GPU = "printf 'accelerator_test.cc:20: Skipped\\nno GPU can be used\\n[  SKIPPED ] 1 test\\n'; exit 0"
GOOD = '{"testsuites": [{"testsuite": [{"result": "COMPLETED"}, {"result": "COMPLETED"}, {"result": "SKIPPED"}]}]}'
BAD = '{"testsuites": [{"testsuite": [{"result": "COMPLETED", "failures": [{}]}, {"result": "COMPLETED"}]}]}'
KNOWN = "========= Error: Race reported between Read access at nvjet_sm90_tst_192x96+0x3a0"
OURS = ("========= Error: Race reported between Write access at void moebius::cuda::<unnamed>::produce_queries<Tile<64>>(Shared &)"
        "+0x10 in attention_bwd.cu:97")
NAMED = "========= Error: Race reported between Write access at void moebius::cuda::copy_kernel<cudnn_tag>(nvjet_args)+0x10 in x.cu:9"
NEW = "========= Error: Race reported between Write access at moebius::cuda::rms_norm_fwd_kernel+0x10 in norm.cu:9"
NOTE = "========= Error: Race reported between Read access at moebius::cuda::sm90::<unnamed>::read_note(unsigned int)+0x1c70 in w.cu:189"
AND_WRITE = "=========     and Write access at moebius::cuda::sm90::<unnamed>::write_note(unsigned int, const moebius::cuda::sm90::<unnamed>::TileNote &)+0xc0 in w.cu:182 [128 hazards]"
AND_OTHER = "=========     and Write access at moebius::cuda::sm90::<unnamed>::copy_last_rows(unsigned int)+0xc0 in w.cu:160 [1 hazards]"
INVALID = "========= Invalid __global__ read of size 4 bytes"

# A program `moebius` that prints the results of the workloads, by their names. Steps may end
# otherwise.
MOEBIUS = """#!/bin/sh
echo 'a line of the log' >&2
case "$2" in
  step) {end}
  cat <<'J'
{step}
J
  ;;
  attention) cat <<'J'
{attention}
J
  ;;
  *) echo '{layer}' ;;
esac
"""
MACHINE = "NVIDIA H200, CUDA 13.0, driver 580.1; a CPU"
LINE = {"median_ms": 2.5, "gflops_per_s": 650400.0, "share_of_peak": 0.875, "share_of_roofline": 0.5, "relative_error": 0.00213}
STEP = {"bench": "step", "machine": MACHINE, "recipe": "/x/bench_dense_3b.toml", "median_ms": 512.25, "tokens_per_s": 31984.4,
        "model_tflops": 480.2, "ratio_to_gemm": 0.7, "share_of_roofline": 0.8}
ATTENTION = {"bench": "attention", "machine": MACHINE, "shape": "olmoe", "window": 7, "documents": 4,
             "lines": [{**LINE, "name": "attention_fwd"}]}
LAYER = {"bench": "moe-layer", "machine": MACHINE, "shape": "olmoe", "routing": "zipf",
         "lines": [{**LINE, "name": "moe_layer_fwd"}, {**LINE, "name": "moe_layer_fwd_bwd"}]}
ROWS = ["| moe_layer_fwd_bwd | olmoe, zipf | 2.500 | 650 | 87.5 % | 50.0 % | 2.1e-03 |  |",
        "| attention_fwd | olmoe, window 7, 4 documents | 2.500 | 650 | 87.5 % | 50.0 % | 2.1e-03 |  |",
        "| step | bench_dense_3b | 512.2 | 480 | 70.0 % | 80.0 % |  | 31984 |"]
CALLS, STEPS = len(gpu_bench.workloads()), len(gpu_bench.RECIPES)

# what it shows, GPU, report, status, first output of the sanitizer, only, exit status, words
CASES = [
    ("no GPU", NO_GPU, GOOD, 0, "", "tests", 1, "gpu-check: no GPU can be used"),
    ("all good", GPU, GOOD, 0, "", "tests,memcheck", 0, f"{2 * len(gpu_check.PROGRAMS) + 2} passed, 0 failed, {len(gpu_check.PROGRAMS)} skipped"),
    ("a failed test", GPU, BAD, 1, "", "tests", 1, f"{len(gpu_check.PROGRAMS)} passed, {len(gpu_check.PROGRAMS)} failed, 0 skipped"),
    ("a program that dies", GPU, GOOD, 139, "", "tests", 1, f"{len(gpu_check.PROGRAMS)} passed, {len(gpu_check.PROGRAMS)} failed"),
    ("a broken report", GPU, "{", 1, "", "tests", 1, f"0 passed, {len(gpu_check.PROGRAMS)} failed, 0 skipped"),
    ("a known race", GPU, GOOD, 99, f"echo '{KNOWN}'", "racecheck", 0, "2 of 2 parts clean, 2 known reports"),
    ("a known race of ours", GPU, GOOD, 99, f"echo '{OURS}'", "racecheck", 0, "2 of 2 parts clean, 2 known reports"),
    ("a known name elsewhere", GPU, GOOD, 99, f"echo '{NAMED}'", "racecheck", 1, "1 findings, the first: Race reported"),
    ("a known race, and an end of another kind", GPU, GOOD, 139, f"echo '{KNOWN}'", "racecheck", 1, "exit status 139: the end of"),
    ("a known pair", GPU, GOOD, 99, f"echo '{NOTE}'; echo '{AND_WRITE}'; echo '{AND_WRITE}'", "racecheck", 0, "2 of 2 parts clean, 2 known reports"),
    ("a known name with a stranger", GPU, GOOD, 99, f"echo '{NOTE}'; echo '{AND_WRITE}'; echo '{AND_OTHER}'", "racecheck", 1, "1 findings, the first: Race reported"),
    ("a known name alone", GPU, GOOD, 99, f"echo '{NOTE}'", "racecheck", 1, "1 findings, the first: Race reported"),
    ("a new race", GPU, GOOD, 0, f"echo '{KNOWN}'; echo '{NEW}'", "racecheck", 1, "1 findings, the first: Race reported between Write access at moebius::cuda::rms_norm"),
    ("an invalid read", GPU, GOOD, 0, f"echo '{INVALID}'", "memcheck", 1, "0 passed, 2 failed, 0 skipped"),
    ("a part that takes too long", GPU, GOOD, 0, "sleep 30", "racecheck", 1, "not ended within 1 s"),
    ("workloads", GPU, GOOD, 0, "", "bench", 0, [*ROWS, f", {MACHINE}\n", f"{CALLS} passed, 0 failed, 0 skipped"]),
    ("workloads that fail", GPU, GOOD, 0, "exit 5", "bench", 1, [*ROWS[:2], "exit status 5: a line of the log", f"{CALLS - STEPS} passed, {STEPS} failed"]),
    ("workloads that take too long", GPU, GOOD, 0, "sleep 30", "bench", 1, ["not ended within 1 s", f"{CALLS - STEPS} passed, {STEPS} failed"]),
    ("a check that is not there", GPU, GOOD, 0, "", "tests,speed", 2, []),
    ("a sanitizer that fails", GPU, GOOD, 0, "exit 3", "memcheck", 1, "a test failed: the end of"),
]


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def moebius_that(ends):
    """Prints canned results, and ends with a given exit status."""
    texts = {name: json.dumps(result) for name, result in (("step", STEP), ("attention", ATTENTION), ("layer", LAYER))}
    return MOEBIUS.format(**texts, end=ends)


def is_kept(log):
    """bench.json has the output of every workload, and bench.md the table."""
    kept = json.loads((log / "bench.json").read_text())
    results = [bench["result"] for bench in kept["benches"]]
    return (len(results) == CALLS and results[0] == LAYER and results[-1] == STEP and set(kept) == {"date", "commit", "benches"}
            and ROWS[0] in (log / "bench.md").read_text())


def is_in_sources(test):
    """Whether the test that gpu_check.py asks for a GPU is still one of the accelerator's tests."""
    suite, name = test.split(".")
    return f"TEST_F({suite}, {name})" in (gpu_bench.ROOT / "src/device/accelerator_test.cc").read_text()


def check(name, gpu, report, status, said, only, expected, words):
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for program, _ in gpu_check.PROGRAMS:
            write_program(folder / "tests" / program, PROGRAM.format(first=gpu_check.FIRST_TEST, gpu=gpu, report=report, status=status))
        write_program(folder / "moebius", moebius_that(said))
        write_program(folder / "bin" / "compute-sanitizer", "#!/bin/sh\n" + said + '\nshift 4\nexec "$@"\n')
        env = dict(os.environ, PATH=f"{folder / 'bin'}:{os.environ['PATH']}")
        limit = "1" if "sleep" in said else "60"
        ran = subprocess.run([sys.executable, gpu_check.__file__, "--build", str(folder), "--only", only, "--parts", "2",
                              "--limit", limit, "--log", str(folder / "log")], env=env, capture_output=True, text=True, check=False)
        good = ran.returncode == expected and all(word in ran.stdout for word in ([words] if isinstance(words, str) else words))
        good = good and ("passed, 0 failed" not in ran.stdout or only != "bench" or is_kept(folder / "log"))
    if not good:
        print(f"{name}: expected exit status {expected} and '{words}'; got {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    return good


def main():
    results = [check(*case) for case in CASES] + [is_in_sources(gpu_check.FIRST_TEST)]
    print(f"gpu_check: {sum(results)} of {len(results)} cases right")
    sys.exit(not all(results))


main()
