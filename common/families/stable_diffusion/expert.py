"""The model for one part of a Stable Diffusion schedule, the base or the refiner: its texts, its UNet, and the memory
of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.stable_diffusion import checkpoint as checkpoints
from qwenimg.common.memory import operations
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.numbers import timesteps
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.texts.clip_texts import ClipKey, ClipTexts
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg_of_sum, rescaled_cfg
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.prompts import composed, inversion, scheduled
from qwenimg.common.prompts.composed import Part
from qwenimg.common.prompts.scheduled import TimedText
from qwenimg.common.request.request import Request
from qwenimg.common.runtime import group
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.group import ALONE
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.sampling import table
from qwenimg.common.weights.loras.lora import Deltas

UNET_BUFFERS = 30  # arrays of the UNet's first level that a step has in memory at its peak
MAX_CHUNKS = 512  # of 77 tokens, of all texts that a prompt becomes: 320 MB of SDXL's states
AESTHETIC, POOR_AESTHETIC = 6.0, 2.5  # the refiner's aesthetic score for the prompt and for the negative branch


@dataclass(frozen=True, kw_only=True, eq=False)
class Conditioning:
    """The inputs of the UNet besides latents and time. `added`: rows of SDXL's pooled text and sizes, else None."""

    texts: Latents  # [B, S, C]; the prompt's first, then the negative one's. In a training step arrays of the backend
    added: Latents | None

    def of(self, positions: Sequence[int]) -> Conditioning:
        """Return the conditioning of the branches in these positions."""
        rows = list(positions)
        if rows == [*range(len(self.texts))]:
            return self
        return Conditioning(texts=self.texts[rows], added=None if self.added is None else self.added[rows])


def parts(request: Request) -> tuple[Part, ...]:
    """Return the parts of a request's prompt, with marks in the place of embeddings. Raises UsageError."""
    return composed.parts(inversion.marked(request.prompt, request.inversions))


GUIDANCE = Guidance(formula=rescaled_cfg, parts=lambda request: [part.text for part in parts(request)])


def guidance(request: Request) -> Guidance:
    """Return the guidance of a run: of a prompt in several parts, towards their weighted sum."""
    weights = [part.weight for part in parts(request)]
    return GUIDANCE if len(weights) == 1 else replace(GUIDANCE, formula=cfg_of_sum(weights))


def schedules(request: Request, plan: SamplingPlan) -> list[tuple[TimedText, ...]]:
    """Return the texts of each branch of guidance in a run. Raises UsageError."""
    calls = request.steps * table.find(plan.sampler).calls
    texts = (inversion.marked(branch.prompt, request.inversions) for branch in GUIDANCE.branches(request))
    return [scheduled.texts(text, calls) for text in texts]


class Expert:
    """The model for one part of the schedule, the base or the refiner: its texts and its UNet."""

    def __init__(self, checkpoint: Checkpoint, residents: Residents):
        self.checkpoint, self.residents, self.runtime = checkpoint, residents, residents.runtime
        self.facts = checkpoints.facts(checkpoint)
        self.unet_config: UNetConfig = checkpoint["unet"].config
        self.texts = ClipTexts(residents, checkpoint, penultimate=self.facts.sdxl)

    def conditioning(self, request: Request, texts: Sequence[str]) -> Conditioning:
        """Return the conditioning of the branches' `texts`; in a training step, which has one branch, as arrays that
        gradients pass."""
        if self.texts.together:
            [text] = texts
            states, pooled = self.texts.learned(text, request.family_options.clip_skip, request.inversions)
            return Conditioning(texts=states, added=self._added(request, pooled))
        states, pooled = self.texts.states(texts, request.family_options.clip_skip, request.inversions)
        if self.checkpoint.zeros_for_empty and request.negative_prompt == "" and len(texts) > 1:
            states[1], pooled[1] = 0, 0
        return Conditioning(texts=states, added=self._added(request, pooled))

    def _added(self, request: Request, pooled: Latents) -> Latents | None:
        """Return SDXL's pooled text and sinusoids of original size, crop, and target size or aesthetic score: [B, A];
        None for other models."""
        if not self.facts.sdxl:
            return None
        sizes: list[float] = [request.height, request.width, 0, 0]
        target = [request.height, request.width]
        last = [[POOR_AESTHETIC if i == 1 else AESTHETIC] if self.facts.refiner else target for i in range(len(pooled))]
        channels = self.unet_config.addition_time_embed_dim or 256
        rows = [sinusoids(self.unet_config, [*sizes, *one], channels).reshape(-1) for one in last]
        own = np.stack(rows).astype(np.float32)
        engine, learns = self.runtime.engine, bool(self.texts.together)
        added: Latents = engine.join([pooled, engine.array(own)]) if learns else np.concatenate([pooled, own], axis=1)
        return added

    def adapt(self, deltas: Deltas) -> None:
        """Add `deltas` to the weights, and read again those weights of open networks that the LoRAs change."""
        self.checkpoint = self.checkpoint.with_deltas(deltas)
        self.texts.renew(self.checkpoint.texts)
        self.residents.adapt(self.name, self.checkpoint["unet"])

    @property
    def name(self) -> str:
        return "refiner" if self.facts.refiner else "unet"

    def check_weights(self) -> None:
        """Check the UNet's weights once before it is loaded."""
        self.residents.check_weights(self.name, self.checkpoint["unet"])

    def keys(self, request: Request, plan: SamplingPlan) -> list[ClipKey]:
        """Return the keys of all texts of a run. Raises UsageError."""
        texts = dict.fromkeys(one.text for schedule in schedules(request, plan) for one in schedule)
        return self.keys_of(request, list(texts))

    def keys_of(self, request: Request, texts: Sequence[str]) -> list[ClipKey]:
        """Return the keys of some texts of a request."""
        return self.texts.keys(texts, request.family_options.clip_skip, request.inversions)

    def encoding(self, request: Request, plan: SamplingPlan, counted: bool) -> list[Stage]:
        """Return the stages that encode the texts of a run; if not `counted`, for one chunk of each. Raises
        UsageError."""
        keys = self.keys(request, plan)
        if self.texts.has(keys):
            return []
        if counted:
            self._check_chunks(keys)
        return self.texts.stages(keys, counted)

    def _check_chunks(self, keys: Sequence[ClipKey]) -> None:
        count = 0
        for key in keys:
            count += len(self.texts.chunks(key)[0])
            if count > MAX_CHUNKS:
                raise UsageError(
                    f"the prompt becomes {len(keys)} texts, of more than {MAX_CHUNKS} chunks of 75 tokens in all; "
                    "give fewer alternations, or shorten it"
                )

    def steps(self, request: Request, shape: LatentShape, plan: SamplingPlan, segment: int) -> Stage:
        """Return the stage of the UNet in a `segment` of the plan: all branches of guidance go in one batch if that
        fits, else one after the other."""
        unet, branches = self.checkpoint["unet"], GUIDANCE.branches(request)
        sharing = group.sharing(self.runtime.engine.group, len(branches), heads=0)
        sizes = dict.fromkeys((len(branches), 1)) if sharing == ALONE else [1]
        return Stage(
            name="refine" if self.facts.refiner else "denoise",
            resident=self.name,
            component=unet,
            splits=tuple(
                Split(
                    activations=self.step_bytes(request, shape.rows, shape.columns, size),
                    size=size,
                    passes=plan.passes(branches, size * sharing.branches, segment),
                    about="" if size == len(branches) or sharing != ALONE else "one branch of guidance after the other",
                )
                for size in sizes
            ),
            operations=plan.passes(branches, sharing.branches, segment)
            * operations.unet(unet.plan, len(self.unet_config.block_out_channels), shape.rows, shape.columns),
        )

    def step_bytes(self, request: Request, height: int, width: int, branches: int) -> int:
        """Return the bytes of a step beside the weights, with `branches` in one batch."""
        config = self.unet_config
        limit = self.runtime.engine.workspace.score_bytes
        levels = [(i, level.heads) for i, level in enumerate(config.down) if level.depth]
        score_bytes = max((scores(heads, branches, height * width // 4**i, limit) for i, heads in levels), default=0)
        cache_bytes = kept_bytes(config, len(GUIDANCE.branches(request)), height, width) if request.caches else 0
        activations = step_peak(config, branches, height, width) + score_bytes
        return self.runtime.call_bytes(self.checkpoint["unet"], activations) + cache_bytes


def sinusoids(config: UNetConfig, values: Sequence[float], channels: int) -> NDArray[np.float64]:
    """Return the sinusoids of times or sizes, [N, channels], in the order of the model."""
    return timesteps.unet_sinusoids(values, channels, cosines_first=config.flip_sin_to_cos, shift=config.freq_shift)


# Memory


def step_peak(config: UNetConfig, branches: int, height: int, width: int) -> int:
    """Return the bytes of activations in one step with `branches` in one batch, for latents of height x width.

    Each pixel of the first level has the arrays for the up blocks and a feed-forward's eight widths, in float32."""
    return branches * height * width * config.block_out_channels[0] * 4 * UNET_BUFFERS


def kept_bytes(config: UNetConfig, branches: int, height: int, width: int) -> int:
    """Return the bytes that a step cache keeps for `branches`: the input of the last up block, and the stored and the
    present output of the first down block, in float32."""
    first, deeper = config.block_out_channels[0], config.block_out_channels[:2][-1]
    return branches * height * width * (deeper + 2 * first) * 4
