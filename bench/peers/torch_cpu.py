#!/usr/bin/env python3
"""Trains the model of recipes/bench_cpu.toml with PyTorch and transformers on the CPU, and times the
steps.

Prints one JSON object on standard output, for the fastest experts implementation of transformers. A
table of all is on standard error.
A step is `--accumulate` micro-batches forward and backward in bf16, clipping by the global norm,
and one AdamW update.
Exit code 3 when PyTorch or transformers is missing, 1 when no implementation ran.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import time

try:
    import torch
    import transformers
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
except ImportError as error:
    print(f"torch_cpu: needs the Python packages torch and transformers (5 or later); got: {error}", file=sys.stderr)
    sys.exit(3)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_argument_group("model (the defaults are recipes/bench_cpu.toml)")
    size.add_argument("--hidden", type=int, default=512)
    size.add_argument("--layers", type=int, default=8)
    size.add_argument("--heads", type=int, default=8)
    size.add_argument("--kv-heads", type=int, default=4)
    size.add_argument("--head-dim", type=int, default=64)
    size.add_argument("--experts", type=int, default=16)
    size.add_argument("--top-k", type=int, default=2)
    size.add_argument("--expert-ffn", type=int, default=1024)
    size.add_argument("--vocab", type=int, default=8192)
    work = parser.add_argument_group("work")
    work.add_argument("--seq-len", type=int, default=512)
    work.add_argument("--micro-batch", type=int, default=8, help="sequences in a micro-batch")
    work.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    work.add_argument("--warmup", type=int, default=1)
    work.add_argument("--steps", type=int, default=3)
    how = parser.add_argument_group("how")
    how.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    how.add_argument("--experts-implementation", nargs="+", default=["eager", "grouped_mm", "batched_mm"])
    how.add_argument("--optimizer", choices=["master", "bf16"], default="master",
                     help="AdamW on f32 master weights, or on the bf16 parameters themselves")
    how.add_argument("--compile", action="store_true", help="tries each implementation under torch.compile too")
    return parser.parse_args()


def build_model(args, implementation):
    config = Qwen3MoeConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, head_dim=args.head_dim, num_experts=args.experts,
        num_experts_per_tok=args.top_k, moe_intermediate_size=args.expert_ffn, intermediate_size=args.expert_ffn,
        norm_topk_prob=True, tie_word_embeddings=False, use_cache=False, dtype="bfloat16")
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa",
                                            experts_implementation=implementation).train()


class AdamW:
    """torch.optim.AdamW, fused. With master weights the gradients of a step are summed in f32, and the
    update is in f32.
    Without them both are in bf16, which is less work and rounds small updates away.
    """

    def __init__(self, params, master):
        self.params = [p for p in params if p.requires_grad]
        self.updated = [p.detach().float().requires_grad_() for p in self.params] if master else self.params
        self.adamw = torch.optim.AdamW(self.updated, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def gather_gradients(self):
        """Adds the bf16 gradients to the f32 ones after each micro-batch."""
        if self.updated is self.params:
            return
        for p, u in zip(self.params, self.updated):
            if u.grad is None:
                u.grad = p.grad.float()
            else:
                u.grad.add_(p.grad)
            p.grad = None

    def step(self):
        torch.nn.utils.clip_grad_norm_(self.updated, 1.0)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.updated is not self.params:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.updated)


def keep_freed_memory():
    """Makes glibc keep freed blocks. Otherwise each step faults its activations in again, page by
    page, and the peer loses time in the kernel.
    Does nothing where the C library has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, top_pad, mmap_max = -1, -2, -4
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 2**26)


def refuse_oversize(args, implementation):
    """Refuses sizes for which batched_mm, which copies an expert's weights for every routed token,
    needs too much memory.
    """
    if implementation != "batched_mm":
        return
    routed = args.micro_batch * args.seq_len * args.top_k
    need = routed * 3 * args.hidden * args.expert_ffn * 2 * args.layers
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if need > have // 2:
        raise MemoryError(f"would keep {need / 2**30:.0f} GiB of gathered weights; {have / 2**30:.0f} GiB are free")


def time_steps(args, implementation, compiled, name):
    """Returns for each measured step its seconds and the share of the threads' time in which this
    process ran; and the last loss.
    """
    refuse_oversize(args, implementation)
    model = build_model(args, implementation)
    run = torch.compile(model) if compiled else model
    optimizer = AdamW(model.parameters(), args.optimizer == "master")
    random = torch.Generator().manual_seed(1)
    seconds, busy = [], []
    for step in range(args.warmup + args.steps):
        batches = [torch.randint(0, args.vocab, (args.micro_batch, args.seq_len), generator=random)
                   for _ in range(args.accumulate)]
        start, cpu_start = time.perf_counter(), time.process_time()
        for tokens in batches:
            loss = run(input_ids=tokens, labels=tokens).loss / args.accumulate
            loss.backward()
            optimizer.gather_gradients()
        optimizer.step()
        elapsed = time.perf_counter() - start
        kind = "warm-up" if step < args.warmup else "measured"
        print(f"  {name}: {kind} step {elapsed:.2f} s", file=sys.stderr, flush=True)
        if step >= args.warmup:
            seconds.append(elapsed)
            busy.append((time.process_time() - cpu_start) / elapsed / args.threads)
    return seconds, busy, loss.item() * args.accumulate


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    tokens = args.micro_batch * args.seq_len * args.accumulate
    rows, results = [], []
    for implementation in args.experts_implementation:
        for compiled in [False, True] if args.compile else [False]:
            name = implementation + ("+compile" if compiled else "")
            try:
                seconds, busy, loss = time_steps(args, implementation, compiled, name)
            except Exception as error:  # a failed peer is a line of the table
                rows.append(f"{name:20s} skipped: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
                continue
            finally:
                gc.collect()
                if compiled:
                    torch._dynamo.reset()
            median, cpu_busy = statistics.median(seconds), statistics.mean(busy)
            rows.append(f"{name:18s} {median:8.2f} s/step {tokens / median:9.0f} tokens/s  best {min(seconds):.2f} s  "
                        f"threads busy {cpu_busy:4.0%}   loss {loss:.3f}")
            results.append({"implementation": name, "tokens_per_s": tokens / median, "step_time_s": median,
                            "step_time_min_s": min(seconds), "threads_busy": cpu_busy, "steps": len(seconds),
                            "tokens": tokens, "accumulate": args.accumulate, "optimizer": args.optimizer,
                            "threads": args.threads, "torch": torch.__version__,
                            "transformers": transformers.__version__})
    print("\n".join(rows), file=sys.stderr)
    if not results:
        return 1
    print(json.dumps(max(results, key=lambda r: r["tokens_per_s"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
