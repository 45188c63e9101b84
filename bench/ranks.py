#!/usr/bin/env python3
"""Two ranks with a thread each beside one rank with two threads, on recipes/bench_cpu.toml.

    bench/ranks.py [--moebius build/moebius] [--pairs 5] [--launch mpi|tcp|threads] [--json]

The ways take turns, so that what else the machine does falls on all of them; of each run the first step is left out (it
touches memory), and of each way the median of the runs counts, of the ratios the median of the pairs.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
WAYS = {"one rank, two threads": (1, []), "DP2": (2, []), "EP2": (2, ["parallel.ep=2"])}
STEPS = 3


def write_data(moebius, folder):
    random.seed(1)
    words = ["".join(random.choices("etaoinshrdlu", k=random.randint(2, 9))) for _ in range(2000)]
    text = folder / "text"
    text.write_text(" ".join(random.choices(words, k=60000)))
    subprocess.run([moebius, "data", "build", "--input", text, "--tokenizer", "bytes", "--out", folder / "data"],
                   check=True, stdout=subprocess.DEVNULL)


def command(moebius, launch, ranks, words):
    if ranks == 1:
        return [[moebius, *words]], {}
    if launch == "threads":
        return [[moebius, *words, "--ranks", str(ranks)]], {}
    if launch == "mpi":
        return [["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), moebius, *words]], {
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return [[moebius, *words]] * ranks, {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
                                         "MASTER_PORT": str(random.randint(20000, 30000))}


def tokens_per_s(args, folder, ranks, overrides):
    run = pathlib.Path(tempfile.mkdtemp(dir=folder))
    sets = ["train.global_batch=16", f"train.steps={STEPS}", "optimizer.warmup_steps=1", f"run.threads={2 // ranks}",
            f"run.dir={run}", f'data.train=["{folder}/data"]', *overrides]
    words = ["train", str(ROOT / "recipes/bench_cpu.toml")] + [word for each in sets for word in ("--set", each)]
    commands, environment = command(args.moebius, args.launch, ranks, words)
    processes = [subprocess.Popen(c, env={**os.environ, **environment, **({"RANK": str(r)} if len(commands) > 1 else {})},
                                  stderr=subprocess.PIPE, text=True) for r, c in enumerate(commands)]
    for process in processes:
        _, errors = process.communicate()
        if process.returncode != 0:
            sys.exit(f"bench: {' '.join(process.args)} ended with {process.returncode}:\n{errors}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run)  # a checkpoint of gigabytes
    steps = [line["step_time_s"] for line in lines if line["kind"] == "train"][1:]
    return 16 * 512 * len(steps) / sum(steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moebius", default=str(ROOT / "build/moebius"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--launch", choices=["mpi", "tcp", "threads"], default="mpi")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    speeds = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        write_data(args.moebius, pathlib.Path(folder))
        for _ in range(args.pairs):
            for way, (ranks, overrides) in WAYS.items():
                speeds[way].append(tokens_per_s(args, pathlib.Path(folder), ranks, overrides))
                print(f"{way}: {speeds[way][-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    alone = next(iter(WAYS))
    ratio = {way: statistics.median(a / b for a, b in zip(speeds[way], speeds[alone])) for way in WAYS}
    if args.json:
        return print(json.dumps({"launch": args.launch, "tokens_per_s": speeds, "ratio": ratio}))
    for way in WAYS:
        each = ", ".join(f"{speed:.0f}" for speed in speeds[way])
        print(f"{way:22} {statistics.median(speeds[way]):8.0f} tokens/s  {ratio[way]:.3f} of one rank  ({each})")


main()
