#!/usr/bin/env python3
"""Loads a folder that Moebius wrote in transformers and compares logits: tests/cli/finetune_test.cc.

    load_in_transformers.py HF_DIR TOKENS.safetensors OUT.safetensors

OUT is what `moebius forward HF_DIR --tokens TOKENS --out OUT` wrote. Fails when a key is missing or unexpected, when
the tokenizer does not load, or when logits differ.
"""

import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    folder, tokens_path, out_path = sys.argv[1:]
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", torch_dtype=torch.float32)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            sys.exit(f"{kind}: {info[kind]}")
    print("missing and unexpected keys: none")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "In the beginning"
    if tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) != text:
        sys.exit("the tokenizer does not give the text back")
    with torch.no_grad():
        got = model(load_file(tokens_path)["tokens"].long()).logits
    want = load_file(out_path)["logits"]
    difference = (got - want).abs().max().item()
    print(f"largest logit {want.abs().max().item():.4f}, largest difference {difference:.2e}")
    if difference > 1e-4 * want.abs().max().item():
        sys.exit("the logits differ")


if __name__ == "__main__":
    main()
