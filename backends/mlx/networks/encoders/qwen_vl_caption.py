# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Qwen2.5-VL with its head, which writes. What is unusual about it:
`qwenimg.common.networks.encoders.qwen_vl_caption`.

S tokens, D head dim, C hidden size, V vocabulary. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.encoders import qwen_vl_vision
from qwenimg.backends.mlx.networks.encoders.language_model import KeyValues, Pair
from qwenimg.backends.mlx.networks.encoders.qwen_vl_vision import QwenPictureEncoder
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig, prompt_rope
from qwenimg.common.networks.encoders.vision_tower import PicturePlace

# Model


class QwenCaptioner(QwenPictureEncoder):
    def __init__(self, config: QwenVLVisionConfig, stream: mx.Dtype):
        super().__init__(config, stream)
        self.lm_head = ops.Linear(config.hidden_size, config.vocab_size, bias=False)

    def scores(self, x: Array, rope: Pair, past: Sequence[KeyValues]) -> Array:
        """Return the score [V] of each token as the next one, in float32, for the start of the stream [1 S C] of the
        tokens after `past`, which has one for each layer."""
        for layer, kept in zip(self.layers, past, strict=True):
            x = layer(x, rope, kept)
        return ops.at_least_float32(self.lm_head(self.norm(x[:, -1:])))[0, 0]


# Runner


class Runner(qwen_vl_vision.Runner):
    network = QwenCaptioner
    model: QwenCaptioner
    past: list[KeyValues]
    length: int  # of the text so far, in tokens
    places: Sequence[PicturePlace]

    @ops.computes
    def begin(self, ids: Sequence[int], places: Sequence[PicturePlace], slots: Sequence[Array]) -> Array:
        """Return the scores [V] of the tokens that may follow `ids`, which have one for each slot of the pictures,
        evaluated. Forget an earlier text."""
        self.past = [KeyValues() for _ in self.model.layers]
        self.length, self.places = 0, places
        return self._scores(self.model.start(ops.placed([list(ids)]), places, slots))

    @ops.computes
    def follow(self, token: int) -> Array:
        """Return the scores [V] of the tokens that may follow `token`, which follows the text so far, evaluated."""
        return self._scores(self.model.start(ops.placed([[token]]), [], []))

    def _scores(self, x: Array) -> Array:
        """Return the scores after the start of the stream [1 S C] of the next tokens."""
        self.length += x.shape[1]
        table = prompt_rope(self.config, self.length, self.places)
        cos, sin = (self._table(part[-x.shape[1] :]) for part in table)
        return ops.eval(self.model.scores(x, (cos, sin), self.past))
