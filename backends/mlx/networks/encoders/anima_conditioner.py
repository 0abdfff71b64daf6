# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Anima's text conditioner. What is unusual about it: `qwenimg.common.networks.encoders.anima_conditioner`.

B batch, T tokens of T5, S tokens of the language model, H heads, D head dim, C = H * D. Attribute paths are manifest
keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders import anima_conditioner
from qwenimg.common.networks.encoders.anima_conditioner import EPS, ConditionerConfig
from qwenimg.common.runtime.engine import NumpyArray

Pair = tuple[Array, Array]

# Layers


class Attention(mlx.nn.Module):
    def __init__(self, config: ConditionerConfig, context: int):
        super().__init__()
        dim, self.head_dim = config.model_dim, config.head_dim
        self.q_proj = ops.Linear(dim, dim, bias=False)
        self.k_proj = ops.Linear(context, dim, bias=False)
        self.v_proj = ops.Linear(context, dim, bias=False)
        self.o_proj = ops.Linear(dim, dim, bias=False)
        self.q_norm = ops.RMSNorm(self.head_dim, EPS)
        self.k_norm = ops.RMSNorm(self.head_dim, EPS)
        self.attend = ops.Attend()

    def heads(self, x: Array) -> Array:
        """[B L C] -> [B L H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def __call__(self, x: Array, context: Array, rope: Pair, context_rope: Pair) -> Array:
        """Attend from x [B T C] to `context` [B S C'], with the tables of both: [B T C] -> [B T C]."""
        q = ops.rotate_halves(self.q_norm(self.heads(self.q_proj(x))), *rope)
        k = ops.rotate_halves(self.k_norm(self.heads(self.k_proj(context))), *context_rope)
        return self.o_proj(self.attend(q, k, self.attend.values(self.heads(self.v_proj(context)))))


class ConditionerBlock(mlx.nn.Module):
    def __init__(self, config: ConditionerConfig):
        super().__init__()
        dim, hidden = config.model_dim, config.intermediate_size
        self.norm_self_attn = ops.RMSNorm(dim, EPS)
        self.self_attn = Attention(config, dim)
        self.norm_cross_attn = ops.RMSNorm(dim, EPS)
        self.cross_attn = Attention(config, config.source_dim)
        self.norm_mlp = ops.RMSNorm(dim, EPS)
        self.mlp = [ops.Linear(dim, hidden), mlx.nn.Identity(), ops.Linear(hidden, dim)]

    def __call__(self, x: Array, states: Array, rope: Pair, states_rope: Pair) -> Array:
        """[B T C] -> [B T C], for states [B S C']."""
        normed = self.norm_self_attn(x)
        x = ops.residual(x, self.self_attn(normed, normed, rope, rope))
        x = ops.residual(x, self.cross_attn(self.norm_cross_attn(x), states, rope, states_rope))
        return ops.residual(x, self.mlp[2](ops.gelu_erf(self.mlp[0](self.norm_mlp(x)))))


class Adapter(mlx.nn.Module):
    def __init__(self, config: ConditionerConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.embed = ops.Embedding(config.target_vocab_size, config.model_dim)
        self.blocks = [ConditionerBlock(config) for _ in range(config.num_layers)]
        self.out_proj = ops.Linear(config.model_dim, config.model_dim)
        self.norm = ops.RMSNorm(config.model_dim, EPS)

    def __call__(self, ids: Array, states: Array, rope: Pair, states_rope: Pair) -> Array:
        """Make text [B T C], float32, of ids [B T] and states [B S C'], with the tables of both."""
        x = ops.stream(self.embed(ids), self.stream)
        for block in self.blocks:
            x = block(x, states, rope, states_rope)
        return self.norm(self.out_proj(x))


# Model


class TextConditioner(mlx.nn.Module):
    def __init__(self, config: ConditionerConfig, stream: mx.Dtype):
        super().__init__()
        self.llm_adapter = Adapter(config, stream)

    def __call__(self, ids: Array, states: Array, rope: Pair, states_rope: Pair) -> Array:
        """[B T] and [B S C'] -> [B T C]."""
        return self.llm_adapter(ids, states, rope, states_rope)


# Runner


class Runner(LoadedNetwork[ConditionerConfig, TextConditioner]):
    network, role = TextConditioner, "text"

    @ops.computes
    def encode(self, ids: Sequence[int], states: NumpyArray) -> Array:
        """Make text [1 M C] of T5's ids of one prompt and its states [1 S C'], filled up with zeros, evaluated."""
        tables = (anima_conditioner.table(self.config, length) for length in (len(ids), states.shape[1]))
        ropes = (tuple(map(self.table, table)) for table in tables)
        text = self.model(ops.placed([list(ids)]), self.table(states), *ropes)
        return ops.eval(ops.pad_tokens(text, max(len(ids), self.config.min_sequence_length)))
