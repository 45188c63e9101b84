"""Runs the named workloads on a GPU, one after the other, and writes one table. It serves
`gpu_check.py --only bench`.

Each workload is a call of `moebius bench`, which compares its results with plain loops and fails
when they are wrong.
bench.json holds all outputs, and bench.md the table.
"""
import datetime
import json
import pathlib
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPES = ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3-8-local", "olmoe", "gpt-oss-20b"]
RECIPES = ["bench_dense_3b", "bench_olmoe_1b_7b", "bench_qwen3_30b_a3b_8layers", "bench_gpt_oss_20b_8layers"]
ATTENTION = [["--shape", "qwen3-30b-a3b"], ["--shape", "deepseek-v3-8-local"],
             ["--shape", "qwen3-30b-a3b", "--window", "1024"], ["--shape", "qwen3-30b-a3b", "--documents", "4"]]
COLUMNS = ["bench", "of", "ms", "TFLOP/s", "of peak", "of roofline", "relative error", "tokens/s"]


def workloads():
    """Returns the arguments of each call, without the device."""
    layers = [["moe-layer", "--shape", shape, "--routing", routing] for shape in SHAPES for routing in ("balanced", "zipf")]
    experts = [["experts", "--shape", shape] for shape in SHAPES]
    steps = [["step", "--recipe", str(ROOT / "recipes" / (name + ".toml"))] for name in RECIPES]
    return layers + experts + [["attention", *case] for case in ATTENTION] + steps


def commit():
    """Returns the commit of the sources. It is empty where git does not know them."""
    try:
        ran = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True,
                             text=True, check=False)
    except OSError:
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def result_of(text):
    """Returns the object in the output of a bench, or None if there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                return None
    return None


def case_of(result):
    """Describes the settings of a workload in a few words."""
    if "recipe" in result:
        return pathlib.Path(result["recipe"]).stem
    words = [result["shape"], result.get("routing", "")]
    words += [f"window {result['window']}"] if result.get("window", 0) else []
    words += [f"{result['documents']} documents"] if result.get("documents", 1) > 1 else []
    return ", ".join(filter(None, words))


def percent(share):
    return f"{100 * share:.1f} %" if share else ""


def rows_of(result):
    """Returns the lines for the table. Of a layer it is only the backward's line, whose time includes
    the forward pass.
    """
    case = case_of(result)
    if result["bench"] == "step":
        return [["step", case, f"{result['median_ms']:.1f}", f"{result['model_tflops']:.3g}", percent(result["ratio_to_gemm"]),
                 percent(result.get("share_of_roofline")), "", f"{result['tokens_per_s']:.0f}"]]
    return [[line["name"], case, f"{line['median_ms']:.3f}", f"{line['gflops_per_s'] / 1e3:.3g}", percent(line["share_of_peak"]),
             percent(line.get("share_of_roofline")), f"{line['relative_error']:.1e}", ""]
            for line in result["lines"] if not line["name"].startswith("moe_layer_fwd") or "bwd" in line["name"]]


def table(rows):
    lines = [COLUMNS, ["---"] * 2 + ["---:"] * (len(COLUMNS) - 2)] + rows
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(date, of_commit, benches):
    """Returns the head and the table of all workloads that gave a result."""
    results = [bench["result"] for bench in benches if bench["result"]]
    machine = results[0]["machine"] if results else "no result"
    head = f"{date}, {'commit ' + of_commit if of_commit else 'commit not known'}, {machine}"
    return head + "\n\n" + table([row for result in results for row in rows_of(result)])


def run_one(options, run, arguments, number, device):
    """Runs one workload and returns what bench.json says of it. run: a command with a limit of time,
    as in gpu_check.py.
    """
    command, log, begin = ["bench", *arguments, "--device", device, "--json"], options.log / f"bench.{number}.txt", time.time()
    status = run([options.build / "moebius", *command], options.limit, log)
    text = log.read_text(encoding="utf-8", errors="replace")
    result = result_of(text) if status == 0 else None
    if status is None:
        print(f"moebius {' '.join(command)}: not ended within {options.limit} s")
    elif result is None:
        print(f"moebius {' '.join(command)}: exit status {status}: {' '.join(text.splitlines()[-1:])[:300]}")
    return {"command": command, "status": status, "seconds": round(time.time() - begin, 1), "result": result}


def run_benches(options, run, totals, calls=None, device="cuda"):
    """Runs all workloads. One that fails, or prints nothing, is a failed check."""
    if not (options.build / "moebius").exists():
        print(f"{options.build / 'moebius'} is not there: build all of it")
        totals.failed += 1
        return
    date, of_commit = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), commit()
    benches = [run_one(options, run, call, number, device) for number, call in enumerate(calls or workloads())]
    good = sum(bench["result"] is not None for bench in benches)
    totals.passed += good
    totals.failed += len(benches) - good
    (options.log / "bench.json").write_text(json.dumps({"date": date, "commit": of_commit, "benches": benches}, indent=1) + "\n",
                                            encoding="utf-8")
    text = report(date, of_commit, benches)
    (options.log / "bench.md").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\n\nbench{'':<15} {good} of {len(benches)} workloads, {options.log / 'bench.json'}", flush=True)
