"""FLUX.1 Redux, by which a picture is text: configuration and manifest.

What is unusual about it:
- two linear layers with SiLU between them, of three times the width of T5's states, make a text token of the state of
  each patch of a picture; nothing else of the transformer knows of pictures;
- its published file and the folder `image_embedder` have the same names.

Source: the published configuration and file of FLUX.1-Redux-dev.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network

CLASS_NAME = "ReduxImageEncoder"
WIDER = 3  # times the width of a text state, between the layers
_NAMES = frozenset(f"redux_{layer}.{leaf}" for layer in ("up", "down") for leaf in ("weight", "bias"))


@dataclass(frozen=True, kw_only=True)
class ReduxConfig:
    """The fields of `image_embedder/config.json`. Defaults: FLUX.1-Redux-dev."""

    redux_dim: int = field(default=1152, metadata={"max": 16384})  # channels of a state of the image encoder
    txt_in_features: int = field(default=4096, metadata={"max": 16384})  # channels of a text state


def manifest(config: ReduxConfig) -> Manifest:
    """Return the shape of every tensor."""
    text = config.txt_in_features
    return params.merge(
        params.linear("redux_up", WIDER * text, config.redux_dim), params.linear("redux_down", text, WIDER * text)
    )


def is_in(names: Collection[str]) -> bool:
    """Return whether a file with tensors of these names is a Redux."""
    return any(name in names for name in _NAMES)


def config_of(shapes: Mapping[str, Shape]) -> ReduxConfig:
    """Return the configuration of a Redux whose tensors have these shapes. Raises ModelError."""
    up, down = (shapes.get(f"redux_{layer}.weight", ()) for layer in ("up", "down"))
    if len(up) != 2 or len(down) != 2 or 0 in (*up, *down):
        raise ModelError("lacks the matrices redux_up and redux_down: it is no FLUX.1 Redux as it is published")
    return ReduxConfig(redux_dim=up[1], txt_in_features=down[0])


NETWORK = Network(
    name="redux",
    role="text",
    kind=CLASS_NAME,
    config=ReduxConfig,
    manifest=manifest,
    traced=(
        Block(name="layer", paths=re.compile("redux_up|redux_down")),
        Block(name="model", paths=re.compile("")),
    ),
)
