# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""CLIP's text encoder. What is unusual about it: `qwenimg.common.networks.encoders.clip`.

B prompts or chunks of them, S tokens, H heads, D head dim, C hidden size, P width of the pooled vector. Attribute paths
are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.clip import CLIPConfig, LayerSizes, Place, eos_position

# Layers


class Embeddings(mlx.nn.Module):
    def __init__(self, config: CLIPConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.token_embedding = ops.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = ops.Embedding(config.max_position_embeddings, config.hidden_size)

    def __call__(self, ids: Array, places: Sequence[Place], vectors: Array | None) -> Array:
        """[B S] -> [B S C], with the `vectors` [N C] at their places instead of the tokens'."""
        x = ops.stream(self.token_embedding(ids), self.stream)
        if vectors is not None:
            x = ops.with_rows(x, places, vectors)
        return ops.add(x, self.position_embedding.weight[: ids.shape[1]])


class Attention(mlx.nn.Module):
    def __init__(self, config: LayerSizes, causal: bool):
        super().__init__()
        self.head_dim, self.causal = config.head_dim, causal
        self.q_proj = ops.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = ops.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = ops.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = ops.Linear(config.hidden_size, config.hidden_size)
        self.attend = ops.Attend()

    def heads(self, x: Array) -> Array:
        """[B S C] -> [B S H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """[B S C] -> [B S C]; mask [B 1 1 S] as for `ops.attention`."""
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        return self.out_proj(self.attend.result(ops.attention(q, k, self.attend.values(v), mask, causal=self.causal)))


ACTIVATIONS = {"quick_gelu": ops.quick_gelu, "gelu": ops.gelu_erf, "gelu_pytorch_tanh": ops.gelu}


class MLP(mlx.nn.Module):
    def __init__(self, config: LayerSizes):
        super().__init__()
        self.fc1 = ops.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.fc2 = ops.Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Array) -> Array:
        return self.fc2(self.activation(self.fc1(x)))


class EncoderLayer(mlx.nn.Module):
    def __init__(self, config: LayerSizes, causal: bool):
        """causal: a token attends to those before it alone, as in a text."""
        super().__init__()
        self.layer_norm1 = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = Attention(config, causal)
        self.layer_norm2 = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """[B S C] -> [B S C]."""
        x = ops.residual(x, self.self_attn(self.layer_norm1(x), mask))
        return ops.residual(x, self.mlp(self.layer_norm2(x)))


class Encoder(mlx.nn.Module):
    def __init__(self, config: CLIPConfig):
        super().__init__()
        self.layers = [EncoderLayer(config, causal=True) for _ in range(config.num_hidden_layers)]

    def __call__(self, x: Array, mask: Array | None = None) -> list[Array]:
        """Return the states [B S C] before each layer, and after the last."""
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], mask))
        return states


# Model


class CLIPTextEncoder(mlx.nn.Module):
    def __init__(self, config: CLIPConfig, stream: mx.Dtype):
        super().__init__()
        self.embeddings = Embeddings(config, stream)
        self.encoder = Encoder(config)
        self.final_layer_norm = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)
        if config.projection_dim:
            self.text_projection = ops.Linear(config.hidden_size, config.projection_dim, bias=False)

    def __call__(
        self,
        ids: Array,
        ends: Sequence[int],
        skipped: int,
        normed: bool,
        places: Sequence[Place] = (),
        vectors: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, Array]:
        """Encode token ids [B S], with the position of each row's end token, to states [B S C] and pooled vectors [B
        P].

        The states are those before the last `skipped` layers, with the final norm if `normed`. P is C where there is no
        projection. `vectors` [N C] of textual inversion replace the embeddings of the tokens at `places`. mask [B 1 1
        S]: True for the tokens that others see.
        """
        states = self.encoder(self.embeddings(ids, places, vectors), mask)
        chosen = states[-1 - skipped]
        rows = [states[-1][row : row + 1, end] for row, end in enumerate(ends)]
        pooled = self.final_layer_norm(mx.concatenate(rows))
        if hasattr(self, "text_projection"):
            pooled = self.text_projection(pooled)
        return self.final_layer_norm(chosen) if normed else chosen, pooled


# Runner


class Runner(LoadedNetwork[CLIPConfig, CLIPTextEncoder]):
    network, role = CLIPTextEncoder, "text"

    @ops.computes
    def encode(
        self,
        ids: Sequence[Sequence[int]],
        skipped: int,
        normed: bool,
        places: Sequence[Place] = (),
        vectors: np.ndarray | None = None,
    ) -> tuple[Array, Array]:
        """Encode chunks of ids [N S] to states [N S C] and pooled vectors [N P], with the `vectors` at their places."""
        ends = [eos_position(self.config, chunk) for chunk in ids]
        rows = ops.placed([list(chunk) for chunk in ids])
        added = None if vectors is None else self.table(vectors)
        mask = None
        if self.config.masks_padding:
            mask = ops.placed([[[[place <= end for place in range(len(ids[0]))]]] for end in ends])
        return self.model(rows, ends, skipped, normed, places, added, mask)
