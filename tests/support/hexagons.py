"""The pictures of `tools/hexagons.py`, encoded by a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hexagons
import numpy as np
from hexagons import SIDE, Captioned, known, learnt, remembered
from training import scenes as drawn

from qwenimg import Pipeline
from qwenimg.common.training.example import Example

__all__ = ["Encoded", "known", "learnt", "old", "remembered", "twelve"]

DROPOUT = 0.05  # of captions


class Encoded:
    """Pictures of scenes with captions, encoded by the model; see `Pictures`."""

    def __init__(self, pipe: Pipeline, pictures: Sequence[Captioned], dropout: float = DROPOUT):
        self.dropout, self.examples = dropout, list[Example]()
        for picture, caption in pictures:
            latents = pipe.model.vae.latents(drawn.render(picture, SIDE, SIDE)[None], None)
            request = pipe.check(caption, width=SIDE, height=SIDE)
            self.examples.append(Example(latents=np.asarray(latents, np.float32), request=request))

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, index: int, generator: np.random.Generator) -> Example:
        example = self.examples[index]
        if generator.random() >= self.dropout:
            return example
        return replace(example, request=replace(example.request, prompt=" "))


def twelve(pipe: Pipeline) -> Encoded:
    return Encoded(pipe, hexagons.twelve())


def old(pipe: Pipeline, count: int = hexagons.KNOWN) -> Encoded:
    return Encoded(pipe, hexagons.old()[:count])
