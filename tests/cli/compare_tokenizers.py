#!/usr/bin/env python3
"""Compares ids of Moebius with those of Hugging Face's tokenizers, on random Unicode and on real text,
for transformers_slow_test.cc.

    compare_tokenizers.py MOEBIUS SCRATCH_DIR TOKENIZER_DIR... -- TEXT_FILE...

Each text is a line of jsonl for `moebius data build`, whose ids are read back from the dataset.
Prints for each tokenizer how many texts differ, or "as it should be".
"""

import json
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

NUM_RANDOM = 3000
PIECES = [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "the", " the", "e\u0301", "\u0323", "\U0001f469\u200d\U0001f467", "\ud55c",
          "12", "345", "\u2581", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<0x0A>", "!", "?!", "\u2028", "\x85", "\u00b2"]


def random_character(rng):
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(PIECES)
    ranges = [(32, 127), (128, 0x600), (0x4E00, 0xA000), (0, 0xD800), (0xE000, 0x20000)]
    return chr(rng.randrange(*rng.choice(ranges)))


def make_texts(files):
    rng = random.Random(1)
    texts = ["".join(random_character(rng) for _ in range(rng.randrange(1, 40))) for _ in range(NUM_RANDOM)]
    for file in files:
        lines = Path(file).read_text(encoding="utf-8").splitlines(keepends=True)
        texts += ["".join(lines[i:i + 20]) for i in range(0, len(lines), 20)]
    return texts


def read_documents(prefix):
    """Yields the documents of a dataset in Megatron-LM's format, without their last id."""
    idx = Path(f"{prefix}.idx").read_bytes()
    code, num_sequences = struct.unpack_from("<BQ", idx, 17)
    lengths = struct.unpack_from(f"<{num_sequences}i", idx, 34)
    ids = memoryview(Path(f"{prefix}.bin").read_bytes()).cast({8: "H", 4: "i"}[code])
    at = 0
    for length in lengths:
        yield list(ids[at:at + length - 1])
        at += length


def compare(moebius, scratch, folder, texts):
    own = scratch / folder.name
    shutil.copytree(folder, own)
    tokenizer = Tokenizer.from_file(str(own / "tokenizer.json"))
    any_token = tokenizer.id_to_token(0)
    (own / "tokenizer_config.json").write_text(json.dumps({"eos_token": any_token}))
    (scratch / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    subprocess.run([moebius, "data", "build", "--input", scratch / "texts.jsonl", "--tokenizer", own, "--parse-special",
                    "--out", scratch / "set", "--force"], check=True, stdout=subprocess.DEVNULL)
    expected = [ids for ids in (tokenizer.encode(text).ids for text in texts) if ids]  # others have no sequence
    got = list(read_documents(scratch / "set"))
    if len(got) != len(expected):
        return f"{len(got)} documents with ids instead of {len(expected)}"
    wrong = sum(a != b for a, b in zip(got, expected))
    return f"{wrong} of {len(texts)} texts differ" if wrong else "as it should be"


def main():
    moebius, scratch, rest = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    middle = rest.index("--")
    texts = make_texts(rest[middle + 1:])
    for folder in rest[:middle]:
        print(f"{Path(folder).name}: {compare(moebius, scratch, Path(folder), texts)}", flush=True)


if __name__ == "__main__":
    main()
