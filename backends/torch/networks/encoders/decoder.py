"""A language model as a text encoder, and with its head as a writer. What is unusual about it:
`qwenimg.common.networks.encoders.decoder`.

B batch, S tokens, L next tokens of all rows, H query heads, D head dim, C hidden size, V vocabulary. Attribute paths
are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.common.networks.causal_form import PLAIN, CausalForm
from qwenimg.common.networks.encoders.decoder import SILU, DecoderConfig, table_at, text_table
from qwenimg.common.networks.encoders.vision_tower import PicturePlace
from qwenimg.common.numbers.rope import Table, picture_positions, text_at
from qwenimg.common.precision.precision import Precision
from qwenimg.common.runtime.engine import NumpyArray
from qwenimg.common.weights.plan import LoadPlan

Pair = tuple[Tensor, Tensor]
PREFILL = 512  # tokens of a prompt that are computed at once


class Row:
    """A text that is being written: the keys and values of each layer's attention, and the position of the next
    token."""

    def __init__(self, layers: int, position: int, opening: Sequence[Pair] = ()):
        self.kept = [ops.KeyValues(*pair) for pair in opening] or [ops.KeyValues() for _ in range(layers)]
        self.position = position


# Layers


def norm(config: DecoderConfig, width: int) -> ops.RMSNorm:
    kind = ops.CentredRMSNorm if config.centred_norms else ops.RMSNorm
    return kind(width, config.rms_norm_eps)


class Attention(torch.nn.Module):
    def __init__(self, config: DecoderConfig, form: CausalForm):
        super().__init__()
        self.head_dim, self.form, self.pairs = config.head_dim, form, config.rope_pairs
        self.pads_first = config.pads_first
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = ops.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = ops.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = ops.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = ops.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = norm(config, config.head_dim) if config.qk_norm else torch.nn.Identity()
        self.k_norm = norm(config, config.head_dim) if config.qk_norm else torch.nn.Identity()
        self.attend = ops.Attend()

    def heads(self, x: Tensor) -> Tensor:
        """[B S H*D] -> [B S H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def forward(self, x: Tensor, rope: Pair, pads: int = 0, rows: Sequence[ops.KeyValues] = ()) -> Tensor:
        """[B S C] -> [B S C], causal. `pads` tokens behind the others see all of these, and no pad; before the others
        they see nothing. rows: the texts of which these are the next tokens, equally many of each."""
        q = self.turned(self.q_norm(self.heads(self.q_proj(x))), rope)
        k = self.turned(self.k_norm(self.heads(self.k_proj(x))), rope)
        v = self.attend.values(self.heads(self.v_proj(x)))
        out = self.continued(q, k, v, rows) if rows else self.attended(q, k, v, pads)
        return self.o_proj(self.attend.result(out))

    def turned(self, x: Tensor, rope: Pair) -> Tensor:
        """Apply RoPE to heads [B S H D]."""
        if self.pairs:
            wide = ops.at_least_float32(x)
            return ops.rotate_pairs(wide, ops.rope_freqs(*rope), wide.dtype)
        return ops.rotate_halves(x, *rope)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, pads: int) -> Tensor:
        """Attend from the tokens, causal, and from pads behind or before them: q, k, v [B S H D] -> [B S H*D]."""
        tokens = q.shape[1] - pads
        text = slice(pads, None) if self.pads_first else slice(tokens)
        keys, values = k[:, text], v[:, text]
        if self.form == PLAIN:
            out = ops.attention(q[:, text], keys, values, causal=True)
        else:
            out = ops.causal_attention(q[:, text], keys, values, self.form)
        if self.pads_first or not pads:
            return ops.behind_zeros(out, pads)
        return torch.cat((out, ops.attention(q[:, tokens:], keys, values)), dim=1)

    def continued(self, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[ops.KeyValues]) -> Tensor:
        """Attend within each of `rows`, to which k and v are added: q, k, v [1 L H D] -> [1 L H*D]."""
        count, parts = q.shape[1] // len(rows), []
        for i, row in enumerate(rows):
            tokens = slice(i * count, (i + 1) * count)
            row.extend(k[:, tokens], v[:, tokens])
            parts.append(ops.kept_attention(q[:, tokens], row, self.form))
        return torch.cat(parts, dim=1)


class MLP(torch.nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.silu = config.hidden_act == SILU
        self.gate_proj = ops.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = ops.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ops.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, values = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(
            ops.swiglu(gate, values) if self.silu else ops.gated_gelu(gate, values, self.down_proj.dtype)
        )


class DecoderLayer(torch.nn.Module):
    def __init__(self, config: DecoderConfig, number: int):
        super().__init__()
        self.post_norms = config.post_norms
        self.input_layernorm = norm(config, config.hidden_size)
        self.self_attn = Attention(config, config.form(number))
        self.post_attention_layernorm = norm(config, config.hidden_size)
        self.mlp = MLP(config)
        if config.post_norms:
            self.pre_feedforward_layernorm = norm(config, config.hidden_size)
            self.post_feedforward_layernorm = norm(config, config.hidden_size)

    def forward(self, x: Tensor, rope: Pair, pads: int = 0, rows: Sequence[ops.KeyValues] = ()) -> Tensor:
        """[B S C] -> [B S C]. pads, rows: as for the attention."""
        attended = self.self_attn(self.input_layernorm(x), rope, pads, rows)
        if self.post_norms:
            x = ops.residual(x, self.post_attention_layernorm(attended))
            return ops.residual(x, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))
        x = ops.residual(x, attended)
        return ops.residual(x, self.mlp(self.post_attention_layernorm(x)))


# Model


class Decoder(torch.nn.Module):
    def __init__(self, config: DecoderConfig, stream: torch.dtype):
        super().__init__()
        self.stream, self.depths = stream, config.depths
        self.scale, self.cap, self.tied = config.embedding_scale, config.final_logit_softcapping, not config.has_head
        self.embed_tokens = ops.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList([DecoderLayer(config, number) for number in range(config.used_layers)])
        if config.is_normed:
            self.norm = norm(config, config.hidden_size)
        if config.has_head:
            self.lm_head = ops.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, rope: Pair, pads: int = 0) -> Tensor:
        """Return the states that condition an image [B S C*taps], float32, for token ids [B S], `pads` of them pads,
        and RoPE tables [S D/2]."""
        return self.states(self.start(ids), rope, pads)

    def start(self, ids: Tensor, places: Sequence[PicturePlace] = (), slots: Sequence[Tensor] = ()) -> Tensor:
        """Return the start of the stream [B S C] for ids [B S], with the first of the slots [1+K slots C] of each
        picture at its place."""
        text = ops.stream(self.embed_tokens(ids), self.stream)
        text = text * self.scale if self.scale != 1 else text
        parts, token = [], 0
        for place, picture in zip(places, slots, strict=True):
            parts += [text[:, token : place.start], ops.stream(picture[:1], self.stream)]
            token = place.start + picture.shape[1]
        return torch.cat([*parts, text[:, token:]], dim=1) if parts else text

    def states(
        self, x: Tensor, rope: Pair, pads: int = 0, places: Sequence[PicturePlace] = (), slots: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return the states that condition an image for the start of the stream. places, slots: as for `start`; the
        further slots are added after the first layers."""
        states = []
        for number, layer in enumerate(self.layers, start=1):
            x = self.deepened(layer(x, rope, pads), number, places, slots)
            states += [x] if number in self.depths else []
            if states and number == max(self.depths):
                break
        return ops.at_least_float32(torch.cat(states, dim=-1)) if states else self.norm(x)

    def continued(
        self, x: Tensor, rope: Pair, rows: Sequence[Row], places: Sequence[PicturePlace], slots: Sequence[Tensor]
    ) -> Tensor:
        """Run all layers on the next tokens of `rows` [1 L C], equally many, which keep their keys and values."""
        for number, layer in enumerate(self.layers, start=1):
            kept = [row.kept[number - 1] for row in rows]
            x = self.deepened(layer(x, rope, 0, kept), number, places, slots)
        return x

    def deepened(self, x: Tensor, number: int, places: Sequence[PicturePlace], slots: Sequence[Tensor]) -> Tensor:
        """Add the slots that belong after the layer `number`, if there are some."""
        deep = [picture[number : number + 1] for picture in slots if number < picture.shape[0]]
        return self.added(x, places, deep) if deep else x

    def added(self, x: Tensor, places: Sequence[PicturePlace], slots: Sequence[Tensor]) -> Tensor:
        """Add slots [1 slots C] of each picture to the stream [1 S C] at its place."""
        parts, token = [], 0
        for place, picture in zip(places, slots, strict=True):
            end = place.start + picture.shape[1]
            parts += [x[:, token : place.start], ops.add(x[:, place.start : end], picture)]
            token = end
        return torch.cat([*parts, x[:, token:]], dim=1)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores of the tokens that may follow states [1 L C], in float32: [L V]."""
        states = self.norm(x)
        scores = ops.at_least_float32(self.embed_tokens.scores(states) if self.tied else self.lm_head(states))[0]
        return self.cap * ops.tanh(scores / self.cap) if self.cap else scores


def cut(
    places: Sequence[PicturePlace], slots: Sequence[Tensor], first: int, end: int
) -> tuple[list[PicturePlace], list[Tensor]]:
    """Return the places and slots of the pictures within the tokens from `first` to `end`, counted from `first`."""
    within, parts = list[PicturePlace](), list[Tensor]()
    for place, picture in zip(places, slots, strict=True):
        start, stop = max(first, place.start), min(end, place.start + picture.shape[1])
        if start < stop:
            within.append(place._replace(start=start - first))
            parts.append(picture[:, start - place.start : stop - place.start])
    return within, parts


# Runners

Config = TypeVar("Config", bound=DecoderConfig)
Model = TypeVar("Model", bound=Decoder)


class Writer(LoadedNetwork[Config, Model]):
    """The runner of a language model, which writes if its weights have a head."""

    def __init__(self, config: Config, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(config, plan, precision, device)
        self.rows = list[Row]()

    @ops.computes
    def opening(self, ids: Sequence[int]) -> list[Pair]:
        """Return the keys and values [1 H S D] of each layer for the first `ids` of texts, evaluated."""
        row = Row(len(self.model.layers), len(ids))
        self._read(ids, row, 0)
        return [(kept.keys[:, :, : kept.length], kept.values[:, :, : kept.length]) for kept in row.kept]

    @ops.computes
    def begin(
        self,
        ids: Sequence[int],
        places: Sequence[PicturePlace] = (),
        slots: Sequence[Tensor] = (),
        opening: Sequence[Pair] = (),
    ) -> Tensor:
        """Begin a text with `ids`, which have one for each slot of the pictures, as the last row. Return the scores [V]
        of its next token, evaluated. opening: of the first ids, which come before any picture."""
        row = Row(len(self.model.layers), int(picture_positions(len(ids) + 1, places)[-1, 0]), opening)
        states = self._read(ids, row, row.kept[0].length, places, slots)
        self.rows.append(row)
        return ops.eval(self.model.scores(states[:, -1:])[0])

    def _read(
        self,
        ids: Sequence[int],
        row: Row,
        start: int,
        places: Sequence[PicturePlace] = (),
        slots: Sequence[Tensor] = (),
    ) -> Tensor:
        """Append the ids from `start` on to a row; return the states of the last of them, evaluated."""
        positions = picture_positions(len(ids), places)
        for first in range(start, len(ids), PREFILL):
            part = slice(first, first + PREFILL)
            seen = cut(places, slots, first, first + PREFILL)
            x = self.model.start(ops.placed([list(ids[part])], self.device), *seen)
            rope = self._rope(table_at(self.config, positions[part]))
            states = ops.eval(self.model.continued(x, rope, [row], *seen))
        return states

    @ops.computes
    def follow(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row. Return the scores [rows V] of the next ones, evaluated."""
        assert len(tokens) == len(self.rows), f"{len(tokens)} tokens for {len(self.rows)} rows"
        rope = self._rope(table_at(self.config, text_at([row.position for row in self.rows])))
        x = self.model.start(ops.placed([list(tokens)], self.device))
        scores = ops.eval(self.model.scores(self.model.continued(x, rope, self.rows, (), ())))
        for row in self.rows:
            row.position += 1
        return scores

    def end(self, row: int) -> None:
        """Forget a row; later ones move up."""
        del self.rows[row]

    def forget(self) -> None:
        """Forget all rows."""
        self.rows.clear()

    def _encoded(
        self, ids: Sequence[int], pads: int, places: Sequence[PicturePlace], slots: Sequence[Tensor]
    ) -> Tensor:
        x = self.model.start(ops.placed([list(ids)], self.device), places, slots)
        rope = self._rope(text_table(self.config, len(ids), places, pads))
        return ops.eval(self.model.states(x, rope, pads, places, slots))

    def _rope(self, table: Table) -> Pair:
        cos, sin = (self._table(part) for part in table)
        return cos, sin

    def _table(self, values: NumpyArray) -> Tensor:
        return self.table(values)


class Runner(Writer[DecoderConfig, Decoder]):
    network, role = Decoder, "text"

    @ops.computes
    def encode(self, ids: Sequence[int], pads: int = 0) -> Tensor:
        """Encode the token ids of one prompt, `pads` of them pads: [1 S C*taps], evaluated."""
        rope = self._rope(text_table(self.config, len(ids), (), pads))
        return ops.eval(self.model(ops.placed([list(ids)], self.device), rope, pads))
