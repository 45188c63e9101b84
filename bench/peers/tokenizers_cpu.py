#!/usr/bin/env python3
"""Times a tokenizer.json on one core: the Hugging Face library, and `moebius data build` on the same
text.

    bench/peers/tokenizers_cpu.py DIR TEXT [--moebius build/moebius]

TEXT is encoded in documents of about 10 kB of whole lines, like training text. DIR must name an
eos_token.
The result is one JSON object on standard output. It has MB for each second of CPU time, the best of
--runs, and whether both give the same number of ids.
- moebius_build_mb_per_s is the whole command (reading jsonl, encoding, writing the dataset) less
  the same on a single line.
- moebius_encode_mb_per_s compares with the library's figure. It subtracts the time of the command
  on the same text with --tokenizer bytes.
Exit code 3 when the package tokenizers is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import tokenizers
except ImportError as error:
    print(f"tokenizers_cpu: needs the Python package tokenizers; got: {error}", file=sys.stderr)
    sys.exit(3)

DOCUMENT_BYTES = 10_000


def split_documents(text):
    documents, lines, size = [], [], 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line.encode())
        if size >= DOCUMENT_BYTES:
            documents.append("".join(lines))
            lines, size = [], 0
    return documents + (["".join(lines)] if lines else [])


def best(runs, work):
    times = []
    for _ in range(runs):
        begin = sum(os.times()[:4])
        result = work()
        times.append(sum(os.times()[:4]) - begin)
    return min(times), result


def build(moebius, folder, documents, tokenizer):
    """Returns a function that runs the command and returns its output as an object. The dataset stays
    in the folder.
    """
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (folder / "text.jsonl").write_text(lines)
    command = [moebius, "data", "build", "--input", folder / "text.jsonl", "--tokenizer", tokenizer, "--out", folder / "set",
               "--force", "--threads", "1", "--json"]
    return lambda: json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--moebius", type=Path, default=Path("build/moebius"))
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    peer = tokenizers.Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    documents = split_documents(args.text.read_text(encoding="utf-8", errors="ignore"))
    megabytes = sum(len(document.encode()) for document in documents) / 1e6
    seconds, tokens = best(args.runs, lambda: sum(len(peer.encode(document).ids) for document in documents))
    report = {"text_mb": megabytes, "vocabulary": peer.get_vocab_size(), "tokenizers": tokenizers.__version__,
              "tokenizers_mb_per_s": megabytes / seconds}
    with tempfile.TemporaryDirectory() as folder:
        start, _ = best(args.runs, build(args.moebius, Path(folder), ["a line"], args.tokenizer))
        whole, info = best(args.runs, build(args.moebius, Path(folder), documents, args.tokenizer))
        around, _ = best(args.runs, build(args.moebius, Path(folder), documents, "bytes"))
    report |= {"moebius_build_mb_per_s": megabytes / (whole - start),
               "moebius_encode_mb_per_s": megabytes / (whole - start - around),
               "same_number_of_ids": info["tokens"] - info["documents"] == tokens}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
