#!/usr/bin/env python3
"""Compares two ranks with a thread each with one rank with two threads, on recipes/bench_cpu.toml.

    bench/ranks.py [--moebius build/moebius] [--data words letters] [--pairs 5] [--launch
    mpi|tcp|threads] [--json]

words: ids over the whole vocabulary of the recipe, with the frequencies of words in a text (Zipf's
law with Mandelbrot's offset).
letters: a text of 13 letters, one id each. The routers of the first steps see only 13 different
embeddings. So experts get very uneven shares, and the ranks that hold them wait for each other. It
is the worst case.

The ways take turns, so that other load on the machine slows all of them.
The first step of each run is left out, because it touches memory.
The result of a way is the median of its runs, and a ratio is the median of the pairs.
A run ends with a checkpoint of 2.5 GB in the folder of temporary files (TMPDIR).
"""
import argparse
import array
import json
import os
import pathlib
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
WAYS = {"one rank, two threads": (1, []), "DP2": (2, []), "EP2": (2, ["parallel.ep=2"])}
STEPS = 3
VOCABULARY = 8192  # of the recipe
DOCUMENTS, DOCUMENT_TOKENS = 100, 1000


# The format is Megatron's, described in docs/reference/formats.md: 8 is the code of uint16.
def write_words(_, prefix):
    frequencies = [1 / (rank + 2.7) for rank in range(1, VOCABULARY + 1)]
    ids = random.choices(range(VOCABULARY), frequencies, k=DOCUMENTS * DOCUMENT_TOKENS)
    lengths = array.array("i", [DOCUMENT_TOKENS] * DOCUMENTS)
    pointers = array.array("q", range(0, 2 * len(ids), 2 * DOCUMENT_TOKENS))
    documents = array.array("q", range(DOCUMENTS + 1))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, DOCUMENTS, DOCUMENTS + 1)
    pathlib.Path(f"{prefix}.bin").write_bytes(array.array("H", ids).tobytes())
    pathlib.Path(f"{prefix}.idx").write_bytes(header + b"".join(a.tobytes() for a in (lengths, pointers, documents)))


def write_letters(moebius, prefix):
    words = ["".join(random.choices("etaoinshrdlu", k=random.randint(2, 9))) for _ in range(2000)]
    text = pathlib.Path(f"{prefix}.txt")
    text.write_text(" ".join(random.choices(words, k=60000)))
    subprocess.run([moebius, "data", "build", "--input", text, "--tokenizer", "bytes", "--out", prefix],
                   check=True, stdout=subprocess.DEVNULL)


DATA = {"words": write_words, "letters": write_letters}


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


def measured(args, folder, data, ranks, overrides):
    """Returns the records of the measured steps."""
    run = pathlib.Path(tempfile.mkdtemp(dir=folder))
    sets = ["train.global_batch=16", f"train.steps={STEPS}", "optimizer.warmup_steps=1", f"run.threads={2 // ranks}",
            f"run.dir={run}", f'data.train=["{folder}/{data}"]', *overrides]
    words = ["train", str(ROOT / "recipes/bench_cpu.toml")] + [word for each in sets for word in ("--set", each)]
    commands, environment = command(args.moebius, args.launch, ranks, words)
    processes = [subprocess.Popen(c, env={**os.environ, **environment, **({"RANK": str(r)} if len(commands) > 1 else {})},
                                  stderr=subprocess.PIPE, text=True) for r, c in enumerate(commands)]
    for process in processes:
        _, errors = process.communicate()
        if process.returncode != 0:
            sys.exit(f"bench: {' '.join(process.args)} ended with {process.returncode}:\n{errors}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run)
    return [line for line in lines if line["kind"] == "train"][1:]


def tokens_per_s(steps):
    return 16 * 512 * len(steps) / sum(step["step_time_s"] for step in steps)


def busiest(step, ep):
    """Returns the rows of the busiest rank over the mean. The ep ranks hold blocks of experts and wait
    for each other in every layer.
    """
    most = total = 0
    for layer in step["moe"]:
        load, here = layer["load"], len(layer["load"]) // ep
        most += max(sum(load[i:i + here]) for i in range(0, len(load), here))
        total += sum(load)
    return most * ep / total


def detail(steps):
    """Describes the work and the waiting time of each rank in the last step."""
    ranks, ep = steps[-1].get("ranks"), len(steps[-1].get("tokens_of_ep_rank", []))
    if not ranks:
        return ""
    text = "; each rank's passes " + ", ".join(f"{s:.2f}" for s in ranks["passes_s"])
    text += " s, optimizer " + ", ".join(f"{s:.2f}" for s in ranks["optimizer_s"])
    text += " s, of these in communication " + ", ".join(f"{s:.2f}" for s in ranks["waiting_s"]) + " s"
    return text + (f"; experts' rows of the busier rank {busiest(steps[-1], ep):.2f} of the mean" if ep > 1 else "")


def compare(args, folder, data):
    DATA[data](args.moebius, folder / data)
    speeds = {way: [] for way in WAYS}
    for _ in range(args.pairs):
        for way, (ranks, overrides) in WAYS.items():
            steps = measured(args, folder, data, ranks, overrides)
            speeds[way].append(tokens_per_s(steps))
            print(f"{data}, {way}: {speeds[way][-1]:.0f} tokens/s{detail(steps)}", file=sys.stderr, flush=True)
    alone = next(iter(WAYS))
    ratio = {way: statistics.median(a / b for a, b in zip(speeds[way], speeds[alone])) for way in WAYS}
    return {"data": data, "tokens_per_s": speeds, "ratio": ratio}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moebius", default=str(ROOT / "build/moebius"))
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--launch", choices=["mpi", "tcp", "threads"], default="mpi")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    random.seed(1)
    with tempfile.TemporaryDirectory() as folder:
        results = [compare(args, pathlib.Path(folder), data) for data in args.data]
    if args.json:
        return print(json.dumps({"launch": args.launch, "results": results}))
    for result in results:
        for way, speeds in result["tokens_per_s"].items():
            each = ", ".join(f"{speed:.0f}" for speed in speeds)
            print(f"{result['data']:8} {way:22} {statistics.median(speeds):8.0f} tokens/s  "
                  f"{result['ratio'][way]:.3f} of one rank  ({each})")


main()
