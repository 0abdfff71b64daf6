"""The model of one part of a Stable Diffusion schedule, the base or the refiner: its texts, its UNet, and how steps are
made in the memory there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.stable_diffusion import checkpoint as checkpoints
from qwenimg.common.families.stable_diffusion import memory
from qwenimg.common.families.stable_diffusion.texts import ClipTexts
from qwenimg.common.memory.memory import scores
from qwenimg.common.memory.needs import Needs
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.numbers import timesteps
from qwenimg.common.pipeline.inpaint import Latents
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import UNet
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.weights.lora import Deltas

AESTHETIC, POOR_AESTHETIC = 6.0, 2.5  # the refiner's aesthetic score for the prompt and for the negative branch


@dataclass(frozen=True, kw_only=True, eq=False)
class Conditioning:
    """What the UNet gets beside latents and time. `added`: rows for SDXL's sizes and pooled text, None for others."""

    texts: Latents  # [B, S, C]; the prompt's first, then the negative one's
    added: Latents | None

    def part(self, begin: int, end: int) -> Conditioning:
        """Of these branches."""
        added = None if self.added is None else self.added[begin:end]
        return Conditioning(texts=self.texts[begin:end], added=added)


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """How steps are made: so many branches of guidance in one batch, `more` bytes beside the weights of `unet`."""

    branches: int
    more: int
    unet: Component


class Expert:
    """The model of one part of the schedule, the base or the refiner: its texts and its UNet."""

    def __init__(self, checkpoint: Checkpoint, runtime: Runtime, make_room: Callable[[int, str], int]):
        self.checkpoint, self.runtime, self.make_room = checkpoint, runtime, make_room
        self.facts = checkpoints.facts(checkpoint)
        self.unet_config: UNetConfig = checkpoint["unet"].config
        self.texts = ClipTexts(checkpoint, runtime, make_room)
        self._unet: UNet | None = None
        self._open = checkpoint["unet"]  # as it was loaded
        self._checked = False  # its weights

    def conditioning(self, request: Request) -> Conditioning:
        prompts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        states, pooled = self.texts.states(prompts, request.clip_skip)
        if self.checkpoint.zeros_for_empty and request.guided and not request.negative_prompt:
            states[1], pooled[1] = 0, 0
        return Conditioning(texts=states, added=self._added(request, pooled))

    def _added(self, request: Request, pooled: Latents) -> Latents | None:
        """SDXL's pooled text and sinusoids of original size, crop, and target size or aesthetic score: [B, A]."""
        if not self.facts.sdxl:
            return None
        sizes: list[float] = [request.height, request.width, 0, 0]
        last = [[AESTHETIC], [POOR_AESTHETIC]] if self.facts.refiner else [[request.height, request.width]] * 2
        channels = self.unet_config.addition_time_embed_dim or 256
        rows = [sinusoids(self.unet_config, [*sizes, *last[i]], channels).reshape(-1) for i in range(len(pooled))]
        return np.concatenate([pooled, np.stack(rows)], axis=1).astype(np.float32)

    def adapt(self, deltas: Deltas) -> None:
        """Of what is loaded, the weights that change are read again."""
        self.checkpoint = self.checkpoint.with_deltas(deltas)
        self.texts.renew(self.checkpoint.texts)
        if self._unet is not None:
            self._open = self.runtime.readapt(self._unet, self._open, self.checkpoint["unet"], "unet", self.free)

    def unet(self, component: Component, more: int) -> UNet:
        """The UNet as `component`, which is what `steps` chose, once it is known that `more` bytes of a step fit."""
        if self._unet is not None and component is self._open:
            self.runtime.check_fit("a step of this size", more)
            return self._unet
        self.free()
        self._unet, self._open = self.runtime.open(component, self.name, more), component
        return self._unet

    def room(self, more: int) -> int:
        """Bytes for its weights and a step, of which `more` are asked for."""
        whole = 0 if self.loaded else self.runtime.weight_bytes(self.checkpoint["unet"])
        return self.make_room(whole + more, self.name) + sum(self.held.values())

    @property
    def name(self) -> str:
        return "refiner" if self.facts.refiner else "unet"

    def check_weights(self) -> None:
        """Of the UNet, once, before it is loaded."""
        if not self.loaded and not self._checked:
            self.runtime.check_weights(self.checkpoint["unet"], "refiner")
        self._checked = True

    @property
    def held(self) -> dict[str, int]:
        """Bytes of the UNet's weights where it is loaded, by the name that stages have for it."""
        return {self.name: self.runtime.weight_bytes(self._open)} if self.loaded else {}

    def add_texts(self, needs: Needs, request: Request, counted: bool) -> None:
        """Adds the stage in which its texts are encoded, unless they are; where they are not counted, one chunk."""
        prompts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        if not self.texts.has(prompts, request.clip_skip):
            whole = max(self.runtime.weight_bytes(part) for part in self.checkpoint.texts.values())
            needs.make_room({"text encoder": whole}, 0)
            chunks = max(map(self.texts.chunks, [*prompts, ""])) if counted else 1
            taken = [self.texts.needs(part, needs.left({}), chunks) for part in self.checkpoint.texts.values()]
            weights, activations = max(taken, key=sum)
            needs.add("text", "the text encoder", {"text encoder": weights}, activations)

    def add_steps(self, needs: Needs, request: Request, shape: tuple[int, int], calls: int) -> None:
        """Adds the stage of its UNet, which is called so many times."""
        title = "a step of this size" if self.loaded else f"the {self.name}"
        stage = "refine" if self.facts.refiner else "denoise"
        there = self.held or {self.name: self.runtime.weight_bytes(self.checkpoint["unet"])}
        needs.make_room(there, self.step_bytes(request, *shape, 1 + request.guided))
        steps = self.steps(request, shape, needs.left({self.name: 0}))
        weights = {self.name: self.runtime.weight_bytes(steps.unet)}
        in_turn = 1 + request.guided - steps.branches  # calls behind the first one, of a guided step
        activations = max(steps.more, self.runtime.loading_bytes(steps.unet))
        about = "one branch of guidance after the other" if in_turn else ""
        needs.add(stage, title, weights, activations, stays=True, about=about)
        needs.streamed += calls * (1 + request.cfg_end * in_turn) * self.runtime.streamed_bytes(steps.unet)

    def steps(self, request: Request, shape: tuple[int, int], room: int) -> Steps:
        """How steps are made in `room` bytes, the UNet's among them: with all of it in memory where that fits, else
        with blocks streamed. Either way all branches of guidance go in one batch where that fits, else one after the
        other: streamed blocks are then read for each. Where nothing fits, what takes the least."""
        counts = dict.fromkeys((1 + request.guided, 1))
        found = [self._steps(count, self.step_bytes(request, *shape, count), room) for count in counts]

        def order(steps: Steps) -> tuple[int, bool]:
            over = self.runtime.weight_bytes(steps.unet) + steps.more - room
            return max(0, over), self.runtime.streamed_bytes(steps.unet) > 0

        return min(found, key=order)

    def _steps(self, branches: int, more: int, room: int) -> Steps:
        """With the UNet as it is loaded, or as it is to be for `room` bytes."""
        opened = self._open if self.loaded else None
        component = self.runtime.fitting(self.checkpoint["unet"], opened, room, more)
        return Steps(branches=branches, more=more, unet=component)

    def step_bytes(self, request: Request, height: int, width: int, branches: int) -> int:
        config = self.unet_config
        most = self.runtime.engine.workspace.score_bytes
        attending = [(i, level.heads) for i, level in enumerate(config.down) if level.depth]
        held = max((scores(heads, branches, height * width // 4**i, most) for i, heads in attending), default=0)
        kept = memory.kept_bytes(config, 1 + request.guided, height, width) if request.caches else 0
        activations = memory.step_peak(config, branches, height, width) + held
        return self.runtime.call_bytes(self.checkpoint["unet"], activations) + kept

    @property
    def loaded(self) -> bool:
        return self._unet is not None

    def free(self) -> None:
        self._unet = None
        self.runtime.engine.release()


def sinusoids(config: UNetConfig, values: Sequence[float], channels: int) -> NDArray[np.float64]:
    """Of times and of sizes alike, [N, channels], in the model's own order."""
    return timesteps.unet_sinusoids(values, channels, cosines_first=config.flip_sin_to_cos, shift=config.freq_shift)
