#!/usr/bin/env python3
"""Times `moebius generate` on a model with random weights, beside what reading the weights allows.

    bench/generation.py [--shape qwen3-30b-a3b] [--layers 4] [--set KEY=VALUE ...] [--texts 1 32]
                        [--device cpu|cuda] [--bandwidth GB/S] [--keep FOLDER] [--json]

It writes a Hugging Face folder of a shape of SHAPES: config.json, and bf16 numbers of either sign with
sizes from 2^-7 to 2^-5. --layers cuts the model, and --set changes another key of its config.json.
Eight layers of qwen3-30b-a3b take 11 GB in the folder of temporary files (TMPDIR), or in --keep, which
is not removed; --write-only ends there.

Texts are generated with few tokens and with many, alternately, at temperature 0. The difference of the
medians has no prompts in it, no loading and no capture of CUDA graphs.

The limit is a pass that does nothing but read weights: attention, norms, routers, the head, and the
experts that its tokens choose, if all are equally likely. Several texts choose more experts than one,
so that a pass of them reads more. The cache of keys and values is not counted.
On a CPU the bandwidth is measured first: each core searches bytes of its own for one that is not there.
"""
import argparse
import json
import math
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
QWEN3 = {"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "max_position_embeddings": 40960, "vocab_size": 151936, "head_dim": 128, "torch_dtype": "bfloat16"}
SHAPES = {
    "qwen3-30b-a3b": {**QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
                      "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                      "num_key_value_heads": 4, "intermediate_size": 6144, "num_experts": 128,
                      "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
                      "tie_word_embeddings": False},
    "qwen3-0.6b": {**QWEN3, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
                   "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "intermediate_size": 3072, "tie_word_embeddings": True},
}
BYTES_END = 256  # the end-of-document id of --tokenizer bytes
BANDWIDTH = {"H100": 3350, "H200": 4800}  # GB/s, of the SXM cards' data sheets
READ_BYTES, READ_RUNS = 1 << 29, 5


def tensors(config):
    """Yields the name and shape of each tensor."""
    hidden, width, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    yield "model.embed_tokens.weight", (vocab, hidden)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{layer}self_attn.{name}_proj.weight", (rows, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, queries)
        for name in ("q", "k"):
            yield f"{layer}self_attn.{name}_norm.weight", (width,)
        if "num_experts" not in config:
            yield from mlp(layer + "mlp.", hidden, config["intermediate_size"])
            continue
        yield layer + "mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from mlp(f"{layer}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])


def mlp(prefix, hidden, inner):
    yield prefix + "gate_proj.weight", (inner, hidden)
    yield prefix + "up_proj.weight", (inner, hidden)
    yield prefix + "down_proj.weight", (hidden, inner)


def read_bytes(config, texts):
    """Returns the bytes of the weights that a pass of one token of each text reads, on average."""
    chosen = 1.0  # the share of the experts that the tokens choose
    if "num_experts" in config:
        chosen = 1 - (1 - config["num_experts_per_tok"] / config["num_experts"]) ** texts
    total = 0.0
    for name, shape in tensors(config):
        is_table = name == "model.embed_tokens.weight" and not config["tie_word_embeddings"]
        if not is_table:  # a pass reads one row for each token
            total += 2 * math.prod(shape) * (chosen if ".experts." in name else 1)
    return total


def random_bf16(count):
    """Returns the bytes of bf16 numbers of either sign, with sizes from 2^-7 to 2^-5."""
    bits = int.from_bytes(random.randbytes(2 * count), "little")
    sign_and_fraction = int.from_bytes(b"\xff\x80" * count, "little")  # and the lowest bit of the exponent
    exponent = int.from_bytes(b"\x00\x3c" * count, "little")
    return (bits & sign_and_fraction | exponent).to_bytes(2 * count, "little")


def write_model(config, folder):
    """Writes config.json and model.safetensors. Tensors are parts of one long row of random numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors(config):
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = memoryview(random_bf16(min(end // 2, 1 << 24) + 12345))
    unfinished = folder / "model.unfinished"
    with open(unfinished, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors(config):
            file.write(tensor_bytes(name, shape, numbers))
    unfinished.rename(folder / "model.safetensors")


def tensor_bytes(name, shape, numbers):
    size, parts = 2 * math.prod(shape), bytearray()
    if name.endswith("norm.weight"):
        return b"\x80\x3f" * math.prod(shape)  # ones
    while len(parts) < size:
        begin = 2 * random.randrange(len(numbers) // 2)
        parts += numbers[begin:begin + size - len(parts)]
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        row = 2 * shape[1]  # of zeros, so that no text ends: its logit is never the largest
        parts[BYTES_END * row:(BYTES_END + 1) * row] = bytes(row)
    return parts


def search(barrier, queue):
    data = bytearray(b"\1") * READ_BYTES
    for _ in range(READ_RUNS):
        barrier.wait()
        begin = time.perf_counter()
        data.find(b"\2")
        queue.put(time.perf_counter() - begin)
        barrier.wait()


def cpu_bandwidth(threads):
    """Returns the GB/s at which cores read memory, the fastest of READ_RUNS."""
    barrier, queue = multiprocessing.Barrier(threads), multiprocessing.Queue()
    readers = [multiprocessing.Process(target=search, args=(barrier, queue)) for _ in range(threads)]
    for reader in readers:
        reader.start()
    seconds = [queue.get() for _ in range(threads * READ_RUNS)]
    for reader in readers:
        reader.join()
    rounds = [max(seconds[i:i + threads]) for i in range(0, len(seconds), threads)]
    return threads * READ_BYTES / min(rounds) / 1e9


def bandwidth(args):
    if args.bandwidth:
        return args.bandwidth, "given"
    if args.device == "cpu":
        return cpu_bandwidth(args.threads), f"measured with {args.threads} processes"
    card = ""
    if shutil.which("nvidia-smi"):
        card = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True,
                              text=True, check=False).stdout
    for name, rate in BANDWIDTH.items():
        if name in card:
            return rate, f"data sheet of {card.splitlines()[0]}"
    return sys.exit(f"generation: expected an H100 or an H200; got {card.strip() or 'none'}; give --bandwidth GB/S")


def seconds_of(args, folder, prompts, texts, tokens):
    """Returns the seconds of all tokens of a run but the first of each text. prompts: the file it writes them to."""
    prompts.write_text("".join(f"text {i:02} of {texts:02}\n" for i in range(texts)))
    command = [args.moebius, "generate", str(folder), "--tokenizer", "bytes", "--prompts", str(prompts), "--json",
               "--temperature", "0", "--max-tokens", str(tokens), "--device", args.device]
    if args.device == "cpu":
        command += ["--threads", str(args.threads)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"(\d+) tokens? in [\d.]+ s, ([\d.]+) tokens/s", run.stderr)
    if run.returncode != 0 or not found:
        sys.exit(f"generation: {' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
    if int(found[1]) != texts * (tokens - 1):
        sys.exit(f"generation: expected {texts * (tokens - 1)} tokens after the first ones; got {found[1]}")
    return int(found[1]) / float(found[2])


def measure(args, config, folder, prompts, rate):
    results = []
    for texts in args.texts:
        runs = {"few_s": [], "many_s": []}
        for _ in range(args.runs):
            for name, tokens in zip(runs, args.tokens):
                runs[name].append(seconds_of(args, folder, prompts, texts, tokens))
        seconds = statistics.median(runs["many_s"]) - statistics.median(runs["few_s"])
        if seconds <= 0:
            sys.exit(f"generation: {args.tokens[1]} tokens took no longer than {args.tokens[0]}; give more --tokens, or "
                     "end other work on the machine")
        speed = texts * (args.tokens[1] - args.tokens[0]) / seconds
        size = read_bytes(config, texts)
        limit = texts * rate * 1e9 / size
        results.append({"texts": texts, "tokens_per_s": speed, "read_bytes": size, "limit_tokens_per_s": limit,
                        "share_of_limit": speed / limit, **runs})
    for result in results:
        result["times_first"] = result["tokens_per_s"] / results[0]["tokens_per_s"]
        result["limit_times_first"] = result["limit_tokens_per_s"] / results[0]["limit_tokens_per_s"]
    return results


def changed(shape, args):
    config = dict(SHAPES[shape])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    for each in args.set:
        key, _, value = each.partition("=")
        if key not in config:
            sys.exit(f"generation: --set {each}: expected a key of the shape, {', '.join(config)}; got {key}")
        try:
            config[key] = json.loads(value)
        except ValueError:
            sys.exit(f"generation: --set {each}: expected a value as JSON has it; got {value or 'none'}")
    if config["vocab_size"] <= BYTES_END:
        sys.exit(f"generation: expected a vocab_size above {BYTES_END}, the ids of bytes; got {config['vocab_size']}")
    return config


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moebius", default=str(ROOT / "build/moebius"))
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4); 0: all of the shape")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 32], help="texts that are generated together")
    parser.add_argument("--tokens", type=int, nargs=2, default=[17, 81], metavar=("FEW", "MANY"))
    parser.add_argument("--runs", type=int, default=3, help="how often each of the two lengths is timed (default 3)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bandwidth", type=float, default=0, help="the memory bandwidth in GB/s; 0: it is measured on a CPU, and taken from the data sheet of an H100 or H200")
    parser.add_argument("--keep", type=pathlib.Path, help="the folder of the model; written if it has none, and kept")
    parser.add_argument("--write-only", action="store_true", help="writes the model to --keep, and ends")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.write_only and not args.keep:
        parser.error("--write-only: expected --keep FOLDER; got none")
    if not 1 < args.tokens[0] < args.tokens[1] or min(args.texts) < 1 or max(args.texts) > 32 or args.runs < 1:
        parser.error("expected --tokens FEW MANY with 1 < FEW < MANY, --texts from 1 to 32, and --runs above 0")
    random.seed(1)
    config = changed(args.shape, args)
    rate, source = (0, "") if args.write_only else bandwidth(args)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or pathlib.Path(temporary)
        config_file = folder / "config.json"
        if config_file.exists() and json.loads(config_file.read_text()) != config:
            sys.exit(f"generation: {folder}: expected a model of these sizes; got another; name a new folder")
        if not (folder / "model.safetensors").exists():
            write_model(config, folder)
        if args.write_only:
            return
        prompts = pathlib.Path(temporary) / "prompts.txt"  # not beside a model that is kept
        results = measure(args, config, folder, prompts, rate)
    result = {"shape": args.shape, "layers": config["num_hidden_layers"], "device": args.device, "bandwidth_gb_s": rate,
              "bandwidth_source": source, "load": os.getloadavg()[0], "results": results}
    if args.json:
        return print(json.dumps(result))
    print(f"{args.shape}, {config['num_hidden_layers']} layers, {args.device}: {rate:.1f} GB/s, {source}; "
          f"load of the machine {result['load']:.1f}")
    print(f"{'texts':>5} {'tokens/s':>10} {'limit':>10} {'share':>6} {'GB a pass':>10} {'times':>6} {'limits':>6}")
    for r in results:
        print(f"{r['texts']:5} {r['tokens_per_s']:10.1f} {r['limit_tokens_per_s']:10.1f} {r['share_of_limit']:6.2f} "
              f"{r['read_bytes'] / 1e9:10.3f} {r['times_first']:6.1f} {r['limit_times_first']:6.1f}")
    print("times: the tokens/s over those of the first row; limits: the same of the limit")


if __name__ == "__main__":
    main()
