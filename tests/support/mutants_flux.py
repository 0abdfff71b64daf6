"""Faults in FLUX.1: in its transformer, its text encoders, their weights and files, the loop around them, the reference
of Kontext and the mask of Fill.

Of the guidance there are no faults that another scale of it would show as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from qwenimg.common.families.flux import model, references
from qwenimg.common.families.flux.model import Flux
from qwenimg.common.families.flux.texts import FluxTexts
from qwenimg.common.networks.denoisers import flux_conditioning
from qwenimg.common.networks.denoisers import flux_names as file
from qwenimg.common.networks.denoisers.flux_dit import ROPE_THETA
from qwenimg.common.networks.encoders import t5
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.numbers import rope
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pipeline.models import inputs
from qwenimg.common.pipeline.steps.inpaint import Mask
from qwenimg.common.weights.keys import Place, Rows
from support import mutants_shared as shared
from support import oracle_flux
from support.mutant import Judge, Mutant, Patch, PictureJudge, Plant, Scenes
from support.tiny_flux import transformer_file as their_file

SIZES = ((48, 96), (64, 80), (64, 64), (80, 64), (96, 48))  # of a reference, in place of a megapixel

# The transformer


def guidance_not_read(patch: Patch) -> None:
    owner = patch.backend.network("flux_dit").TimeTextEmbed

    def without(call: Any, layer: Any, times: Any, guidance: Any, pooled: Any) -> Any:
        return layer.timestep_embedder(times) + layer.text_embedder(pooled)

    patch.around(owner, patch.backend.calls, without)


def pooled_text_not_read(patch: Patch) -> None:
    owner = patch.backend.network("flux_dit").TimeTextEmbed

    def without(call: Any, layer: Any, times: Any, guidance: Any, pooled: Any) -> Any:
        return layer.timestep_embedder(times) + layer.guidance_embedder(guidance)

    patch.around(owner, patch.backend.calls, without)


single_gate_first = shared.of_modulation("single_gate_first", (2, 0, 1))


def streams_modulation_exchanged(network: str, block: str) -> Plant:
    """Return a plant in the block of two streams: the text's for the image, and the other way round."""

    def streams_modulation_exchanged(patch: Patch) -> None:
        patch.around(
            getattr(patch.backend.network(network), block),
            patch.backend.calls,
            lambda call, own, img, txt, mods, *rest: call(own, img, txt, mods[::-1], *rest),
        )

    return streams_modulation_exchanged


def feed_forward_before_attention(patch: Patch) -> None:
    """In front of the layer that takes both."""

    def exchanged(layer: Any, x: Any) -> Any:
        single = layer.path.startswith("single_transformer_blocks.") and layer.path.endswith(".proj_out")
        return patch.backend.lib.roll(x, x.shape[-1] // 5, -1) if single else x

    patch.entering("Linear", exchanged)


def no_feed_forward_in_single_blocks(patch: Patch) -> None:
    patch.around(
        patch.backend.ops,
        "linear_gelu",
        lambda gelu, layer, x: 0 * gelu(layer, x) if layer.path.endswith("proj_mlp") else gelu(layer, x),
    )


def image_first_in(network: str, block: str) -> Plant:
    """Return a plant in the block of one stream: RoPE's rows of the image before the text's."""

    def image_first_in_single_blocks(patch: Patch) -> None:
        def exchanged(call: Any, own: Any, img: Any, txt: Any, mod: Any, table: Any) -> Any:
            return call(own, img, txt, mod, patch.backend.lib.roll(table, img.shape[1], 0))

        patch.around(getattr(patch.backend.network(network), block), patch.backend.calls, exchanged)

    return image_first_in_single_blocks


def text_norms_of_the_image(patch: Patch) -> None:
    owner = patch.backend.network("diffusion_transformer").JointAttention
    patch.exchanged(owner, patch.backend.calls, "norm_q", "norm_added_q")


def norm_eps(patch: Patch) -> None:
    patch.set(patch.backend.network("flux_dit"), "NORM_EPS", 1e-5)


def first_text_token_not_attended(patch: Patch) -> None:
    def without(attend: Any, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> Any:
        return attend(q, k, v, *rest, **more) if more else attend(q, k[:, 1:], v[:, 1:], *rest)

    patch.attention(without)


# The text encoders


def t5_scores_scaled(patch: Patch) -> None:
    patch.around(patch.backend.ops, "biased_attention", lambda attend, q, *rest: attend(q * q.shape[-1] ** -0.5, *rest))


def t5_bias_not_added(patch: Patch) -> None:
    patch.around(patch.backend.ops, "biased_attention", lambda attend, q, k, v, bias: attend(q, k, v, 0 * bias))


def t5_gate_and_values_exchanged(patch: Patch) -> None:
    patch.around(patch.backend.ops, "gated_gelu", lambda gelu, gate, values, dtype: gelu(values, gate, dtype))


def t5_without_final_norm(patch: Patch) -> None:
    patch.layer(
        "RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path.endswith("final_layer_norm") else y
    )


def t5_looks_the_other_way(patch: Patch) -> None:
    """Distances back for distances ahead."""
    patch.around(t5, "buckets", lambda made, *given: made(*given).T.copy())


def t5_buckets_of_a_decoder(patch: Patch) -> None:
    """All of them for what came before."""
    patch.around(t5, "buckets", lambda made, config, length: np.tril(np.minimum(2 * made(config, length), 31)))


def clip_gelu_erf(patch: Patch) -> None:
    owner, gelu = patch.backend.network("clip").MLP, patch.backend.ops.gelu_erf
    patch.around(owner, patch.backend.calls, lambda call, mlp, x: mlp.fc2(gelu(mlp.fc1(x))))


def clip_pooled_at_the_last_token(patch: Patch) -> None:
    patch.set(patch.backend.network("clip"), "eos_position", lambda config, ids: len(ids) - 1)


def clip_pooled_without_norm(patch: Patch) -> None:
    patch.layer("LayerNorm", lambda layer, x, y: x if layer.path.endswith("final_layer_norm") else y)


# The loop: what both backends share


def guidance_1_off(patch: Patch) -> None:
    patch.around(model, "guidance_row", lambda made, guidance, dtype: made(1.01 * guidance, dtype))


def rows_and_columns_swapped(patch: Patch) -> None:
    patch.around(flux_conditioning, "image_positions", lambda made, grids: made(grids)[:, [0, 2, 1]])


def rows_centred(patch: Patch) -> None:
    """As Qwen-Image's are."""
    patch.set(flux_conditioning, "image_positions", lambda grids: rope.image_positions([(1, *grid) for grid in grids]))


def text_numbered(patch: Patch) -> None:
    """As Qwen-Image's is."""

    def numbered(made: Any, config: Any, grids: Any, length: int) -> Any:
        positions = np.repeat(np.arange(length)[:, None], 3, axis=1)
        return made(config, grids, length)[0], rope.rope_table(positions, config.axes_dims_rope, ROPE_THETA)

    patch.around(flux_conditioning, "image_and_text_rope", numbered)


def text_of_256_tokens(patch: Patch) -> None:
    """As schnell's is."""
    patch.set(model, "LENGTHS", {True: 256, False: 256})


# Guidance by a negative prompt


def guidance_from_the_prompt(patch: Patch) -> None:
    """pos + s (pos - neg)."""

    def formula(engine: Any, request: Any, both: Any) -> Any:
        return both[0] + request.true_cfg * (both[0] - both[1])

    patch.set(Flux, "guidance", replace(Flux.guidance, formula=formula))


def pooled_text_of_the_prompt(patch: Patch) -> None:
    """In both branches."""
    patch.around(FluxTexts, "pooled", lambda made, texts, prompts: [made(texts, prompts)[0]] * len(prompts))


def text_of_the_prompt(patch: Patch) -> None:
    """T5's, in both branches."""

    def same(made: Any, texts: Any, prompts: Any) -> Any:
        every = made(texts, prompts)
        return [(every[0][0], pooled) for _, pooled in every]

    patch.around(FluxTexts, "states", same)


# A file in its authors' names


def linear1_feed_forward_first(patch: Patch) -> None:
    rows = {"proj_mlp": Rows(0, 4, 7)} | {f"attn.to_{x}": Rows(i, i + 1, 7) for i, x in enumerate("qkv", 4)}
    patch.set(file, "_SINGLE", file._SINGLE | {part: Place("linear1", place) for part, place in rows.items()})


def linear1_keys_first(patch: Patch) -> None:
    right = file._SINGLE
    patch.set(file, "_SINGLE", right | {"attn.to_q": right["attn.to_k"], "attn.to_k": right["attn.to_q"]})


def text_of_the_image_in_qkv(patch: Patch) -> None:
    """The streams' fused weights exchanged."""
    pairs = [(f"attn.to_{x}", f"attn.add_{x}_proj") for x in "qkv"]
    exchanged = {one: file._DOUBLE[other] for pair in pairs for one, other in (pair, pair[::-1])}
    patch.set(file, "_DOUBLE", file._DOUBLE | exchanged)


def head_scale_and_shift_as_in_the_file(patch: Patch) -> None:
    patch.around(
        Layouts,
        "places",
        lambda made, *given: {name: place._replace(decode=None) for name, place in made(*given).items()},
    )


# Kontext


def _reference(patch: Patch, change: Any) -> None:
    """Makes the positions of the reference what `change` makes of them."""

    def moved(made: Any, grids: Any) -> Any:
        positions = made(grids)
        seen = positions[:, 0] > 0
        positions[seen] = change(positions[seen])
        return positions

    patch.around(flux_conditioning, "image_positions", moved)


def reference_in_the_frame_of_the_image(patch: Patch) -> None:
    _reference(patch, lambda positions: positions * [0, 1, 1])


def reference_one_column_off(patch: Patch) -> None:
    _reference(patch, lambda positions: np.add(positions, [0, 0, 1]))


def reference_rows_and_columns_swapped(patch: Patch) -> None:
    _reference(patch, lambda positions: positions[:, [0, 2, 1]])


def reference_in_the_size_of_the_image(patch: Patch) -> None:
    patch.set(references, "size", lambda picture: (EDIT["width"], EDIT["height"]))


# Fill


def mask_before_the_picture(patch: Patch) -> None:
    patch.set(Mask, "channels", property(lambda mask: [mask.masked, mask.inside]))


def mask_columns_first(patch: Patch) -> None:
    """In a latent."""

    def turned(made: Any, hole: Any, scale: int, values: int) -> Any:
        inside = made(hole, scale, values)
        parts = inside.reshape(1, values, values, *inside.shape[2:])
        return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(inside.shape)

    patch.around(inputs, "in_latents", turned)


def mask_of_whole_latents(patch: Patch) -> None:
    """Each with its first pixel's."""
    patch.around(inputs, "in_latents", lambda made, *given: 0 * made(*given) + made(*given)[:, :1])


def hole_black(patch: Patch) -> None:
    """For grey."""
    patch.around(
        VAEHalves, "latents", lambda made, halves, pixels, normal: made(halves, np.where(pixels, pixels, -1), normal)
    )


def masked_picture_a_mean(patch: Patch) -> None:
    """Of its latents, for a sample."""
    patch.around(VAEHalves, "latents", lambda made, halves, pixels, normal: made(halves, pixels, None))


_ALL = (
    Mutant(guidance_not_read, "no embedding of the guidance"),
    Mutant(pooled_text_not_read, "no embedding of the pooled text"),
    Mutant(shared.sines_first("flux_dit", "TimeTextEmbed"), "sines before cosines of the time"),
    Mutant(shared.scales_first, "scales before shifts in blocks of two streams"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(single_gate_first, "gates before shifts and scales in blocks of one stream"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(streams_modulation_exchanged("flux_dit", "TransformerBlock"), "each stream with the other's modulation"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(shared.silu_left_out, "no SiLU"),
    Mutant(feed_forward_before_attention, "the feed-forward before the attention in `proj_out`"),
    Mutant(no_feed_forward_in_single_blocks, "blocks of one stream without their feed-forward"),
    Mutant(image_first_in("flux_dit", "SingleTransformerBlock"), "RoPE of blocks of one stream with the image first"),
    Mutant(text_norms_of_the_image, "the image's norm of queries for the text"),
    Mutant(norm_eps, "LayerNorm's epsilon 1e-5 for 1e-6"),
    Mutant(shared.gelu_erf, "GELU by the error function for its tanh form"),
    Mutant(first_text_token_not_attended, "the first text token not attended"),
    *shared.ATTENTION_WITH_ROPE,
    Mutant(t5_scores_scaled, "T5's scores divided by the root of the width"),
    Mutant(t5_bias_not_added, "T5 without the bias of positions"),
    Mutant(t5_gate_and_values_exchanged, "T5's gate and values exchanged"),
    Mutant(t5_without_final_norm, "T5 without its final norm"),
    Mutant(clip_gelu_erf, "GELU by the error function in CLIP"),
    Mutant(shared.text_not_causal, "a CLIP that sees what comes"),
    Mutant(clip_pooled_without_norm, "CLIP's pooled vector without the final norm"),
    *shared.ARITHMETIC,
    Mutant(t5_looks_the_other_way, "T5's distances with the other sign", picture=True),
    Mutant(t5_buckets_of_a_decoder, "T5's buckets for what came before alone", picture=True),
    Mutant(clip_pooled_at_the_last_token, "CLIP's pooled vector of the last token", picture=True),
    Mutant(shared.velocity_sign("flux_dit"), "the velocity's sign", picture=True),
    Mutant(shared.time_off(model), "times 0.1 % off", picture=True),
    Mutant(guidance_1_off, "the embedded guidance 1 % off", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns of the image exchanged", picture=True),
    Mutant(rows_centred, "rows and columns counted from the middle", picture=True),
    Mutant(text_numbered, "text tokens at positions of their own", picture=True),
    Mutant(text_of_256_tokens, "256 text tokens for 512", picture=True),
    Mutant(shared.packing_order, "latents packed in another order", picture=True),
    *shared.NOISE_LEVELS,
    *shared.SCALED_AND_DECODED,
    Mutant(shared.branches_swapped(Flux), "the branches of guidance exchanged", scene="negative"),
    Mutant(guidance_from_the_prompt, "guidance from the prompt's prediction", scene="negative"),
    Mutant(pooled_text_of_the_prompt, "the prompt's pooled text in both branches", scene="negative"),
    Mutant(text_of_the_prompt, "the prompt's text in both branches", scene="negative"),
    Mutant(linear1_feed_forward_first, "a file's `linear1` split with the feed-forward first", scene="file"),
    Mutant(linear1_keys_first, "a file's `linear1` split with keys before queries", scene="file"),
    Mutant(text_of_the_image_in_qkv, "each stream with the other's `qkv` of a file", scene="file"),
    Mutant(head_scale_and_shift_as_in_the_file, "shift before scale of the head, as in a file", scene="file"),
    Mutant(reference_in_the_frame_of_the_image, "the reference in the frame of the image", scene="kontext"),
    Mutant(reference_one_column_off, "the reference one column off", scene="kontext"),
    Mutant(reference_rows_and_columns_swapped, "rows and columns of the reference exchanged", scene="kontext"),
    Mutant(reference_in_the_size_of_the_image, "the reference in the size of the image", scene="kontext"),
    Mutant(shared.reference_a_sample, "a sample of the reference's latents for their mean", scene="kontext"),
    Mutant(shared.velocity_of_other_tokens, "the velocity of other tokens", scene="kontext"),
    Mutant(mask_before_the_picture, "the mask before the masked picture", scene="fill"),
    Mutant(mask_columns_first, "columns before rows of the mask in a latent", scene="fill"),
    Mutant(mask_of_whole_latents, "one value of the mask for a latent", scene="fill"),
    Mutant(shared.mask_inverted, "the mask inverted", scene="fill"),
    Mutant(hole_black, "the hole black for grey", scene="fill"),
    Mutant(masked_picture_a_mean, "the mean of the masked picture's latents for a sample", scene="fill"),
)  # fmt: skip
MUTANTS = tuple(replace(mutant, refused=("fp16",)) for mutant in _ALL)


# Pictures that no passport has


RNG = np.random.default_rng(5)
PICTURE = RNG.integers(0, 256, (61, 90, 3), np.uint8)  # seen at 80x64
FITTING = RNG.integers(0, 256, (48, 64, 3), np.uint8)
HOLE = np.zeros((48, 64), np.uint8)
HOLE[9:35, 21:] = 255  # edges inside of latents
PROMPT: dict[str, Any] = {"prompt": "a red circle", "steps": 2}
NEGATIVE = PROMPT | {"width": 48, "height": 32, "guidance": 3.5, "negative_prompt": "blurry, low", "true_cfg": 2.5}
EDIT = PROMPT | {"width": 48, "height": 64, "guidance": 2.5, "image": PICTURE}
FILLED = PROMPT | {"width": 64, "height": 48, "guidance": 30.0, "image": FITTING, "mask": HOLE}


def few_pixels(patch: pytest.MonkeyPatch) -> None:
    """Let both see a reference in few pixels."""
    from diffusers.pipelines.flux import pipeline_flux_kontext

    patch.setattr(references, "SIZES", SIZES)
    patch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", SIZES)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Scenes:
    dev = tiny["flux-dev"]
    in_file = scratch / "flux.safetensors"
    transformer = oracle_flux.pipeline(dev, "text").transformer
    save_file(their_file(transformer), in_file)
    pictures = {
        "negative": _picture(dev, "text", NEGATIVE),
        "file": _picture(dev, "text", PROMPT | {"width": 48, "height": 32, "guidance": 3.5}, transformer=in_file),
        "kontext": _picture(tiny["flux-kontext"], "kontext", EDIT, max_area=48 * 64),
        "fill": _picture(tiny["flux-fill"], "fill", FILLED),
    }
    return Scenes({"": Judge(dev), **pictures})


def _picture(folder: Path, task: str, asked: dict[str, Any], **more: Any) -> PictureJudge:
    """The judge of a picture, beside diffusers'. more: for it alone, or a part that ours is loaded with."""
    renamed = {"steps": "num_inference_steps", "guidance": "guidance_scale", "true_cfg": "true_cfg_scale"}
    renamed |= {"mask": "mask_image"}
    parts = {name: more.pop(name) for name in ("transformer",) if name in more}

    def theirs() -> tuple[Any, Any]:
        options = {renamed.get(name, name): value for name, value in asked.items()}
        options |= {name: Image.fromarray(options[name]) for name in ("image", "mask_image") if name in options}
        return oracle_flux.generate(folder, task, seed=7, length=512, **options, **more)

    return PictureJudge(folder, asked | {"seed": 7}, theirs, few_pixels, **parts)
