"""The cases of tools/golden.py. A comment above each case and tests/golden/data/README.md say what it
is for.
"""

from dataclasses import dataclass, field

# Sizes are tiny, odd where they may be, and differ from each other, so that a swapped dimension cannot fit by luck.
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 14, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "sliding_window": None,
    "use_sliding_window": False, "norm_topk_prob": True, "tie_word_embeddings": False,
}
LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}
QWEN3_DENSE = LLAMA | {"model_type": "qwen3", "head_dim": 10, "rms_norm_eps": 1e-6, "sliding_window": None,
                       "use_sliding_window": False}
QWEN2 = LLAMA | {"model_type": "qwen2", "rms_norm_eps": 1e-6, "sliding_window": None, "use_sliding_window": False}
QWEN2_MOE = QWEN2 | {
    "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 14,
    "shared_expert_intermediate_size": 22, "norm_topk_prob": False,
}
OLMOE = {
    "model_type": "olmoe", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-2, "norm_topk_prob": False, "tie_word_embeddings": False,
}

DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 5, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 14, "first_k_dense_replace": 1, "topk_method": "greedy", "routed_scaling_factor": 1.5,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "norm_topk_prob": False, "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {key: value for key, value in DEEPSEEK_V2.items() if key != "topk_method"} | {
    "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "n_shared_experts": 1, "num_mtp_layers": 0,
}
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "num_local_experts": 8,
    "num_experts_per_tok": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "sliding_window": 4,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}


@dataclass
class Case:
    """One folder: the model, the spelling of its config.json, and the documents in each row of tokens."""
    config: dict
    theta: float
    spelling: str  # "v4": rope_theta, torch_dtype, num_experts; "v5": rope_parameters, dtype, num_local_experts
    rows: list  # lengths of the documents in each row; rows have equal lengths
    rope: dict = field(default_factory=lambda: {"rope_type": "default"})
    fp8_block: tuple = ()  # block shape of matrices in 8-bit floats, with one scale per block
    mxfp4: bool = False  # experts are written in 4-bit floats
    mtp: int = 0  # depths of multi-token prediction
    reseed: int = 0  # another seed, where the default one has two scores too close to call

    @property
    def packed(self):
        return any(len(row) > 1 for row in self.rows)


CASES = {
    # head_dim is absent, so it is hidden / heads = 6. eps is large, so that an error shows if it is
    # ignored.
    "mixtral_v4": Case(MIXTRAL | {"rms_norm_eps": 1e-2}, 500.0, "v4", [[7], [7]]),
    # heads * head_dim = 32, hidden = 24; tied embeddings; one kv head.
    "mixtral_v5_tied": Case(MIXTRAL | {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
                            1e4, "v5", [[5], [5], [5]]),
    # layer 0 is dense, by its name.
    "qwen3_moe_v5": Case(QWEN3 | {"num_hidden_layers": 3, "mlp_only_layers": [0], "moe_intermediate_size": 10},
                         500.0, "v5", [[7], [7]]),
    # layers 0 and 2 are dense, by step; top-k weights are those of the softmax.
    "qwen3_moe_v4_step2": Case(QWEN3 | {"num_hidden_layers": 3, "decoder_sparse_step": 2, "norm_topk_prob": False,
                                        "rms_norm_eps": 1e-2}, 1e4, "v4", [[7], [7]]),
    # every layer is MoE; an odd number of experts, top-3; tied embeddings.
    "qwen3_moe_tied": Case(QWEN3 | {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False,
                                    "num_key_value_heads": 1, "tie_word_embeddings": True}, 1e4, "v5", [[11]]),
    # documents are kept apart in a row: positions restart, and attention does not cross; one
    # document has a single token.
    "qwen3_moe_packed": Case(QWEN3 | {"mlp_only_layers": [1]}, 500.0, "v4", [[4, 5], [1, 5, 3]]),
    # dense families: head_dim is absent; eps is large.
    "llama_v4": Case(LLAMA | {"rms_norm_eps": 1e-2}, 500.0, "v4", [[7], [7]]),
    # the window is shorter than the row; heads * head_dim differs from hidden; tied embeddings, one
    # kv head.
    "mistral_v5_window": Case(MISTRAL | {"head_dim": 8, "sliding_window": 4, "num_key_value_heads": 1,
                                         "tie_word_embeddings": True}, 1e4, "v5", [[9], [9]]),
    # q and k are normed per head; documents are kept apart.
    "qwen3_v4_packed": Case(QWEN3_DENSE, 1e4, "v4", [[4, 5], [1, 5, 3]]),
    # q, k and v have biases; tied embeddings.
    "qwen2_v4": Case(QWEN2 | {"tie_word_embeddings": True}, 1e4, "v4", [[7], [7]]),
    # the same with a gated shared expert; layer 0 is dense.
    "qwen2_moe_v5": Case(QWEN2_MOE | {"num_hidden_layers": 3, "mlp_only_layers": [0]}, 500.0, "v5", [[7], [7]]),
    # q and k are normed over all heads, of which k has fewer; eps is large.
    "olmoe_v4_packed": Case(OLMOE, 1e4, "v4", [[4, 5], [1, 5, 3]]),
    # frequencies are stretched as in Llama 3.1, in all three of its ranges.
    "llama_v4_llama3": Case(LLAMA | {"head_dim": 12}, 50.0, "v4", [[9], [9]], LLAMA3),
    # frequencies are stretched by YaRN, which has its own magnitude.
    "qwen3_v5_yarn": Case(QWEN3_DENSE, 500.0, "v5", [[9], [9]], YARN),
    # latent attention with a query latent; four groups of two experts; YaRN with two mscales;
    # documents are kept apart.
    "deepseek_v3_v4_packed": Case(DEEPSEEK_V3, 500.0, "v4", [[4, 5], [1, 5, 3]],
                                  YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}, reseed=1),
    # no query latent, v wider than k; halves rotate instead of neighbours; no groups, top-3 of 7,
    # weights not normalized.
    "deepseek_v3_v5": Case(DEEPSEEK_V3 | {"q_lora_rank": None, "v_head_dim": 17, "rope_interleave": False,
                                          "n_routed_experts": 7, "num_experts_per_tok": 3, "n_group": 1,
                                          "topk_group": 1, "norm_topk_prob": False}, 1e4, "v5", [[7], [7]]),
    # groups are scored by their best expert; no query latent; YaRN with one mscale, which scales
    # the scores.
    "deepseek_v2_v4": Case(DEEPSEEK_V2 | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4,
                                          "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1}, 500.0,
                           "v4", [[9], [9]], YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, reseed=1),
    # greedy choice; every layer is MoE; documents are kept apart.
    "deepseek_v2_v5_packed": Case(DEEPSEEK_V2 | {"first_k_dense_replace": 0}, 1e4, "v5", [[4, 5], [1, 5, 3]]),
    # matrices of the layers are 8-bit floats; blocks at the edges are partial.
    "deepseek_v3_fp8": Case(DEEPSEEK_V3, 1e4, "v4", [[7], [7]], fp8_block=(8, 16)),
    # sinks, a window in every other layer, biases everywhere, clamped activation; YaRN that does
    # not truncate.
    "gpt_oss_v4": Case(GPT_OSS, 500.0, "v4", [[9], [9]], YARN | {"truncate": False}),
    # windows in other layers than by default; down_proj of experts is square; documents are kept
    # apart.
    "gpt_oss_v5_packed": Case(GPT_OSS | {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2,
                                         "num_hidden_layers": 2, "sliding_window": 3,
                                         "layer_types": ["full_attention", "sliding_attention"]},
                              1e4, "v5", [[4, 5], [1, 5, 3]]),
    # experts are 4-bit blocks, square too; tied embeddings, one kv head.
    "gpt_oss_mxfp4": Case(GPT_OSS | {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4,
                                     "num_hidden_layers": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2,
                                     "tie_word_embeddings": True},
                          500.0, "v4", [[7], [7]], YARN | {"truncate": False}, mxfp4=True),
    # multi-token prediction as released; documents are kept apart, one of two tokens and one of a
    # single token.
    "deepseek_v3_mtp": Case(DEEPSEEK_V3 | {"num_mtp_layers": 1}, 500.0, "v4", [[4, 2, 3], [1, 5, 3]], mtp=1,
                            reseed=3),
    # two depths, each with the output of the one before as input.
    "deepseek_v3_mtp2": Case(DEEPSEEK_V3 | {"num_mtp_layers": 2, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
                             1e4, "v5", [[7], [7]], mtp=2),
    # q, k and v are clipped after the norms at a bound that many elements exceed; q, k, v and o
    # have biases.
    "olmoe_v5_clip_bias": Case(OLMOE | {"clip_qkv": 1.0, "attention_bias": True}, 1e4, "v5", [[7], [7]]),
    # attention_bias of the other families: q, k, v and o.
    "llama_v4_bias": Case(LLAMA | {"attention_bias": True}, 1e4, "v4", [[7], [7]]),
    "qwen3_v5_bias": Case(QWEN3_DENSE | {"attention_bias": True, "tie_word_embeddings": True}, 1e4, "v5", [[7], [7]]),
    "qwen3_moe_v4_bias_packed": Case(QWEN3 | {"attention_bias": True, "mlp_only_layers": [0]}, 1e4, "v4",
                                     [[4, 5], [1, 5, 3]]),
    # attention_bias of latent attention: the two down projections and o; or, without a query
    # latent, one of them and o.
    "deepseek_v3_v4_bias_packed": Case(DEEPSEEK_V3 | {"attention_bias": True}, 1e4, "v4", [[4, 5], [1, 5, 3]],
                                       reseed=1),
    "deepseek_v2_v5_bias": Case(DEEPSEEK_V2 | {"attention_bias": True, "q_lora_rank": None, "v_head_dim": 9}, 1e4,
                                "v5", [[7], [7]]),
}
