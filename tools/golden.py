#!/usr/bin/env python3
"""Writes reference states for tests/golden with PyTorch and transformers, and compares outputs with
them.

    tools/golden.py --write [DIR]             rewrites every case under DIR (default
    tests/golden/data)
    tools/golden.py --check CASE OUT [--bf16] compares the output of `moebius forward` with
    CASE/expected.safetensors

A case is a Hugging Face folder (config.json, model.safetensors under the hub's names) plus
tokens.safetensors and expected.safetensors. tests/golden/data/README.md lists the tensors.
Writing needs torch, transformers, safetensors and numpy. Checking needs only the last two.
Everything is f32 on the CPU with the eager attention and the eager experts, whose order of sums is
fixed.
The same versions write the same bytes.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy

from golden_cases import CASES

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data"

MTP_COEFF = 0.3

# -- writing ---------------------------------------------------------------------------------------------


def provenance():
    """Metadata of every safetensors file. It has one entry, because the order of several is not fixed."""
    import torch
    import transformers
    return {"made_by": f"tools/golden.py --write, format 1, torch {torch.__version__}, "
                       f"transformers {transformers.__version__}"}


CORRECTION = "e_score_correction_bias"  # a buffer that corrects DeepSeek-V3's choice; it has no gradient


def build_model(config, rope, seed):
    """Draws random weights that are not degenerate: logits of order 1, distinct router scores, norms
    other than one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    keys = dict(config)
    hf = AutoConfig.for_model(keys.pop("model_type"), rope_parameters=rope, initializer_range=0.2, dtype="float32",
                              **keys)
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager", experts_implementation="eager")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=random)
            p.copy_(1 + 0.3 * noise if "norm" in name else spread_of(config, name) * noise)
        for name, b in sorted(model.named_buffers()):
            if name.endswith(CORRECTION):  # with it some scores must be below 0
                b.copy_(0.2 * torch.randn(b.shape, generator=random) - 0.6)
    return model.eval()


def spread_of(config, name):
    """Draws for gpt_oss sinks that matter among some scores, and many pre-activations beyond their limit."""
    if config["model_type"] != "gpt_oss":
        return 0.25
    return 1.0 if name.endswith((".sinks", ".gate_up_proj")) else 0.25


def hub_tensors(model):
    """Returns the parameters under their names on the hub. save_pretrained writes them, and splits
    fused experts.
    """
    from safetensors.torch import load_file
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def hub_gradients(model):
    """Returns gradients under hub names. A model whose weights are the gradients is saved in the same
    way as the weights.
    """
    import copy
    import torch
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for g, p in zip(gradients.parameters(), model.parameters()):
            g.copy_(p.grad)
    return {f"grad.{name}": t.contiguous() for name, t in hub_tensors(gradients).items()
            if not name.endswith(CORRECTION)}


def router_of(layer):
    return getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)


def all_layers(model, mtp):
    return [*model.model.layers, *(module.mtp_block for module in (mtp.layers if mtp else []))]


def predict_ahead(model, mtp, row, begin, end):
    """Returns logits [depth, tokens, V] of multi-token prediction in a document of a row, computed by
    the modules of transformers.
    Depth k reads the row shifted by k, with zeros after its end. Reads beyond the document's end do
    not affect other results.
    """
    import torch
    hidden = model.model(input_ids=row[None, begin:end], use_cache=False).last_hidden_state
    unseen = torch.full((end - begin, end - begin), torch.finfo(torch.float32).min).triu(1)[None, None]
    positions, logits = torch.arange(end - begin)[None], []
    for k, module in enumerate(mtp.layers, start=1):
        ahead = torch.nn.functional.pad(row, (0, k))[begin + k:end + k]
        inputs = model.model.embed_tokens(ahead[None])
        hidden = module(inputs, hidden, position_embeddings=mtp.rotary_emb(inputs, position_ids=positions),
                        attention_mask=unseen, position_ids=positions, past_key_values=None)
        logits.append(model.lm_head(hidden)[0])
    return torch.stack(logits)


def run_model(model, tokens, documents, mtp=None):
    """Returns logits [1 + depths,B,S,V] and, for each MoE layer, expert ids [B*S,k] by falling weight.
    Each document runs separately.
    """
    import torch
    logits, chosen, modules = [], {}, []
    routers = {i: router_of(layer) for i, layer in enumerate(all_layers(model, mtp))}
    hooks = [gate.register_forward_hook(lambda _, __, out, i=i: chosen.setdefault(i, []).append(out))
             for i, gate in routers.items() if gate is not None]
    for row, lengths in zip(tokens, documents):
        parts = [model(input_ids=part[None], use_cache=False).logits[0] for part in torch.split(row, lengths)]
        logits.append(torch.cat(parts))
    if mtp:
        of_main = {i: len(outs) for i, outs in chosen.items()}
        for row, lengths in zip(tokens, documents):
            ends = np.cumsum(lengths).tolist()
            parts = [predict_ahead(model, mtp, row, end - n, end) for n, end in zip(lengths, ends)]
            modules.append(torch.cat(parts, 1))
        chosen = {i: outs[:of_main.get(i)] for i, outs in chosen.items()}  # the earlier layers ran once more
    for hook in hooks:
        hook.remove()
    ahead = torch.stack(modules, 1) if mtp else torch.zeros(0, *torch.stack(logits).shape)
    chosen = {i: [torch.cat(x) for x in zip(*outs)] for i, outs in chosen.items()}
    return torch.cat([torch.stack(logits)[None], ahead]), chosen


def mtp_loss(logits, tokens, documents):
    """Returns the mean over the depths of the mean loss of each depth.
    A loss counts rows for which token k + 1 further on is in the row, and the token before that
    one, the last that is read, is in the row's own document.
    """
    import torch
    import torch.nn.functional as F
    losses = []
    for k, of_depth in enumerate(logits, start=1):
        picked, targets = [], []
        for row, lengths, of_row in zip(tokens, documents, of_depth):
            document = np.repeat(np.arange(len(lengths)), lengths)
            for i in range(len(row) - k - 1):
                if document[i] == document[i + k]:
                    picked.append(of_row[i])
                    targets.append(row[i + k + 1])
        losses.append(F.cross_entropy(torch.stack(picked), torch.stack(targets)))
    return torch.stack(losses).mean()


def build_mtp(model, depths, seed):
    """Returns modules as transformers builds them beside a model, with weights like the model's."""
    import torch
    from transformers.modeling_layers import MtpModel
    mtp = MtpModel(model, depths)
    mtp.config._attn_implementation = "eager"
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(mtp.layers.named_parameters()):
            noise = torch.randn(p.shape, generator=random)
            p.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
        for name, b in sorted(mtp.layers.named_buffers()):
            if name.endswith(CORRECTION):
                b.copy_(0.2 * torch.randn(b.shape, generator=random) - 0.6)
    return mtp.eval()


def mtp_tensors(mtp, num_layers, value):
    """Returns value(parameter or buffer) of the modules under their names on the hub, with fused
    experts split.
    """
    tensors = {}
    for name, t in [*mtp.layers.named_parameters(), *mtp.layers.named_buffers()]:
        depth, rest = name.split(".", 1)
        prefix = f"model.layers.{num_layers + int(depth)}."
        rest = rest.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        data = value(t)
        if data is None:
            continue
        if rest == "mlp.experts.gate_up_proj":
            for e, both in enumerate(data):
                for which, part in zip(("gate", "up"), both.chunk(2)):
                    tensors[f"{prefix}mlp.experts.{e}.{which}_proj.weight"] = part.contiguous()
        elif rest == "mlp.experts.down_proj":
            for e, part in enumerate(data):
                tensors[f"{prefix}mlp.experts.{e}.down_proj.weight"] = part.contiguous()
        else:
            tensors[prefix + rest] = data.contiguous()
    return tensors


def add_mtp(folder, model, mtp):
    """Writes the modules to a folder, with the copies of embedding and head that released models have.
    transformers must read back the same modules.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel
    path, first = folder / "model.safetensors", len(model.model.layers)
    tensors = load_file(path) | mtp_tensors(mtp, first, lambda t: t.detach())
    for k in range(len(mtp.layers)):
        tensors[f"model.layers.{first + k}.embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        tensors[f"model.layers.{first + k}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, path, {"format": "pt"})
    main = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first + k}.*" for k in range(len(mtp.layers))]
    again = MtpModel.from_pretrained(main)
    for (name, a), b in zip(mtp.layers.named_parameters(), again.layers.parameters()):
        assert torch.equal(a, b), f"{folder}: transformers reads another {name}"


def choice_scores(gate, config, logits):
    """Returns the scores that choose experts, minus infinity outside the best groups; and the gap
    between groups.
    """
    import torch
    family = config["model_type"]
    scores = logits.sigmoid() + getattr(gate, CORRECTION) if family == "deepseek_v3" else logits.softmax(-1)
    if family == "deepseek_v2" and config["topk_method"] == "greedy" or config.get("n_group", 1) == 1:
        return scores, 1.0
    kept, groups = config["topk_group"], scores.unflatten(-1, (config["n_group"], -1))
    best = groups.topk(2 if family == "deepseek_v3" else 1, -1).values.sum(-1).sort(-1, descending=True)
    mask = torch.zeros_like(best.values).scatter_(1, best.indices[:, :kept], 1)
    gap = (best.values[:, kept - 1] - best.values[:, kept]).min()
    return groups.masked_fill(mask[..., None] == 0, float("-inf")).flatten(1), gap.item()


def check_routing(layers, routers, config):
    """Checks that the reference has the expected meaning: logits rather than probabilities, no near
    ties, the experts that we would choose.
    Returns the expert ids of each MoE layer by falling score.
    """
    import torch
    ids_by_score, k = {}, config.get("num_experts_per_tok")
    for layer, (logits, weights, ids) in routers.items():
        sums = logits.detach().sum(-1)
        assert (sums - 1).abs().max() > 0.1, f"layer {layer}: the router returns probabilities, not logits"
        scores, group_gap = choice_scores(router_of(layers[layer]), config, logits.detach())
        top = scores.topk(min(k + 1, scores.shape[-1]), -1)
        ids_by_score[layer] = top.indices[:, :k]
        assert torch.equal(ids_by_score[layer].sort(-1).values, ids.sort(-1).values), f"layer {layer}: other experts"
        gap = min(group_gap, -top.values.diff(dim=-1).max().item())
        assert gap > 1e-4, f"layer {layer}: two scores only {gap:.1e} apart; take another seed"
    return ids_by_score


def check_clipping(model, tokens):
    """Checks that some elements of q, of k and of v are beyond clip_qkv, and some are not."""
    import torch
    limit, outputs, hooks = model.config.clip_qkv, {}, []
    for layer in model.model.layers:
        attention = layer.self_attn
        for name, module in (("q", attention.q_norm), ("k", attention.k_norm), ("v", attention.v_proj)):
            hooks.append(module.register_forward_hook(
                lambda _, __, out, name=name: outputs.setdefault(name, []).append(out)))  # clipped in place afterwards
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    for name, cut in outputs.items():
        at_limit = (torch.cat([t.flatten() for t in cut]).abs() == limit).float().mean().item()
        assert 0.1 < at_limit < 0.9, f"{at_limit:.0%} of {name} are cut"


def check_packed(model, tokens, documents, logits):
    """Checks that the same row in one pass, with restarting positions and a block-diagonal causal
    mask, agrees.
    """
    import torch
    for row, lengths, expected in zip(tokens, documents, logits):
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        seen = (document[:, None] == document[None, :]) & torch.ones(len(row), len(row)).tril().bool()
        mask = torch.zeros(1, 1, len(row), len(row)).masked_fill(~seen, torch.finfo(torch.float32).min)
        if model.config.model_type == "gpt_oss":  # a mask for each kind of layer
            near = torch.ones(len(row), len(row)).triu(1 - model.config.sliding_window).bool()
            mask = {"full_attention": mask, "sliding_attention": mask.masked_fill(~near, torch.finfo(torch.float32).min)}
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        got = model(input_ids=row[None], attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max(), "packed and separate documents differ"


def pack_fp8(weight, block):
    """Returns a matrix as DeepSeek's checkpoints store it: 8-bit floats, and amax / 448 of each block."""
    import torch
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -cols % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
    scale = blocks.abs().amax((1, 3)) / 448
    packed = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return packed.flatten(2).flatten(0, 1)[:rows, :cols].contiguous(), scale


def unpack_fp8(packed, scale, block):
    import torch
    factor = torch.repeat_interleave(torch.repeat_interleave(scale, block[0], 0), block[1], 1)
    return packed.float() * factor[:packed.shape[0], :packed.shape[1]]


def is_packed(name, tensor):
    return ".layers." in name and tensor.dim() == 2 and not name.endswith("mlp.gate.weight")


def round_to_fp8(model, block):
    """Returns the model with the weights that its packed tensors represent, and all tensors of its file."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    plain, packed = hub_tensors(model), {}
    for name, tensor in list(plain.items()):
        packed[name] = tensor
        if is_packed(name, tensor):
            packed[name], packed[name + "_scale_inv"] = pack_fp8(tensor, block)
            plain[name] = unpack_fp8(packed[name], packed[name + "_scale_inv"], block)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file(plain, Path(folder) / "model.safetensors", {"format": "pt"})
        rounded = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager",
                                                       experts_implementation="eager")
    return rounded.eval(), packed


def write_fp8(folder, packed, block):
    from safetensors.torch import save_file
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block),
                                     "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def pack_mxfp4(weight):
    """Returns a weight [E, in, out] as gpt_oss checkpoints store it: blocks of 32 along `in`, two
    numbers per byte, and scales.
    """
    import torch
    rows = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = rows.abs().amax(-1, keepdim=True).log2().floor().clamp(-125, 125) - 2
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = (rows.abs() / 2**exponent)[..., None].sub(values).abs().argmin(-1) + 8 * (rows < 0)
    blocks = (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8).contiguous()
    return blocks, (exponent[..., 0] + 127).to(torch.uint8).contiguous()


def round_to_mxfp4(model):
    """Rounds the experts' weights to what transformers unpacks, and returns all tensors of the file."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    packed = hub_tensors(model)
    for name, p in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = pack_mxfp4(p.detach())
            with torch.no_grad():
                p.copy_(convert_moe_packed_tensors(blocks, scales).float())
            del packed[name]
            packed |= {name + "_blocks": blocks, name + "_scales": scales}
    return packed


def write_mxfp4(folder, packed):
    from safetensors.torch import save_file
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def respell(folder, spelling):
    """Writes config.json in the spelling of v4 files on the hub; save_pretrained wrote the v5 keys."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if spelling == "v4":
        config["torch_dtype"] = config.pop("dtype")
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        if config["model_type"].startswith("deepseek"):
            respell_deepseek(config)
        elif config["model_type"] not in ("mixtral", "gpt_oss") and "num_local_experts" in config:
            config["num_experts"] = config.pop("num_local_experts")
        if config.get("head_dim", 0) is None:
            del config["head_dim"]
        config["transformers_version"] = "4.57.3"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def respell_deepseek(config):
    """Uses the spelling of DeepSeek's own files, which are older than the classes of transformers."""
    for v5, hub in {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts",
                    "num_mtp_layers": "num_nextn_predict_layers"}.items():
        if v5 in config:
            config[hub] = config.pop(v5)
    for computed in ("head_dim", "qk_head_dim", "rope_interleave"):
        config.pop(computed, None)
    is_v3 = config["model_type"] == "deepseek_v3"
    config |= {"moe_layer_freq": 1, "scoring_func": "sigmoid" if is_v3 else "softmax", "ep_size": 1}
    config.setdefault("topk_method", "noaux_tc")
    if config["rope_scaling"]:
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")


def check_reload(folder, tokens, documents, expected):
    """Checks that transformers reads the same model back from the folder."""
    from transformers import AutoModelForCausalLM
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", output_loading_info=True,
                                                       attn_implementation="eager", experts_implementation="eager")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    logits, _ = run_model(model.eval(), tokens, documents)
    assert (logits[0] == expected).all(), f"{folder}: reloading changes the logits"


def check_unpacks(folder, expected):
    """Checks that transformers reads the packed folder as the model that we rounded."""
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", quantization_config=Mxfp4Config(dequantize=True))
    for (name, got), want in zip(model.named_parameters(), expected.parameters()):
        assert torch.equal(got.float(), want), f"{folder}: {name} is unpacked otherwise"


def write_case(data, name, seed):
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file
    case = CASES[name]
    model = build_model(case.config, case.rope | {"rope_theta": case.theta}, seed)
    packed = None
    if case.fp8_block:
        model, packed = round_to_fp8(model, case.fp8_block)
    if case.mxfp4:
        packed = round_to_mxfp4(model)
    tokens = torch.randint(0, case.config["vocab_size"], (len(case.rows), sum(case.rows[0])),
                           generator=torch.Generator().manual_seed(seed + 1))

    mtp = build_mtp(model, case.mtp, seed + 2) if case.mtp else None
    logits, routers = run_model(model, tokens, case.rows, mtp)
    logits, ahead = logits[0], logits[1:]
    vocab = logits.shape[-1]
    token_loss = F.cross_entropy(logits[:, :-1].reshape(-1, vocab), tokens[:, 1:].reshape(-1), reduction="none")
    mtp_loss = mtp_loss(ahead, tokens, case.rows) if mtp else torch.zeros(())
    (token_loss.mean() + MTP_COEFF * mtp_loss).backward()
    chosen = check_routing(all_layers(model, mtp), routers, case.config)
    if case.config.get("clip_qkv"):
        check_clipping(model, tokens)
    if case.packed:
        check_packed(model, tokens, case.rows, logits)
    else:
        hf_loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
        assert abs(hf_loss - token_loss.mean().item()) <= 1e-6 * hf_loss, "the loss is not the one of transformers"

    folder = data / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    respell(folder, case.spelling)
    expected = {"logits": logits.detach(), "loss": token_loss.mean().detach().reshape(1)}
    expected |= {f"router.{i}.topk": ids.to(torch.int32).contiguous() for i, ids in chosen.items()}
    expected |= hub_gradients(model)
    if mtp:
        gradients = mtp_tensors(mtp, len(model.model.layers), lambda t: t.grad)
        expected |= {f"grad.{name}": g for name, g in gradients.items()}
        expected |= {"mtp_loss": mtp_loss.detach().reshape(1), "mtp_coeff": torch.tensor([MTP_COEFF])}
        expected |= {f"mtp.{k}.logits": of_depth.detach().clone() for k, of_depth in enumerate(ahead)}
    inputs = {"tokens": tokens.to(torch.int32)}
    if case.packed:
        starts = [[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in case.rows]
        inputs["doc_start"] = torch.tensor(starts, dtype=torch.int32)
        expected["token_loss"] = token_loss.detach().reshape(len(case.rows), -1)
    save_file(inputs, folder / "tokens.safetensors", provenance())
    save_file(expected, folder / "expected.safetensors", provenance())
    check_reload(folder, tokens, case.rows, logits)
    if case.fp8_block:
        write_fp8(folder, packed, case.fp8_block)
    if case.mxfp4:
        write_mxfp4(folder, packed)
        check_unpacks(folder, model)
    if mtp:
        add_mtp(folder, model, mtp)
    size = sum(f.stat().st_size for f in folder.iterdir())
    counts = {i: np.bincount(ids.flatten(), minlength=8).tolist() for i, ids in chosen.items()}
    print(f"{name:20s} loss {expected['loss'].item():.6f}  max|logit| {logits.abs().max():.3f}  {size / 1024:.0f} KiB  "
          f"tokens per expert {counts}")


def write_adamw(path):
    """Five steps of torch.optim.AdamW with clipping by the global norm, small enough to follow by hand."""
    import torch
    from safetensors.torch import save_file
    random = torch.Generator().manual_seed(7)
    shapes = {"matrix": (5, 7), "vector": (11,), "scalar": (1,)}
    decay = {"matrix": 0.1, "vector": 0.1, "scalar": 0.0}
    lrs = [float(np.float32(lr)) for lr in (1e-3, 3e-3, 1e-2, 5e-3, 0.0)]
    grad_scales = (0.05, 1.0, 0.01, 30.0, 0.3)  # the norm is clipped at 1 in some steps only
    params = {n: torch.nn.Parameter(torch.randn(s, generator=random)) for n, s in shapes.items()}
    groups = [{"params": [p], "weight_decay": decay[n]} for n, p in params.items()]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    out = {f"param.0.{n}": p.detach().clone() for n, p in params.items()}
    norms = []
    for step, (lr, scale) in enumerate(zip(lrs, grad_scales), start=1):
        for name, p in params.items():
            p.grad = scale * torch.randn(p.shape, generator=random)
            out[f"grad.{step}.{name}"] = p.grad.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(params.values(), 1.0))
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        out |= {f"param.{step}.{n}": p.detach().clone() for n, p in params.items()}
    assert min(norms) < 1 < max(norms)
    for name, p in params.items():
        out[f"exp_avg.{name}"] = adamw.state[p]["exp_avg"]
        out[f"exp_avg_sq.{name}"] = adamw.state[p]["exp_avg_sq"]
    out["lr"] = torch.tensor(lrs)
    out["grad_norm"] = torch.stack(norms)
    constants = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip": 1.0}
    constants |= {f"weight_decay.{n}": d for n, d in decay.items()}
    out |= {name: torch.tensor([value]) for name, value in constants.items()}
    save_file(out, path, provenance())


README = """# Reference states

Made by {made_by}. That command rewrites all of it.
f32, CPU, eager attention, eager experts. The same line is in the metadata of every safetensors file.

Each folder is a Hugging Face model (`config.json`, `model.safetensors` under the hub's names) with

| file | tensor | dtype, shape | meaning |
| --- | --- | --- | --- |
| `tokens` | `tokens` | I32 [B,S] | input |
| | `doc_start` | I32 [B,S] | packed case only: index in the row of the first token of this token's document |
| `expected` | `logits` | F32 [B,S,V] | |
| | `loss` | F32 [1] | mean of the next-token cross-entropy over B*(S-1) targets; no auxiliary loss |
| | `router.{{layer}}.topk` | I32 [B*S,k] | expert ids by falling score of the choice (with groups and a bias, not the weight); MoE layers only |
| | `grad.{{name}}` | F32 | gradient of `loss`, one per tensor of `model.safetensors` but the correction biases; the sum of both uses when tied |
| | `mtp_loss`, `mtp_coeff` | F32 [1] | multi-token prediction: mean loss of its depths; `grad` is then of `loss + mtp_coeff * mtp_loss` |
| | `mtp.{{depth - 1}}.logits` | F32 [B,S,V] | what each depth predicts there; rows shifted beyond the row read token 0 |
| | `token_loss` | F32 [B,S-1] | packed case only: of each target; those across a document border count too |

In the packed case each document was run alone: positions restart at its first token and nothing attends across.

| case | spelling | what it is for |
| --- | --- | --- |
| `mixtral_v4` | `rope_theta`, `torch_dtype` | head_dim absent; large rms_norm_eps |
| `mixtral_v5_tied` | `rope_parameters`, `dtype` | heads * head_dim unlike hidden; one kv head; tied embeddings |
| `qwen3_moe_v5` | `rope_parameters`, `dtype` | dense layer by `mlp_only_layers`; normalised top-k |
| `qwen3_moe_v4_step2` | `rope_theta`, `torch_dtype` | dense by `decoder_sparse_step`; top-k not normalised; large eps |
| `qwen3_moe_tied` | `rope_parameters`, `dtype` | 7 experts, top-3, not normalised; tied embeddings; one row |
| `qwen3_moe_packed` | `rope_theta`, `torch_dtype` | documents of 4+5 and 1+5+3 tokens kept apart |
| `llama_v4` | `rope_theta`, `torch_dtype` | dense; head_dim absent; large rms_norm_eps |
| `mistral_v5_window` | `rope_parameters`, `dtype` | sliding window of 4; heads * head_dim unlike hidden; tied embeddings |
| `qwen3_v4_packed` | `rope_theta`, `torch_dtype` | dense; q and k normed per head; documents kept apart |
| `qwen2_v4` | `rope_theta`, `torch_dtype` | dense; biases of q, k, v; tied embeddings |
| `qwen2_moe_v5` | `rope_parameters`, `dtype` | biases; gated shared expert; dense layer by `mlp_only_layers` |
| `olmoe_v4_packed` | `rope_theta`, `torch_dtype` | q and k normed over all heads; large eps; documents kept apart |
| `llama_v4_llama3` | `rope_scaling`, `torch_dtype` | rotary frequencies of Llama 3.1 |
| `qwen3_v5_yarn` | `rope_parameters`, `dtype` | YaRN |
| `deepseek_v3_v4_packed` | `rope_scaling` with `type`, `torch_dtype` | query latent; groups; YaRN with two mscales; documents kept apart |
| `deepseek_v3_v5` | `rope_parameters`, `dtype` | no query latent; v wider than k; `rope_interleave` false; top-3 of 7, not normalised |
| `deepseek_v3_fp8` | `rope_theta`, `torch_dtype` | matrices in F8_E4M3 with `weight_scale_inv` of 8 x 16 blocks; gradients are by the unpacked weights |
| `deepseek_v3_mtp` | `num_nextn_predict_layers`, `torch_dtype` | multi-token prediction with the copies that released models carry; documents of 4+2+3 and 1+5+3 tokens kept apart |
| `deepseek_v3_mtp2` | `num_mtp_layers`, `dtype` | two depths; no query latent; no groups |
| `gpt_oss_v4` | `rope_scaling`, `torch_dtype` | sinks; windows in layers 0 and 2; biases; clamped activation; YaRN without `truncate` |
| `gpt_oss_v5_packed` | `rope_parameters`, `dtype` | a window in layer 1 by `layer_types`; square `down_proj`; documents kept apart |
| `gpt_oss_mxfp4` | `rope_scaling`, `torch_dtype` | experts in 4-bit blocks with scales, square; tied embeddings; gradients are by the unpacked weights |
| `deepseek_v2_v4` | `rope_scaling` with `type`, `torch_dtype` | groups by their best expert; one mscale; one shared expert |
| `deepseek_v2_v5_packed` | `rope_parameters`, `dtype` | greedy; two shared experts; no dense layer; documents kept apart |
| `olmoe_v5_clip_bias` | `rope_parameters`, `dtype` | `clip_qkv` that cuts a part of q, k and v; `attention_bias` |
| `llama_v4_bias` | `rope_theta`, `torch_dtype` | `attention_bias`: q, k, v and o |
| `qwen3_v5_bias` | `rope_parameters`, `dtype` | the same before norms per head; tied embeddings |
| `qwen3_moe_v4_bias_packed` | `rope_theta`, `torch_dtype` | the same; documents kept apart |
| `deepseek_v3_v4_bias_packed` | `rope_theta`, `torch_dtype` | `attention_bias`: q_a, kv_a and o; documents kept apart |
| `deepseek_v2_v5_bias` | `rope_parameters`, `dtype` | `attention_bias`: kv_a and o, no query latent |

`adamw.safetensors`: five steps of torch.optim.AdamW. `param.0.{{name}}` is the start, `grad.{{step}}.{{name}}` the
gradient before clipping and `param.{{step}}.{{name}}` the result, for steps 1 to 5; `lr` F32 [5]; `grad_norm` F32 [5],
the global norm before clipping to 1; `exp_avg.{{name}}`, `exp_avg_sq.{{name}}` the moments after step 5. Names:
`matrix` [5,7], `vector` [11], `scalar` [1] (which does not decay). The constants are F32 [1]: `beta1`, `beta2`, `eps`,
`clip`, `weight_decay.{{name}}`.

`quantize.safetensors`: quantised bytes and scales, by `tools/quantize_golden.py`, whose text says which formulas.
`x`, `plain` and `whole` are the inputs, F32 [144,160]. `cases` [30,16,48] and `whole_cases` [11,16,48] are matrices at
the borders of formats. The others are `NAME.data` and `NAME.scales`, with `NAME.tensor_scale` for NVFP4 and the
converted `NAME.bf16` for weights.

`tools/golden.py --check CASE OUT` compares an output of `moebius forward --grads` (and `--mtp` with the coefficient
where there is one) with a case. Gates: logits within
2e-5 of the largest, loss within 1e-6 relative, each gradient cosine >= 1 - 1e-6 and norm within 1e-4, expert ids
identical. With `--bf16`: cosine >= 0.999 of the logits and of all gradients together, loss within 2^-8.
"""


def write(data, only):
    import torch
    from transformers.utils import logging
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    data.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(CASES):
        if only in (None, name):
            write_case(data, name, seed=100 + i + 1000 * CASES[name].reseed)
    write_adamw(data / "adamw.safetensors")
    (data / "README.md").write_text(README.format(**provenance()))


# -- checking --------------------------------------------------------------------------------------------


def cosine(a, b):
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norm) if norm > 0 else float(not (a.any() or b.any()))


def judge(name, got, want, bf16):
    """Returns (measure, value, gate, ok) of one tensor. With a gate of None the value is shown but not
    judged.
    """
    if not np.isfinite(got).all():
        return "finite", 0.0, 1.0, False
    if name.startswith("router."):
        same = float((got == want).mean())
        return ("ids equal", same, None, True) if bf16 else ("ids equal", same, 1.0, same == 1.0)
    if name.startswith("grad."):
        return judge_gradient(got, want, bf16)
    if bf16 and name.endswith("logits"):
        value = cosine(got, want)
        return "cosine", value, 0.999, value >= 0.999
    error = float(np.abs(got - want).max() / np.abs(want).max())
    gate = 2**-8 if bf16 else 1e-6 if name in ("loss", "mtp_loss") else 2e-5
    return "relative error", error, gate, error <= gate


def judge_gradient(got, want, bf16):
    value = cosine(got, want)
    if bf16:  # a few roundings turn a small tensor's gradient, and a near tie moves an expert's, so all are judged together
        return "cosine", value, None, True
    # The cosine is blind to scale, but the ratio of the norms is not. An expert without tokens has
    # zeros on both sides.
    stretch = abs(np.linalg.norm(got) / max(np.linalg.norm(want), 1e-30) - 1) if want.any() else 0.0
    if stretch > 1e-4:
        return "norm off by", float(stretch), 1e-4, False
    return "cosine", value, 1 - 1e-6, value >= 1 - 1e-6


def judge_all_gradients(got, want):
    names = sorted(n for n in want if n.startswith("grad.") and n in got and got[n].shape == want[n].shape)
    value = cosine(*(np.concatenate([np.zeros(0)] + [side[n].ravel() for n in names]) for side in (got, want)))
    return "cosine", value, 0.999, value >= 0.999


def show(name, judged):
    measure, value, gate, ok = judged
    bound = "" if gate is None else f" (gate {gate:.9g})"
    print(f"{'ok  ' if ok else 'FAIL'} {name:68s} {measure:15s} {value:.9g}{bound}")
    return ok


def check(case, out, bf16):
    want, got = load_numpy(case / "expected.safetensors"), load_numpy(out)
    failed = 0
    for name in sorted(want.keys() | got.keys()):
        if name in ("token_loss", "mtp_coeff") and name not in got:
            continue
        if name not in got or name not in want:
            print(f"FAIL {name:68s} {'missing' if name not in got else 'not expected'}")
            failed += 1
        elif got[name].shape != want[name].shape or got[name].dtype != want[name].dtype:
            print(f"FAIL {name:68s} {got[name].dtype}{list(got[name].shape)} for "
                  f"{want[name].dtype}{list(want[name].shape)}")
            failed += 1
        else:
            failed += not show(name, judge(name, got[name], want[name], bf16))
    if bf16:
        failed += not show("all gradients together", judge_all_gradients(got, want))
    with safe_open(case / "expected.safetensors", "numpy") as f:
        made_by = f.metadata()["made_by"]
    print(f"{failed} failed of {len(want)} tensors; the reference was made by {made_by}")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", nargs="?", type=Path, const=DATA, metavar="DIR")
    what.add_argument("--check", nargs=2, type=Path, metavar=("CASE", "OUT"))
    parser.add_argument("--only", metavar="CASE", help="with --write: this case, and what is not a case")
    parser.add_argument("--bf16", action="store_true", help="with --check: the gates of bf16")
    args = parser.parse_args()
    if args.check:
        return check(*args.check, args.bf16)
    write(args.write, args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
