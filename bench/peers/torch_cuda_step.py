#!/usr/bin/env python3
"""Times whole training steps of transformers on one GPU, for the models of recipes/bench_*.toml.

Weights, gradients and fused AdamW states are bf16: 8 bytes per parameter. Moebius has 18, with f32
masters, gradients and moments. So this peer does less work.
Tokens are random. The optimizer is timed separately from the forward and backward of a micro-batch.
tokens/s are those of a step of --global-batch sequences.
--liger uses Liger-Kernel's norms, RoPE, SwiGLU and fused cross-entropy.
Prints one JSON object per model. Exit code 3 when torch, transformers or a GPU is missing.
"""

import argparse
import gc
import json
import statistics
import sys

try:
    import torch
    from transformers import (OlmoeConfig, OlmoeForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig,
                              Qwen3MoeForCausalLM)
except ImportError as error:
    print(f"torch_cuda_step: needs the Python packages torch and transformers; got: {error}", file=sys.stderr)
    sys.exit(3)

QWEN3 = Qwen3MoeConfig(vocab_size=151936, hidden_size=2048, num_hidden_layers=8, num_attention_heads=32,
                       num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
                       moe_intermediate_size=768, norm_topk_prob=True, tie_word_embeddings=False, use_cache=False)
DENSE = Qwen2Config(vocab_size=151936, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16,
                    num_key_value_heads=2, intermediate_size=11008, tie_word_embeddings=True, use_cache=False)
OLMOE = OlmoeConfig(vocab_size=50304, hidden_size=2048, num_hidden_layers=16, num_attention_heads=16,
                    num_key_value_heads=16, intermediate_size=1024, num_experts=64, num_experts_per_tok=8,
                    use_cache=False)
# config, class, sequence length, sequences of a micro-batch and of a step, GFLOP per token as
# Moebius counts, Liger's name
MODELS = {
    "qwen3-30b-a3b-8layers": (QWEN3, Qwen3MoeForCausalLM, 4096, 4, 32, 5.390, "qwen3_moe"),
    "dense-3b": (DENSE, Qwen2ForCausalLM, 1024, 16, 128, 18.967, "qwen2"),
    "olmoe-1b-7b": (OLMOE, OlmoeForCausalLM, 4096, 2, 32, 7.866, "olmoe"),
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--micro-batch", type=int, help="sequences")
    parser.add_argument("--runs", type=int, default=5, help="micro-batches timed, after two")
    parser.add_argument("--experts", default="grouped_mm")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def build(config, make, liger_name, args):
    if args.liger:
        import liger_kernel.transformers as liger
        # Liger's fused MoE is slower than grouped_mm here.
        getattr(liger, "apply_liger_kernel_to_" + liger_name)(**({"swiglu": False} if "moe" in liger_name else {}))
    torch.manual_seed(0)
    options = {} if make is Qwen2ForCausalLM else {"experts_implementation": args.experts}
    with torch.device("cuda"):
        model = make._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa", **options)
    return model.train()


def milliseconds(body):
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    body()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def measure(name, args):
    config, make, S, B, batch, gflop, liger_name = MODELS[name]
    B = args.micro_batch or B
    model = build(config, make, liger_name, args)
    run = torch.compile(model) if args.compile else model
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []

    def micro_batch():
        tokens = torch.randint(0, config.vocab_size, (B, S), device="cuda")
        loss = run(input_ids=tokens, labels=tokens).loss
        losses.append(loss.detach())
        loss.backward()

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()

    for _ in range(2):  # the second run has the optimizer's memory
        micro_batch()
        update()
        adamw.zero_grad(set_to_none=False)
    micro_ms = statistics.median(milliseconds(micro_batch) for _ in range(args.runs))
    update_ms = statistics.median(milliseconds(update) for _ in range(3))
    step_s = (batch // B * micro_ms + update_ms) / 1e3
    rate = batch * S / step_s
    return {"model": name, "liger": args.liger, "compile": args.compile, "micro_batch": B, "seq_len": S,
            "global_batch": batch, "micro_batch_ms": micro_ms, "update_ms": update_ms, "tokens_per_s": rate,
            "model_tflops": rate * gflop / 1e3, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "parameters": sum(p.numel() for p in model.parameters()), "first_loss": losses[0].item()}


def main():
    args = parse_args()
    if not torch.cuda.is_available():
        print("torch_cuda_step: needs a GPU", file=sys.stderr)
        return 3
    for name in args.models:
        try:
            print(json.dumps(measure(name, args)), flush=True)
        except Exception as error:
            print(json.dumps({"model": name, "skipped": f"{type(error).__name__}: {str(error)[:200]}"}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return 0


if __name__ == "__main__":
    sys.exit(main())
