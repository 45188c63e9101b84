"""MoE layers of other software, forward and backward in bf16.

Each peer is a function from a Problem to layer(x, with_router): what it returns is y, and .backward fills the gradients
of x, both weights and the routing weights (or, with the router, the router's weight).
Without the router the experts and weights of the tokens are given; building the index from them counts.
"""

import dataclasses

import torch
import torch.nn.functional as F

from moe_shapes import Shape


@dataclasses.dataclass
class Problem:
    shape: Shape
    x_TD: torch.Tensor
    dy_TD: torch.Tensor
    w1_e2FD: torch.Tensor
    w2_eDF: torch.Tensor
    router_ED: torch.Tensor
    topk_TK: torch.Tensor  # i32
    weight_TK: torch.Tensor  # bf16
    routable: bool  # the router's own choice is topk_TK

    def leaves(self):
        return [self.x_TD, self.w1_e2FD, self.w2_eDF, self.router_ED, self.weight_TK]


def choose(p, x_TD):
    """softmax, and the K best, normalized over these."""
    scores_TE = torch.softmax(F.linear(x_TD, p.router_ED), dim=-1, dtype=torch.float32)
    weight_TK, topk_TK = torch.topk(scores_TE, p.shape.K, dim=-1)
    return topk_TK, (weight_TK / weight_TK.sum(-1, keepdim=True)).to(x_TD.dtype)


class GatherRows(torch.autograd.Function):
    """Gathers rows sorted by expert. Every row has one pair, so the gradient is a gather and a sum,
    without atomics.
    """

    @staticmethod
    def forward(ctx, x_TD, row_token_R, pair_row_R, K):
        ctx.save_for_backward(pair_row_R)
        ctx.K = K
        return x_TD[row_token_R]

    @staticmethod
    def backward(ctx, dx_RD):
        (pair_row_R,) = ctx.saved_tensors
        return dx_RD[pair_row_R].view(-1, ctx.K, dx_RD.shape[1]).sum(1), None, None, None


class CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, weight_TK, row_token_R, row_pair_R, pair_row_R):
        T, K = weight_TK.shape
        ctx.save_for_backward(y_RD, weight_TK, row_token_R, row_pair_R, pair_row_R)
        return (y_RD[pair_row_R].view(T, K, -1) * weight_TK.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx, dout_TD):
        y_RD, weight_TK, row_token_R, row_pair_R, pair_row_R = ctx.saved_tensors
        dout_RD = dout_TD[row_token_R]
        dweight_R = (dout_RD * y_RD).sum(-1)
        dy_RD = dout_RD * weight_TK.reshape(-1)[row_pair_R].unsqueeze(-1)
        return dy_RD, dweight_R[pair_row_R].view_as(weight_TK), None, None, None


def grouped_experts(p, x_TD, topk_TK, weight_TK):
    E, K = p.shape.E, p.shape.K
    expert_R, row_pair_R = torch.sort(topk_TK.reshape(-1).int(), stable=True)
    offsets = torch.cumsum(torch.histc(expert_R, bins=E, min=0, max=E - 1), 0, dtype=torch.int32)
    pair_row_R = torch.empty_like(row_pair_R)
    pair_row_R[row_pair_R] = torch.arange(row_pair_R.numel(), device=x_TD.device)
    row_token_R = row_pair_R // K
    x_RD = GatherRows.apply(x_TD, row_token_R, pair_row_R, K)
    gate, up = torch._grouped_mm(x_RD, p.w1_e2FD.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    y_RD = torch._grouped_mm(F.silu(gate) * up, p.w2_eDF.transpose(1, 2), offs=offsets)
    return CombineRows.apply(y_RD, weight_TK, row_token_R, row_pair_R, pair_row_R)


def grouped_mm(p):
    def layer(x_TD, with_router):
        topk_TK, weight_TK = choose(p, x_TD) if with_router else (p.topk_TK, p.weight_TK)
        return grouped_experts(p, x_TD, topk_TK, weight_TK)

    return layer


def grouped_mm_compiled(p, mode=None):
    torch._dynamo.reset()
    return torch.compile(grouped_mm(p), dynamic=False, mode=mode)


def grouped_mm_max_autotune(p):
    return grouped_mm_compiled(p, "max-autotune-no-cudagraphs")


def transformers_grouped_mm(p):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    s = p.shape
    config = Qwen3MoeConfig(hidden_size=s.D, moe_intermediate_size=s.F, num_experts=s.E, num_experts_per_tok=s.K,
                            norm_topk_prob=True)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    p.w1_e2FD, p.w2_eDF, p.router_ED = (torch.nn.Parameter(t.detach()) for t in [p.w1_e2FD, p.w2_eDF, p.router_ED])
    block.experts.gate_up_proj, block.experts.down_proj, block.gate.weight = p.w1_e2FD, p.w2_eDF, p.router_ED

    def layer(x_TD, with_router):
        if with_router:
            return block(x_TD.unsqueeze(0)).squeeze(0)
        return block.experts(x_TD, p.topk_TK.long(), p.weight_TK)

    return layer


def liger(p, block_m=64):
    """The Triton kernels of Liger-Kernel. Their autotuning tries only a few large configurations here,
    because the whole list compiles for many minutes.
    """
    import triton
    from liger_kernel.ops import fused_moe, fused_moe_kernels

    rows = [triton.Config({"BLOCK_N": 128, "BLOCK_K": bk}, num_warps=nw, num_stages=ns)
            for bk, nw, ns in [(64, 8, 3), (64, 4, 3), (64, 4, 4), (64, 8, 4), (32, 4, 4)]]
    columns = [triton.Config({"BLOCK_M": bm, "BLOCK_N": 128, "BLOCK_K": 32}, num_warps=nw, num_stages=2)
               for bm, nw in [(128, 8), (128, 4), (64, 4)]]
    sums = [triton.Config({"BLOCK_H": bh, "BLOCK_K": 8}, num_warps=4, num_stages=4) for bh in [256, 512]]
    for name, configs in [("_fused_up_proj_swiglu", rows), ("_fused_down_proj", rows), ("_moe_bwd_down_proj", rows),
                          ("_moe_bwd_dX_expanded", rows), ("_moe_bwd_dW1", columns), ("_moe_bwd_dW2", columns),
                          ("_token_gather_weighted_sum", sums)]:
        kernel = getattr(fused_moe_kernels, name + "_kernel")
        kernel.configs = configs
        if fused_moe.BLOCK_M_TOKEN != block_m:
            kernel.cache.clear()  # tuned for other rows
    fused_moe.BLOCK_M_TOKEN = block_m

    def layer(x_TD, with_router):
        topk_TK, weight_TK = choose(p, x_TD) if with_router else (p.topk_TK, p.weight_TK)
        return fused_moe.LigerFusedMoEFunction.apply(x_TD, p.w1_e2FD, p.w2_eDF, topk_TK.int(), weight_TK)

    return layer


def liger_rows_128(p):
    return liger(p, block_m=128)


def keep_tiles(tiles):
    """Keeps those tile shapes of QuACK that were the fastest or nearly so. Each of its tile shapes
    compiles for 20 s per kernel.
    """
    from quack import gemm_interface

    for tuner in [gemm_interface.gemm_tuned, gemm_interface.gemm_gated_tuned, gemm_interface.gemm_dgated_tuned]:
        kept = [c for c in tuner.configs if is_one_of(c.kwargs["config"], tiles)]
        tuner.configs = kept


def is_one_of(config, tiles):
    tile = (config.tile_m, config.tile_n, config.pingpong)
    return (tile in tiles and config.device_capacity == 9 and config.cluster_m == 2 and config.cluster_n == 1 and
            not config.swap_ab)


SONIC_TILES = [(128, 256, False), (128, 192, True), (256, 128, False), (128, 128, True), (256, 192, False)]


def sonicmoe(p, tiles=SONIC_TILES):
    """SonicMoE on QuACK, which interleaves gate and up rows."""
    import sonicmoe.functional as sonic
    from sonicmoe.enums import ActivationType

    keep_tiles(tiles)
    s = p.shape
    swiglu = ActivationType.SWIGLU
    stream = torch.cuda.current_stream().cuda_stream
    token_R = torch.arange(s.T * s.K, device=p.x_TD.device, dtype=torch.int32) // s.K
    w1_eF2D = p.w1_e2FD.detach().view(s.E, 2, s.F, s.D).transpose(1, 2).contiguous()
    p.w1_e2FD = w1_eF2D.view(s.E, 2 * s.F, s.D).requires_grad_()

    def layer(x_TD, with_router):
        w1, w2 = p.w1_e2FD.permute(1, 2, 0), p.w2_eDF.permute(1, 2, 0)
        if with_router:
            return sonic.moe_TC_softmax_topk_layer(x_TD, p.router_ED, w1, None, w2, None, s.K, stream, swiglu)[0]
        if not p.routable:  # an expert may come twice
            return sonic.moe_general_routing_inputs(x_TD, p.weight_TK.reshape(-1), token_R, p.topk_TK.reshape(-1), w1,
                                                    None, w2, None, s.E, stream, swiglu)[0]
        return given_topk(sonic, s, x_TD, w1, w2, p.topk_TK, p.weight_TK.float(), swiglu)

    return layer


def given_topk(sonic, s, x_TD, w1, w2, topk_TK, weight_TK, swiglu):
    """The part of moe_TC_softmax_topk_layer after its top-k."""
    R = s.T * s.K
    new = lambda n: torch.empty(n, dtype=torch.int32, device=x_TD.device)
    counts, offsets, row_token, row_pair, pair_row = new(s.E), new(s.E + 1), new(R), new(R), new(R)
    sonic.TC_topk_router_metadata_triton(topk_TK, s.E, counts, offsets, row_token, row_pair, pair_row)
    index = (row_token, row_pair, pair_row)
    a, h = sonic._UpProjection.apply(x_TD, w1, None, offsets, R, s.K, *index, None, False, swiglu, False, False)
    return sonic._DownProjection.apply(a, h, w2, None, weight_TK, offsets, s.T, s.K, *index, None, False, swiglu)


def scattermoe(p):
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    s = p.shape

    def layer(x_TD, with_router):
        topk_TK, weight_TK = choose(p, x_TD) if with_router else (p.topk_TK, p.weight_TK)
        index = flatten_sort_count(topk_TK, num_experts=s.E)
        h = parallel_linear(x_TD, p.w1_e2FD.permute(0, 2, 1), s.K, *index, grouped_out=True)
        gate, up = h.chunk(2, dim=-1)
        return parallel_linear(F.silu(gate) * up, p.w2_eDF.permute(0, 2, 1), 1, *index, gates=weight_TK,
                               grouped_in=True)

    return layer


PEERS = {f.__name__: f for f in [grouped_mm, grouped_mm_compiled, grouped_mm_max_autotune, transformers_grouped_mm,
                                 liger, liger_rows_128, sonicmoe, scattermoe]}
