"""The MoE layers that are compared, and the routes of their tokens.

Routing is a rule, so that every implementation computes the same counts from (shape, routing, seed):

    balanced   slot k of token t goes to expert (t K + k) mod E
    zipf       popularity p[e] is proportional to (rank[e] + 1)^-s with rank[e] = (5 e + 3) mod E, s = 1 by default.
               E > K: token t takes the K experts with the largest log p[e] - log(-log u(t E + e)). That
               draws K different experts one after the other by popularity.
               E = K (a slice of an expert-parallel group, whose rows come from the tokens of many ranks):
               slot (t, k) takes the first expert whose cumulative popularity exceeds u(t K + k).
               Slots of a token may take the same expert.

    u(i) = ((m(seed + (i + 1) 0x9E3779B97F4A7C15) >> 11) + 1/2) 2^-53,
    where m is the finalizer of SplitMix64 modulo 2^64.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    D: int  # width of the model
    F: int  # width of an expert
    E: int  # experts here
    K: int  # experts per token
    T: int = 32768

    def flops(self):
        """Forward and backward of the experts: 3 matrices, 2 operations, 3 passes."""
        return 18 * self.T * self.K * self.D * self.F


SHAPES = {s.name: s for s in [
    Shape("mixtral-8x7b", 4096, 14336, 8, 2),
    Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
    Shape("deepseek-v3-8-local", 7168, 2048, 8, 8),
    Shape("olmoe", 2048, 1024, 64, 8),
    Shape("gpt-oss-20b", 2880, 2880, 32, 4),  # without biases, and with SwiGLU, in other software
]}


def uniform(n, seed):
    with np.errstate(over="ignore"):
        x = np.uint64(seed) + (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def popularity(E, exponent):
    p = (((5 * np.arange(E) + 3) % E) + 1.0) ** -exponent
    return p / p.sum()


def zipf_keys(shape, exponent, seed):
    """Returns keys [T, E], whose K largest are the choice of each token."""
    u = uniform(shape.T * shape.E, seed).reshape(shape.T, shape.E)
    return np.log(popularity(shape.E, exponent)) - np.log(-np.log(u))


def route(shape, routing, exponent=1.0, seed=1):
    """Returns [T, K] i32 experts, and [T, E] f32 logits whose K largest are these experts. The logits
    are None where no router could choose them.
    """
    T, E, K = shape.T, shape.E, shape.K
    if routing == "balanced":
        topk = (np.arange(T * K) % E).reshape(T, K)
        noise = np.random.default_rng(seed).standard_normal((T, E), dtype=np.float32)
        logits = np.clip(noise, -3, 3)
        np.put_along_axis(logits, topk, np.float32(8) - np.arange(K, dtype=np.float32) / 4, 1)
        return topk.astype(np.int32), logits
    if E == K:
        edges = np.cumsum(popularity(E, exponent))
        topk = np.searchsorted(edges, uniform(T * K, seed), side="right").clip(max=E - 1)
        return topk.reshape(T, K).astype(np.int32), None
    keys = zipf_keys(shape, exponent, seed)
    return np.argsort(-keys, axis=1, kind="stable")[:, :K].astype(np.int32), keys.astype(np.float32)
