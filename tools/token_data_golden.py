#!/usr/bin/env python3
"""Writes token datasets as Megatron-LM's tools/preprocess_data.py --append-eod makes them, with the
Hugging Face library.

    tools/token_data_golden.py [DIR]   rewrites DIR (default tests/golden/data/token_data)

DIR/documents.jsonl holds the texts of tests/golden/data/tokenizers, some of them empty.
DIR/STYLE.bin and DIR/STYLE.idx are the dataset that the tokenizer of that style gives.
Needs numpy and tokenizers. The same versions write the same bytes.
"""

import json
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data"
END_OF_DOCUMENT = {"llama3": "<|end_of_text|>", "qwen2": "<|endoftext|>", "gpt2": "<|endoftext|>"}
DTYPE_CODE = {np.uint16: 8, np.int32: 4}


def encode(tokenizer, eod, text):
    """Yields one sequence per document. A text without ids is a document without a sequence."""
    ids = tokenizer.encode(text).ids
    return ids + [eod] if ids else []


def write_dataset(prefix, documents, vocab_size):
    dtype = np.uint16 if vocab_size < 65500 else np.int32
    lengths = [len(ids) for ids in documents if ids]
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * np.dtype(dtype).itemsize
    document_indices = np.concatenate([[0], np.cumsum([1 if ids else 0 for ids in documents])])
    with open(f"{prefix}.bin", "wb") as out:
        for ids in documents:
            out.write(np.array(ids, dtype=dtype).tobytes())
    with open(f"{prefix}.idx", "wb") as out:
        out.write(b"MMIDIDX\x00\x00")
        out.write(np.uint64(1).tobytes())
        out.write(np.uint8(DTYPE_CODE[dtype]).tobytes())
        out.write(np.uint64(len(lengths)).tobytes())
        out.write(np.uint64(len(document_indices)).tobytes())
        out.write(np.array(lengths, dtype=np.int32).tobytes())
        out.write(pointers.astype(np.int64).tobytes())
        out.write(document_indices.astype(np.int64).tobytes())


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / "token_data"
    out.mkdir(parents=True, exist_ok=True)
    texts = json.loads((DATA / "tokenizers" / "texts.json").read_text(encoding="utf-8"))
    texts = [text for i, text in enumerate(texts) for text in ([text, ""] if i % 7 == 0 else [text])]
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    (out / "documents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for style, end in END_OF_DOCUMENT.items():
        tokenizer = Tokenizer.from_file(str(DATA / "tokenizers" / style / "tokenizer.json"))
        eod = tokenizer.token_to_id(end)
        documents = [encode(tokenizer, eod, text) for text in texts]
        write_dataset(out / style, documents, tokenizer.get_vocab_size())


if __name__ == "__main__":
    main()
