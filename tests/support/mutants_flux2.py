"""Faults in FLUX.2 klein: in its transformer, its text encoder, its VAE, their weights, the loop around them, and the
references that it sees. klein KV and dev have most of them too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.flux2 import references, texts
from qwenimg.common.families.flux2.model import Flux2, shift
from qwenimg.common.networks.denoisers import flux2_conditioning
from qwenimg.common.numbers import noise, packing
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models import patch_model
from qwenimg.common.pipeline.models.inputs import PictureInputs
from qwenimg.common.request.request import MULTIPLE
from qwenimg.common.sampling.flow_match import FlowLevels, FlowMatchConfig
from support import mutants_flux as flux
from support import mutants_shared as shared
from support import oracle_flux2
from support.mutant import Judge, Mutant, Patch, PictureJudge, Scenes

# The transformer

feed_forward_modulates_attention = shared.of_modulation("feed_forward_modulates_attention", (3, 4, 5, 0, 1, 2))


def _class(patch: Patch, name: str) -> Any:
    return getattr(patch.backend.network("flux2_dit"), name)


def streams_modulation_exchanged(patch: Patch) -> None:
    """The text's for the image, and the other way round."""
    owner = patch.backend.network("diffusion_transformer").JointBlock

    def exchanged(streams: Any, own: Any, img: Any, txt: Any, mods: Any, *rest: Any, **more: Any) -> Any:
        return streams(own, img, txt, mods[::-1], *rest, **more)

    patch.around(owner, "streams", exchanged)


def image_first_in_single_blocks(patch: Patch) -> None:
    """RoPE's rows of the image before the text's."""

    def exchanged(streams: Any, own: Any, img: Any, txt: Any, mod: Any, table: Any, *rest: Any) -> Any:
        return streams(own, img, txt, mod, patch.backend.lib.roll(table, img.shape[1], 0), *rest)

    patch.around(_class(patch, "SingleBlock"), "streams", exchanged)


def feed_forward_halves_exchanged(patch: Patch) -> None:
    patch.around(patch.backend.ops, "swiglu", lambda swiglu, a, b: swiglu(b, a))


def _heads(patch: Patch, numbers: tuple[int, int, int]) -> None:
    patch.around(
        _class(patch, "ParallelAttention"), "heads", lambda heads, layer, y, number: heads(layer, y, numbers[number])
    )


def keys_first_in_single_blocks(patch: Patch) -> None:
    _heads(patch, (1, 0, 2))


def values_first_in_single_blocks(patch: Patch) -> None:
    _heads(patch, (1, 2, 0))


def feed_forward_first_out_of_single_blocks(patch: Patch) -> None:
    """In front of the layer that takes both."""

    def exchanged(layer: Any, x: Any) -> Any:
        single = layer.path.startswith("single_transformer_blocks.") and layer.path.endswith(".to_out")
        return patch.backend.lib.roll(x, x.shape[-1] // 4, -1) if single else x

    patch.entering("Linear", exchanged)


def norm_eps(patch: Patch) -> None:
    """Of the blocks of two streams."""
    owner = patch.backend.network("diffusion_transformer").JointBlock
    patch.around(
        owner, "__init__", lambda init, block, dim, head_dim, eps, **more: init(block, dim, head_dim, 10 * eps, **more)
    )


# The text encoder


def taps(patch: Patch, change: Any) -> None:
    owner = patch.backend.network("decoder").Decoder

    def changed(encoder: Any) -> None:
        encoder.depths = change(encoder.depths)

    patch.built(owner, changed)


def taps_one_layer_early(patch: Patch) -> None:
    taps(patch, lambda taps: tuple(tap - 1 for tap in taps))


def taps_the_last_three(patch: Patch) -> None:
    taps(patch, lambda taps: tuple(range(taps[-1] - len(taps) + 1, taps[-1] + 1)))


def text_not_normed(patch: Patch) -> None:
    """Queries and keys of the text encoder."""
    patch.layer(
        "RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path.endswith((".q_norm", ".k_norm")) else y
    )


def pads_attended(patch: Patch) -> None:
    """As if they were text."""
    owner = patch.backend.network("decoder").Attention
    patch.around(owner, patch.backend.calls, lambda call, layer, x, rope, pads, *rest: call(layer, x, rope, 0, *rest))


# The VAE


def _statistics(patch: Patch, change: Any) -> None:
    """Makes latents for the decoder what `change` makes of its statistics, latents and right result."""
    patch.around(
        patch.backend.ops.ChannelStatistics,
        "inverse",
        lambda inverse, statistics, z: change(statistics, z, inverse(statistics, z)),
    )


def _axis(patch: Patch, values: Any) -> Any:
    return values[:, None, None] if patch.backend.torch else values


def batch_mean_not_added(patch: Patch) -> None:
    _statistics(patch, lambda own, z, right: right - _axis(patch, own.running_mean))


def batch_variance_for_deviation(patch: Patch) -> None:
    _statistics(
        patch, lambda own, z, right: z * _axis(patch, own.running_var + own.eps) + _axis(patch, own.running_mean)
    )


def batch_eps_of_others(patch: Patch) -> None:
    """1e-5, torch's usual one."""
    patch.around(
        patch.backend.ops.ChannelStatistics, "__init__", lambda init, own, channels, eps: init(own, channels, 1e-5)
    )


def batch_statistics_of_one_latent(patch: Patch) -> None:
    """Not of a patch: the first channels' for all."""

    def first(entry: Any, made: Any) -> Any:
        if not entry.name.startswith("bn.running_"):
            return made
        quarter = made[: made.shape[0] // 4]
        return patch.backend.join([quarter] * 4, 0)

    patch.loaded(first)


def patches_in_another_order(patch: Patch) -> None:
    """(dy, dx, c)."""
    rows = patch.backend.axes()[0]

    def channels_last(unpatched: Any, z: Any) -> Any:
        count = z.shape[rows]
        order = [4 * (i % (count // 4)) + i // (count // 4) for i in range(count)]
        back = sorted(range(count), key=order.__getitem__)
        index = patch.backend.array(np.array(back))
        return unpatched(z[:, index] if patch.backend.torch else z[..., index])

    patch.around(patch.backend.images, "unpatched", channels_last)


# The loop: what both backends share


def time_off(patch: Patch) -> None:
    patch.around(FlowMatchConfig, "timestep", lambda made, config, sigma: made(config, sigma) * 0.999)


def _levels(patch: Patch, mu: Any) -> None:
    patch.set(Flux2, "levels", FlowLevels(mu=mu))


def mu_of_large_images(patch: Patch) -> None:
    """Which has no steps in it."""
    _levels(patch, lambda config, tokens, steps: 0.00016927 * tokens + 0.45666666)


def mu_of_one_step_more(patch: Patch) -> None:
    _levels(patch, lambda config, tokens, steps: shift(config, tokens, steps + 1))


def mu_of_pixels(patch: Patch) -> None:
    """Latents before patches for tokens."""
    _levels(patch, lambda config, tokens, steps: shift(config, 4 * tokens, steps))


def mu_by_size(patch: Patch) -> None:
    """FLUX.1's."""
    patch.set(Flux2, "levels", FlowLevels())


def _positions(patch: Patch, change: Any) -> None:
    patch.around(flux2_conditioning, "image_positions", lambda made, grids: change(made(grids)))


def rows_and_columns_swapped(patch: Patch) -> None:
    _positions(patch, lambda positions: positions[:, [0, 2, 1, 3]])


def references_in_the_frame_of_the_image(patch: Patch) -> None:
    _positions(patch, lambda positions: positions * [0, 1, 1, 1])


def references_in_one_frame(patch: Patch) -> None:
    _positions(patch, lambda positions: np.minimum(positions, [flux2_conditioning.REFERENCE_STEP, 999, 999, 999]))


def references_one_apart(patch: Patch) -> None:
    """As Kontext's are."""
    patch.set(flux2_conditioning, "REFERENCE_STEP", 1)


def text_in_the_frame_axis(patch: Patch) -> None:
    patch.around(flux2_conditioning, "text_positions", lambda made, length: made(length)[:, [3, 1, 2, 0]])


def text_from_one(patch: Patch) -> None:
    patch.around(flux2_conditioning, "text_positions", lambda made, length: np.add(made(length), [0, 0, 0, 1]))


def text_not_numbered(patch: Patch) -> None:
    """As FLUX.1's."""
    patch.around(flux2_conditioning, "text_positions", lambda made, length: 0 * made(length))


def references_exchanged(patch: Patch) -> None:
    patch.around(PictureInputs, "seen", lambda made, own, request: made(own, request)[::-1])


def reference_stretched(patch: Patch) -> None:
    """For its middle."""
    patch.around(
        references, "_within", lambda made, *sides: tuple(side // MULTIPLE * MULTIPLE for side in made(*sides))
    )


def text_without_pads(patch: Patch) -> None:
    patch.around(
        TemplateTexts,
        "states",
        lambda made, texts, prompts: [
            states[:, : len(texts.fill(prompt).ids) - texts.fill(prompt).pads]
            for states, prompt in zip(made(texts, prompts), prompts, strict=True)
        ],
    )


def template_that_thinks(patch: Patch) -> None:
    patch.set(Flux2, "template", replace(texts.KLEIN, text=texts.KLEIN.text.partition("<think>")[0]))


def tokens_columns_first(patch: Patch) -> None:
    """Columns before rows of an image's tokens."""
    patch.around(packing, "tokens", lambda made, latents: made(np.ascontiguousarray(latents.swapaxes(2, 3))))


BLOCKS = (
    Mutant(shared.sines_first("flux2_dit", "TimeGuidanceEmbed"), "sines before cosines of the time"),
    Mutant(shared.scales_first, "scales before shifts in blocks of two streams"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(feed_forward_modulates_attention, "the feed-forward's modulation for the attention's"),
    Mutant(flux.single_gate_first, "gates before shifts and scales in blocks of one stream"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(streams_modulation_exchanged, "each stream with the other's modulation"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(shared.silu_left_out, "no SiLU"),
    Mutant(feed_forward_halves_exchanged, "the two halves of the feed-forward exchanged"),
    Mutant(keys_first_in_single_blocks, "keys before queries in blocks of one stream"),
    Mutant(values_first_in_single_blocks, "values after queries in blocks of one stream"),
    Mutant(feed_forward_first_out_of_single_blocks, "the feed-forward before the attention in `to_out`"),
    Mutant(image_first_in_single_blocks, "RoPE of blocks of one stream with the image first"),
    Mutant(flux.text_norms_of_the_image, "the image's norm of queries for the text"),
    Mutant(norm_eps, "epsilons of blocks of two streams ten times too large"),
    Mutant(flux.first_text_token_not_attended, "the first text token not attended"),
    *shared.ATTENTION_WITH_ROPE,
)
QWEN3 = (
    Mutant(taps_one_layer_early, "text states of one layer before"),
    Mutant(taps_the_last_three, "text states of the last three layers"),
    Mutant(shared.text_not_causal, "a Qwen3 that sees what comes"),
    Mutant(shared.text_rope_of_pairs, "Qwen3's RoPE on pairs for halves"),
    Mutant(text_not_normed, "no norm of Qwen3's queries and keys"),
    Mutant(shared.keys_not_shared, "Qwen3's shared heads of keys dealt out in another order"),
    Mutant(pads_attended, "pads attended"),
)
VAE = (
    Mutant(batch_mean_not_added, "the VAE's batch mean not added"),
    Mutant(batch_variance_for_deviation, "the VAE's batch variance for the deviation"),
    Mutant(batch_eps_of_others, "epsilon 1e-5 for 1e-4 of the VAE's batch variance"),
    Mutant(batch_statistics_of_one_latent, "the batch statistics of a patch's first channels for all"),
    Mutant(patches_in_another_order, "patches in the order (dy, dx, c)"),
    Mutant(shared.padded_on_the_other_side, "zeros above and left for below and right"),
)
LOOP = (
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(mu_of_large_images, "the shift of large images, which has no steps in it", picture=True),
    Mutant(mu_of_one_step_more, "the shift for one step more", picture=True),
    Mutant(mu_of_pixels, "the shift for latents before patches", picture=True),
    Mutant(mu_by_size, "FLUX.1's shift", picture=True),
    *shared.NOISE_LEVELS,
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    Mutant(references_in_the_frame_of_the_image, "references in the frame of the image", picture=True),
    Mutant(references_in_one_frame, "all references in one frame", picture=True),
    Mutant(references_one_apart, "references 1 apart, for 10", picture=True),
    Mutant(references_exchanged, "the references in another order", picture=True),
    Mutant(shared.reference_a_sample, "a sample of a reference's latents for their mean", picture=True),
    Mutant(tokens_columns_first, "columns before rows of tokens", picture=True),
    Mutant(text_in_the_frame_axis, "text tokens numbered as frames", picture=True),
    Mutant(text_from_one, "text tokens numbered from 1", picture=True),
    Mutant(text_not_numbered, "text tokens not numbered", picture=True),
    *shared.DECODING,
)
TEMPLATE = (
    Mutant(text_without_pads, "text without its pads", picture=True),
    Mutant(template_that_thinks, "the template without its empty thought", picture=True),
)
_ALL = (
    *BLOCKS,
    *QWEN3,
    *VAE,
    *shared.ARITHMETIC,
    Mutant(shared.velocity_sign("flux2_dit"), "the velocity's sign", picture=True),
    *LOOP,
    Mutant(shared.velocity_of_other_tokens, "the velocity of other tokens", picture=True),
    *TEMPLATE,
    Mutant(shared.cfg_branches_swapped(patch_model), "the branches of guidance exchanged", picture=True),
    Mutant(shared.cfg_from_the_prompt(patch_model), "guidance from the prompt's prediction", picture=True),
    Mutant(reference_stretched, "a reference stretched for its middle", scene="odd"),
)
MUTANTS = tuple(replace(mutant, refused=("fp16",)) for mutant in _ALL)

RNG = np.random.default_rng(5)
ODD = [RNG.integers(0, 256, (height, width, 3), np.uint8) for height, width in ((75, 90), (83, 70))]
PROMPT, STEPS, GUIDANCE, SEED = "a red circle", 2, 3.0, 7


def judge(tiny: Mapping[str, Path], scratch: Path) -> Scenes:
    folder = tiny["flux2-base"]

    def theirs() -> tuple[Any, Any]:
        start = noise.normal((1, 32, 2, 3), seed=SEED)
        return oracle_flux2.generate(folder, PROMPT, start, steps=STEPS, guidance=GUIDANCE, images=ODD)

    asked = {"prompt": PROMPT, "width": 48, "height": 32, "steps": STEPS, "guidance": GUIDANCE, "seed": SEED}
    return Scenes({"": Judge(folder, pictures=2), "odd": PictureJudge(folder, asked | {"image": ODD}, theirs)})
