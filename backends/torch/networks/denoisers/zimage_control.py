"""A control network for Z-Image. What is unusual about it: `qwenimg.common.networks.denoisers.zimage_control`.

L image tokens with their pads, L' without, S text tokens, C channels, T time channels. Attribute paths are keys of the
manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers.zimage_dit import Changes, ModulatedBlock, TransformerBlock
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers.zimage_control import ZImageControlConfig
from qwenimg.common.runtime.engine import TimeStep


class FirstBlock(ModulatedBlock):
    def __init__(self, config: ZImageControlConfig):
        super().__init__(config)
        self.before_proj = ops.Linear(config.dim, config.dim)
        self.after_proj = ops.Linear(config.dim, config.dim)

    def forward(self, own: Tensor, temb: Tensor, rope: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream behind the block and its change, both [1 L C], for its `own` stream [1 L C] and the
        transformer's x [1 L C]."""
        own = self.updated(ops.add(x, self.before_proj(own)), temb, rope)
        return own, self.after_proj(own)


class NextBlock(ModulatedBlock):
    def __init__(self, config: ZImageControlConfig):
        super().__init__(config)
        self.after_proj = ops.Linear(config.dim, config.dim)

    def forward(self, own: Tensor, temb: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream behind the block and its change, both [1 L C]."""
        own = self.updated(own, temb, rope)
        return own, self.after_proj(own)


class ZImageControl(torch.nn.Module):
    def __init__(self, config: ZImageControlConfig, stream: torch.dtype):
        super().__init__()
        self.stream, self.places = stream, config.control_layers_places
        self.refiner_places = config.control_refiner_layers_places if config.add_control_noise_refiner else ()
        self.refiner_count = config.n_refiner_layers
        self.control_x_embedder = ops.Linear(config.features, config.dim)
        if config.add_control_noise_refiner == "control_noise_refiner":
            self.control_noise_refiner = torch.nn.ModuleList(_row(config, config.n_refiner_layers))
        elif config.own_refiner:
            blocks = [TransformerBlock(config) for _ in range(config.n_refiner_layers)]
            self.control_noise_refiner = torch.nn.ModuleList(blocks)
        self.control_layers = torch.nn.ModuleList(_row(config, config.layers))
        self.own_refiner = config.own_refiner

    def refined(self, own: Tensor, img: Tensor, temb: Tensor, rope: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return its stream [1 L C] behind its refiner blocks, and their changes, for its stream at the start and the
        transformer's."""
        if self.refiner_places:
            blocks = self.control_noise_refiner if self.own_refiner else self.control_layers
            steps = list(self.steps(blocks, own, img, temb, rope))
            return steps[-1][0], [change for _, change in steps]
        for block in self.control_noise_refiner:
            own = block(own, temb, rope)
        return own, []

    def steps(
        self, blocks: Iterable[Any], own: Tensor, x: Tensor, temb: Tensor, rope: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield its stream and its change behind each of its `blocks`, which begin with the transformer's stream x."""
        first: tuple[Tensor, ...] = (x,)
        for block in blocks:
            own, change = block(own, temb, rope, *first)
            first = ()
            yield own, change


def _row(config: ZImageControlConfig, count: int) -> list[ModulatedBlock]:
    return [FirstBlock(config), *(NextBlock(config) for _ in range(count - 1))]


# Runner


@dataclass(frozen=True)
class Controlled:
    """The network with an embedded picture, for one evaluation of the transformer."""

    model: ZImageControl
    picture: Tensor  # [1 L' C]
    scale: float

    def refined(self, img: Tensor, temb: Tensor, rope: Tensor) -> tuple[Tensor, Changes]:
        """See `PictureControl`. The picture's pads are those of the image."""
        own = ops.joined(self.picture, img[:, self.picture.shape[1] :], self.model.stream)
        own, changes = self.model.refined(own, img, temb, rope)
        places = self.model.refiner_places
        return own, self.placed(iter(changes), places, self.model.refiner_count)

    def changes(self, own: Tensor, x: Tensor, txt: Tensor, temb: Tensor, rope: Tensor, blocks: int) -> Changes:
        """See `PictureControl`. Each block runs when its change is taken."""
        own = ops.joined(own, txt, self.model.stream)
        steps = self.model.steps(self.model.control_layers, own, x, temb, rope)
        return self.placed((change for _, change in steps), self.model.places, blocks)

    def placed(self, changes: Iterator[Tensor], places: Sequence[int], blocks: int) -> Changes:
        """Yield the change behind each of `blocks` blocks, of which only those at `places` have one."""
        for place in range(blocks):
            if place not in places:
                yield ()
                continue
            change = next(changes)
            yield (change if self.scale == 1 else change * self.scale,)


class Runner(LoadedNetwork[ZImageControlConfig, ZImageControl]):
    network, role = ZImageControl, "transformer"

    @ops.computes
    def condition(self, text: Tensor, grid: tuple[int, int], picture: Tensor) -> Tensor:
        """Embed a packed picture [1 L' in] once. Text and grid reach it through the transformer's streams."""
        return ops.stream(self.model.control_x_embedder(picture), self.model.stream)

    @ops.computes
    def predict(self, x: Tensor, step: TimeStep, condition: Tensor, scale: float) -> Controlled:
        """Return the network with its picture and `scale`: the transformer calls it in each branch of guidance."""
        return Controlled(self.model, condition, scale)
