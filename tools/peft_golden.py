#!/usr/bin/env python3
"""Writes reference states of adapters with PEFT and transformers for tests/golden.

    tools/peft_golden.py [DIR]    rewrites the cases of the installed transformers under DIR
                                  (default tests/golden/data/peft)

A case is a Hugging Face folder, an adapter as PEFT saves it, tokens.safetensors, and
expected.safetensors with the logits, the loss, the gradient of every A and B, and the losses of
training steps with torch.optim.AdamW on the same tokens. tests/golden/data/peft/README.md lists them.
It needs torch, transformers, peft and safetensors. In transformers 4 experts are linear layers of their own;
later versions have one parameter for all experts of a layer, and need PEFT 0.19 or later.
Everything is f32 on the CPU with the eager attention.
"""

import json
import shutil
import sys
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data" / "peft"

SIZES = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
         "tie_word_embeddings": False}

CASES = {
    "qwen3_moe_all": {
        "config": {"model_type": "qwen3_moe", "head_dim": 6, "moe_intermediate_size": 10, "num_experts": 6,
                   "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0]},
        "lora": {"r": 4, "lora_alpha": 6,
                 "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
                                    "mlp.gate"]}},
    "qwen2_moe_shared": {
        "config": {"model_type": "qwen2_moe", "moe_intermediate_size": 10, "shared_expert_intermediate_size": 14,
                   "num_experts": 5, "num_experts_per_tok": 2},
        "lora": {"r": 3, "lora_alpha": 8,
                 "target_modules": r".*(q_proj|v_proj|shared_expert\.(gate|up|down)_proj)"}},
    "mixtral_experts": {
        "config": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        "lora": {"r": 2, "lora_alpha": 2, "target_modules": ["w1", "w2", "block_sparse_moe.gate"]}},
    "deepseek_v3_latent": {
        "config": {"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12,
                   "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "moe_intermediate_size": 8,
                   "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                   "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
        "lora": {"r": 4, "lora_alpha": 4,
                 "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj"]}},
}

FUSED_CASES = {
    "qwen3_moe_fused": {
        "config": {"model_type": "qwen3_moe", "head_dim": 6, "moe_intermediate_size": 10, "num_experts": 6,
                   "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0]},
        "lora": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"],
                 "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]}},
    "gpt_oss_fused": {
        "config": {"model_type": "gpt_oss", "head_dim": 6, "intermediate_size": 10, "num_local_experts": 4,
                   "num_experts_per_tok": 2, "sliding_window": 5, "num_hidden_layers": 1,
                   "layer_types": ["full_attention"]},
        "lora": {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj"],
                 "target_parameters": ["mlp.experts.gate_up_proj"]}},
}

STEPS, LR = 20, 1e-3
PREFIX = "base_model.model."


def is_fused():
    import transformers
    return int(transformers.__version__.split(".")[0]) >= 5


def dtype_key():
    return "dtype" if is_fused() else "torch_dtype"


def base_model(config, seed):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    keys = {**SIZES, **config}
    hf = AutoConfig.for_model(keys.pop("model_type"), initializer_range=0.2, **{dtype_key(): "float32"}, **keys)
    more = {"experts_implementation": "eager"} if is_fused() else {}
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager", **more)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=random)
            p.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    return model


def adapted(model, settings, seed):
    import torch
    from peft import LoraConfig, get_peft_model
    adapted_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(adapted_model.named_parameters()):
            if p.requires_grad:
                p.copy_(0.2 * torch.randn(p.shape, generator=random))
    return adapted_model.eval()


def stored_name(name):
    return name.removeprefix(PREFIX).replace(".default.weight", ".weight")


def loss_of(model, tokens):
    import torch
    logits = model(input_ids=tokens, use_cache=False).logits
    targets = tokens[:, 1:].reshape(-1)
    return logits, torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), targets)


def write_case(folder, case, seed):
    import torch
    from safetensors.torch import save_file
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = base_model(case["config"], seed)
    model.save_pretrained(folder)
    for name in ["generation_config.json"]:
        (folder / name).unlink(missing_ok=True)
    model = adapted(model, case["lora"], seed + 1)
    model.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(seed + 2))

    logits, loss = loss_of(model, tokens)
    loss.backward()
    expected = {"logits": logits.detach(), "loss": loss.detach().reshape(1)}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        # An expert without tokens has no gradient in torch.
        expected[f"grad.{stored_name(name)}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()

    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        _, loss = loss_of(model, tokens)
        loss.backward()
        for p in trained.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        losses.append(loss.item())
    expected["losses"] = torch.tensor(losses)
    made_by = provenance()
    save_file({"tokens": tokens.int()}, folder / "tokens.safetensors", made_by)
    save_file({n: t.contiguous() for n, t in expected.items()}, folder / "expected.safetensors", made_by)
    # The same text on every machine: the folder of the base is not part of it.
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = ""
    for targets in ["target_modules", "target_parameters"]:
        if isinstance(config.get(targets), list):
            config[targets] = sorted(config[targets])
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def provenance():
    import peft
    import torch
    import transformers
    return {"made_by": f"tools/peft_golden.py, torch {torch.__version__}, transformers {transformers.__version__}, "
                       f"peft {peft.__version__}"}


README = """# Reference states of adapters

Made by tools/peft_golden.py, once with transformers 4 and PEFT 0.18, and once with transformers 5 and
PEFT 0.21; the metadata of the files has the versions.
That command rewrites all cases of the installed transformers.
f32, CPU, eager attention.

Each folder is a Hugging Face model with an adapter that PEFT saved (`adapter/`), and

| file | tensor | dtype, shape | meaning |
| --- | --- | --- | --- |
| `tokens` | `tokens` | I32 [B,S] | input |
| `expected` | `logits` | F32 [B,S,V] | of the model with its adapter |
| | `loss` | F32 [1] | mean of the next-token cross-entropy over B*(S-1) targets; no auxiliary loss |
| | `grad.{{module}}.lora_A.weight`, `lora_B` | F32 | gradients of `loss` |
| | `losses` | F32 [{steps}] | `loss` before each step of torch.optim.AdamW: lr {lr}, betas 0.9 and 0.95, eps 1e-8, no weight decay |

| case | what has an adapter |
| --- | --- |
| `qwen3_moe_all` | attention, a dense layer, experts and routers; alpha / rank = 1.5 |
| `qwen2_moe_shared` | q and v without k; shared experts; `target_modules` is a pattern |
| `mixtral_experts` | two of the three projections of experts, and routers, under mixtral's names |
| `deepseek_v3_latent` | every projection of latent attention, and `down_proj` of dense, routed and shared experts |
| `qwen3_moe_fused` | transformers 5: q and v, both parameters of all experts, and routers, by `target_parameters` |
| `gpt_oss_fused` | transformers 5: the output of attention, and `gate_up_proj` of all experts, whose columns alternate |
"""


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    for seed, (name, case) in enumerate({**CASES, **FUSED_CASES}.items()):
        if (name in FUSED_CASES) != is_fused():
            continue
        write_case(root / name, case, 100 * (seed + 1))
        print(name)
    (root / "README.md").write_text(README.format(steps=STEPS, lr=LR))


if __name__ == "__main__":
    main()
