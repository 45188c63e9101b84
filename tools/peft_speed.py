#!/usr/bin/env python3
"""Measures LoRA training with PEFT and transformers, beside `moebius bench step` with [lora].

    tools/peft_speed.py [--layers 8] [--rank 16] [--seq 4096] [--batch 8] [--steps 3] [--experts MODE]

The model has the shape of Qwen3-30B-A3B with fewer layers, random bf16 weights, and adapters on all of
attention and of the experts. A step is forward, backward and AdamW on the adapters. The batch is halved
until a step fits the GPU. MODE is how transformers 5 computes experts (eager, batched_mm, grouped_mm);
transformers 4 has linear layers in a loop. The last line is one JSON object.
It needs a CUDA GPU, torch, transformers and peft.
"""

import argparse
import json
import statistics
import time

ARCHITECTURE = {"vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
                "head_dim": 128, "intermediate_size": 6144, "max_position_embeddings": 40960,
                "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                "norm_topk_prob": True, "tie_word_embeddings": False}


def build(args):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=args.layers, **ARCHITECTURE)
    kwargs = {"attn_implementation": "sdpa"}
    if args.experts:
        kwargs["experts_implementation"] = args.experts
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, **kwargs)
    torch.set_default_dtype(torch.float32)
    model = model.to(torch.bfloat16)
    model.config.use_cache = False
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    names = [name for name, _ in model.named_parameters()]
    fused = [name for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
             if any(n.endswith(name) for n in names)]
    lora = {"r": args.rank, "lora_alpha": 2 * args.rank, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    if fused:
        model = get_peft_model(model, LoraConfig(target_modules=attention, target_parameters=fused, **lora))
    else:
        experts = ["gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(target_modules=attention + experts, **lora))
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train(), bool(fused)


def measure(model, args, batch):
    import torch
    tokens = torch.randint(0, ARCHITECTURE["vocab_size"], (batch, args.seq), device="cuda")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4, fused=True)
    times, losses = [], []
    for _ in range(args.steps + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]), losses


def main():
    parser = argparse.ArgumentParser()
    for name, value in {"layers": 8, "rank": 16, "seq": 4096, "batch": 8, "steps": 3}.items():
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--experts", default="", help="of transformers 5: eager, batched_mm or grouped_mm")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    import peft
    import torch
    import transformers
    model, fused = build(args)
    batch = args.batch
    while True:
        try:
            seconds, losses = measure(model, args, batch)
            break
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            batch //= 2
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(json.dumps({"transformers": transformers.__version__, "peft": peft.__version__, "torch": torch.__version__,
                      "device": torch.cuda.get_device_name(), "fused_experts": fused, "experts": args.experts,
                      "checkpointing": args.checkpointing, "batch": batch, "seq": args.seq,
                      "ms": round(1000 * seconds, 1), "tokens_per_s": round(batch * args.seq / seconds),
                      "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1), "losses": losses}))


if __name__ == "__main__":
    main()
