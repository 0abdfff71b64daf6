"""Faults in Z-Image: in its transformer, its text encoder, their weights, and the loop around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qwenimg.common.families.z_image import model
from qwenimg.common.families.z_image.model import ZImage
from qwenimg.common.networks.denoisers import zimage_conditioning
from qwenimg.common.numbers import packing, rope
from support import mutants_shared as shared
from support.mutant import Mutant, Patch

# The transformer


def pads_zeroed(patch: Patch) -> None:
    patch.layer("Embedding", lambda layer, x, y: 0 * y if "pad_token" in layer.path else y)


def last_token_not_attended(patch: Patch) -> None:
    """A pad of the text, where it has any."""
    patch.attention(lambda attend, q, k, v, *rest, **more: attend(q, k[:, :-1], v[:, :-1], *rest))


def gates_without_tanh(patch: Patch) -> None:
    patch.set(patch.backend.ops, "tanh", lambda x: x)


def scale_without_one(patch: Patch) -> None:
    patch.around(patch.backend.ops, "scaled", lambda scaled, x, scale, dtype: scaled(x, scale - 1, dtype))


gates_swapped = shared.of_modulation("gates_swapped", (0, 3, 2, 1))
gates_before_scales = shared.of_modulation("gates_before_scales", (1, 0, 3, 2))


def feed_forward_exchanged(patch: Patch) -> None:
    patch.around(patch.backend.ops, "swiglu", lambda swiglu, a, b: swiglu(b, a))


def no_norm_of_updates(patch: Patch) -> None:
    patch.layer("RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path.endswith("norm2") else y)


def norm_eps(patch: Patch) -> None:
    patch.around(patch.backend.ops.RMSNorm, "__init__", lambda init, layer, width, eps: init(layer, width, 10 * eps))


def silu_before_modulation(patch: Patch) -> None:
    owner, silu = patch.backend.network("zimage_dit").TransformerBlock, patch.backend.ops.silu

    def changed(call: Any, block: Any, x: Any, temb: Any, *rest: Any) -> Any:
        return call(block, x, silu(temb), *rest)

    patch.around(owner, patch.backend.calls, changed)


def no_silu_in_the_head(patch: Patch) -> None:
    patch.around(patch.backend.ops, "silu", lambda silu, x: x if x.shape[-1] < 1024 else silu(x))


def no_norm_in_the_head(patch: Patch) -> None:
    patch.set(patch.backend.ops, "unit_norm", lambda x, eps: x)


# The loop: what both backends share


def channels_first(patch: Patch) -> None:
    patch.around(packing, "pack", lambda pack, x, channels_last=False: pack(x))


def time_from_noise(patch: Patch) -> None:
    """Sigma for 1 - sigma."""
    patch.around(model, "time_row", lambda made, timestep, dtype: made(1000.0 - timestep, dtype))


def time_off(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, timestep, dtype: made(0.999 * timestep, dtype))


def padded_to_half(patch: Patch) -> None:
    patch.set(zimage_conditioning, "MULTIPLE", 16)


def rows_and_columns_swapped(patch: Patch) -> None:
    patch.around(
        zimage_conditioning,
        "image_and_text_rope",
        lambda made, config, rows, columns, length: made(config, columns, rows, length),
    )


def theta_of_others(patch: Patch) -> None:
    patch.around(rope, "rope_table", lambda made, positions, axes, theta: made(positions, axes, 1e4))


def image_frame_one_later(patch: Patch) -> None:
    def moved(made: Any, positions: Any, axes: Any, theta: float) -> Any:
        changed = positions.copy()
        changed[(positions[:, 1:] > 0).any(axis=1), 0] += 1  # tokens of the image, but for the first
        return made(changed, axes, theta)

    patch.around(rope, "rope_table", moved)


def guidance_of_others(patch: Patch) -> None:
    """neg + s (pos - neg)."""

    def usual(engine: Any, request: Any, predictions: Any) -> Any:
        conditional, unconditional = predictions
        return unconditional + request.guidance * (conditional - unconditional)

    patch.set(ZImage, "guidance", replace(ZImage.guidance, formula=usual))


def template_without_last_newline(patch: Patch) -> None:
    patch.set(model, "TEMPLATE", replace(model.TEMPLATE, text=model.TEMPLATE.text[:-1]))


_ALL = (
    Mutant(pads_zeroed, "pads zeroed for the learned tokens"),
    Mutant(last_token_not_attended, "the last pad not attended"),
    Mutant(gates_without_tanh, "gates without tanh"),
    Mutant(scale_without_one, "`scale` for `1 + scale`"),
    Mutant(gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(gates_before_scales, "gates before scales"),
    Mutant(feed_forward_exchanged, "the two parts of the feed-forward exchanged"),
    Mutant(no_norm_of_updates, "updates without their norm"),
    Mutant(norm_eps, "RMSNorm's epsilon ten times too large"),
    Mutant(silu_before_modulation, "SiLU before the blocks' modulation"),
    Mutant(no_silu_in_the_head, "no SiLU before the head's modulation"),
    Mutant(no_norm_in_the_head, "no norm in the head"),
    Mutant(shared.sines_first("zimage_dit", "TimestepEmbedder"), "sines before cosines of the time"),
    *shared.ATTENTION_WITH_ROPE,
    Mutant(shared.causal, "causal attention in the transformer"),
    Mutant(shared.text_not_causal, "a Qwen3 that sees what comes"),
    Mutant(shared.text_rope_of_pairs, "Qwen3's RoPE on pairs for halves"),
    Mutant(shared.keys_not_shared, "Qwen3's shared heads of keys dealt out in another order"),
    *shared.ARITHMETIC,
    Mutant(shared.velocity_sign("zimage_dit"), "the velocity's sign", picture=True),
    Mutant(channels_first, "channels first in a patch", picture=True),
    Mutant(time_from_noise, "sigma for 1 - sigma", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(padded_to_half, "tokens padded to 16", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    Mutant(theta_of_others, "RoPE's theta 10000", picture=True),
    Mutant(image_frame_one_later, "the image one frame later", picture=True),
    Mutant(guidance_of_others, "guidance from the unconditional prediction", picture=True),
    Mutant(shared.branches_swapped(ZImage), "the branches of guidance exchanged", picture=True),
    Mutant(template_without_last_newline, "template without its last newline", picture=True),
    *shared.NOISE_LEVELS,
    *shared.SCALED_AND_DECODED,
)
MUTANTS = tuple(replace(mutant, refused=("fp16",)) for mutant in _ALL)
