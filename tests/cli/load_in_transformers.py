#!/usr/bin/env python3
"""Loads folders that Moebius wrote in transformers and compares logits, for
tests/cli/transformers_slow_test.cc.

    load_in_transformers.py HF_DIR...

Two files are beside each folder. HF_DIR.tokens is a safetensors file with `tokens`. HF_DIR.logits
is the output of `moebius forward HF_DIR --tokens HF_DIR.tokens --out HF_DIR.logits`.
Prints for each folder an error, or "as it should be". Errors are missing or unexpected keys, a
tokenizer that does not give a text back, and different logits.
"""

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config


def is_of_mtp(key, config):
    """Returns whether the key belongs to a module of multi-token prediction, which comes after the
    last layer.
    transformers ignores layer 61, where the released DeepSeek-V3 has its module. It reports the
    modules of a smaller model.
    """
    layer = re.match(r"model\.layers\.(\d+)\.", key)
    modules = getattr(config, "num_nextn_predict_layers", 0) or 0
    return layer is not None and 0 <= int(layer.group(1)) - config.num_hidden_layers < modules


def check(folder):
    options = {}
    if getattr(AutoConfig.from_pretrained(folder), "quantization_config", None):
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)  # its FP8 products need a GPU
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", experts_implementation="eager",
        torch_dtype=torch.float32, **options)
    info["unexpected_keys"] = [key for key in info["unexpected_keys"] if not is_of_mtp(key, model.config)]
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
        except Exception as error:  # one folder must not hide the others
            said = f"{type(error).__name__}: {error}"
        print(f"{Path(folder).name}: {said}")


if __name__ == "__main__":
    main()
