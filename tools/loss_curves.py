#!/usr/bin/env python3
"""Trains one recipe with several settings and seeds, and compares the losses of evaluations.

    tools/loss_curves.py recipes/demo.toml --out runs/curves \\
        --run bf16 --run fp8_block:precision.recipe=fp8_block --run nvfp4:precision.recipe=nvfp4 \\
        --set run.device=cuda --set train.steps=2000 --set train.eval_every=200 --gpus 4 --at-once 8

A run is NAME or NAME:KEY=VALUE, with several keys after one name as NAME:KEY=VALUE:KEY=VALUE; a value has no
colon there, and --set takes any value. All runs get the keys of --set. The first run is the one to which the others are compared, seed by seed: run.seed gives weights
and data.

OUT/curves.csv has a line for each evaluation: run, seed, step, loss. OUT/train.csv has the mean training loss
of each hundredth of a run. OUT/curves.md is a table: the means over seeds, the losses at the end by seed, and
their distance from the first run. OUT/NAME-SEED has the folder of a run without its checkpoints, which are
removed when it ends, and the output of the program.

A folder OUT/NAME-SEED that exists is removed first.

With --gpus N the processes are spread over N GPUs; without it CUDA_VISIBLE_DEVICES is left as it is. A run that
fails or that --limit ends is missing in the table, and the exit code is 1.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--run", action="append", required=True, metavar="NAME[:KEY=VALUE...]", dest="runs",
                        help="a run; may be given several times")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="keys",
                        help="a key of all runs; may be given several times")
    parser.add_argument("--seeds", default="1,2,3", help="values of run.seed, with commas")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--moebius", type=Path, default=ROOT / "build" / "moebius",
                        help="the program; build/moebius if left out")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs to spread the processes over")
    parser.add_argument("--at-once", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all runs together")
    return parser.parse_args()


class Run:
    def __init__(self, text, seed, out):
        self.name, *self.keys = text.split(":")
        self.seed = seed
        self.folder = out / f"{self.name}-{seed}"
        self.seconds = 0.0
        self.ended = False

    def train(self, options, slots, deadline):
        """Runs the program. A slot is the number of a process among those that run at a time."""
        slot = slots.pop()
        environment = dict(os.environ)
        if options.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(slot % options.gpus)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        keys = [f"run.dir={self.folder / 'run'}", f"run.seed={self.seed}", "checkpoint.every=0", "log.tensorboard=false"]
        command = [options.moebius, "--quiet", "train", options.recipe]
        for key in options.keys + self.keys + keys:
            command += ["--set", key]
        begin = time.monotonic()
        left = deadline - begin
        try:
            with open(self.folder / "output.txt", "w") as output:
                if left > 0:
                    done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False,
                                          timeout=left if left < float("inf") else None)
                    self.ended = done.returncode == 0
        except subprocess.TimeoutExpired:
            pass
        self.seconds = time.monotonic() - begin
        shutil.rmtree(self.folder / "run" / "checkpoints", ignore_errors=True)
        slots.append(slot)
        print(f"{self.name} seed {self.seed}: {'ended' if self.ended else 'FAILED'} after {self.seconds:.1f} s", flush=True)

    def losses(self, kind):
        """Returns {step: loss} of the records of this kind."""
        path = self.folder / "run" / "metrics.jsonl"
        if not path.exists():
            return {}
        records = []
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                pass  # the last line of a run that was ended
        return {r["step"]: r["loss"] for r in records if r["kind"] == kind and r["loss"] is not None}


def write_csv(path, runs, kind, pieces=None):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "seed", "step", "loss"])
        for run in runs:
            losses = run.losses(kind)
            width = max(1, len(losses) // pieces) if pieces else 1
            steps = sorted(losses)
            for i in range(0, len(steps) - width + 1, width):
                piece = steps[i : i + width]
                writer.writerow([run.name, run.seed, piece[-1], f"{statistics.fmean(losses[s] for s in piece):.5f}"])


def table(runs):
    """Returns the lines of a table of the runs that ended. Its columns are up to five steps, evenly spread."""
    groups = {}
    for run in runs:
        if run.ended:
            groups.setdefault(run.name, []).append(run)
    if not groups:
        return ["No run ended."]
    curves = {name: [run.losses("eval") for run in group] for name, group in groups.items()}
    steps = sorted(set.intersection(*(set(curve) for of_name in curves.values() for curve in of_name)))
    if not steps:
        return ["No run has an evaluation; set train.eval_every."]
    shown = sorted({steps[(i + 1) * len(steps) // 5 - 1] for i in range(5)} - {steps[-1]} if len(steps) >= 5 else steps[:-1])
    shown.append(steps[-1])
    first = next(iter(groups))
    base = {run.seed: curve[shown[-1]] for run, curve in zip(groups[first], curves[first])}
    titles = ["run"] + [f"step {step}" for step in shown] + ["seeds at the end", "from the first, mean (each seed)", "seconds"]
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    for name, group in groups.items():
        means = [f"{statistics.fmean(curve[step] for curve in curves[name]):.4f}" for step in shown]
        ends = {run.seed: curve[shown[-1]] for run, curve in zip(group, curves[name])}
        both = [seed for seed in ends if seed in base]
        distance = ""
        if name != first and both:
            mean = statistics.fmean(ends[s] for s in both) / statistics.fmean(base[s] for s in both) - 1
            distance = f"{100 * mean:+.2f} % (" + ", ".join(f"{100 * (ends[s] / base[s] - 1):+.2f}" for s in both) + ")"
        seconds = f"{statistics.fmean(run.seconds for run in group):.1f}"
        lines.append("| " + " | ".join([name, *means, ", ".join(f"{x:.4f}" for x in ends.values()), distance, seconds]) + " |")
    return lines


def main():
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = [Run(text, seed, options.out) for seed in seeds for text in options.runs]
    slots = list(range(options.at_once))[::-1]
    deadline = time.monotonic() + options.limit
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(lambda run: run.train(options, slots, deadline), runs))
    write_csv(options.out / "curves.csv", runs, "eval")
    write_csv(options.out / "train.csv", runs, "train", pieces=100)
    lines = table(runs)
    (options.out / "curves.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if all(run.ended for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
