#!/usr/bin/env python3
"""Loads folders that Moebius wrote in transformers and compares logits: tests/cli/transformers_slow_test.cc.

    load_in_transformers.py HF_DIR...

Beside each folder lie HF_DIR.tokens, a safetensors file with `tokens`, and HF_DIR.logits, what `moebius forward HF_DIR
--tokens HF_DIR.tokens --out HF_DIR.logits` wrote. Says for each folder what is wrong with it, or "as it should be": keys
that are missing or unexpected, a tokenizer that does not give a text back, logits that differ.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def check(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", experts_implementation="eager",
        torch_dtype=torch.float32)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            return f"{kind}: {info[kind]}"
    if Path(folder, "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = "In the beginning"
        if tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) != text:
            return "the tokenizer does not give the text back"
    with torch.no_grad():
        got = model(load_file(f"{folder}.tokens")["tokens"].long()).logits
    want = load_file(f"{folder}.logits")["logits"]
    difference = (got - want).abs().max().item() / want.abs().max().item()
    return "as it should be" if difference <= 2e-5 else f"logits differ by {difference:.1e} of the largest"


def main():
    for folder in sys.argv[1:]:
        try:
            said = check(folder)
        except Exception as error:  # of any folder, so that one does not hide the others
            said = f"{type(error).__name__}: {error}"
        print(f"{Path(folder).name}: {said}")


if __name__ == "__main__":
    main()
