"""Faults in Stable Cascade: in its prior, its decoder, its text encoder, its VAE, its encoder of pictures, and the two
loops around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.cascade import model
from qwenimg.common.families.cascade.model import Cascade
from qwenimg.common.families.cascade.texts import CascadeTexts
from qwenimg.common.networks.denoisers import cascade_conditioning
from qwenimg.common.parts.texts.clip_texts import ClipTexts
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.sampling import table, wuerstchen
from support import mutants_sd as sd
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch

# The UNets


def _class(patch: Patch, name: str, network: str = "cascade_unet") -> Any:
    return getattr(patch.backend.network(network), name)


def _around(patch: Patch, name: str, change: Callable[..., Any], network: str = "cascade_unet") -> None:
    """Makes the call of a class of the network go through change(the call, the layer, its arguments)."""
    patch.around(_class(patch, name, network), patch.backend.calls, change)


def no_response_norm(patch: Patch) -> None:
    patch.layer("ResponseNorm", lambda layer, x, y: patch.backend.like(x, y))


def response_without_its_mean(patch: Patch) -> None:
    """Every channel as long as the mean."""
    patch.layer("ResponseNorm", lambda layer, x, y: patch.backend.like(x * (1 + layer.gamma) + layer.beta, y))


def response_not_shifted(patch: Patch) -> None:
    patch.layer("ResponseNorm", lambda layer, x, y: y - patch.backend.like(layer.beta, y))


def response_without_its_input(patch: Patch) -> None:
    patch.layer("ResponseNorm", lambda layer, x, y: y - patch.backend.like(x, y))


def epsilon_of_others(patch: Patch) -> None:
    patch.around(patch.backend.ops, "unit_norm", lambda made, x, eps: made(x, 1e-2))


def gelu_by_tanh(patch: Patch) -> None:
    patch.set(patch.backend.ops, "gelu_erf", patch.backend.ops.gelu)


def scale_and_shift_exchanged(patch: Patch) -> None:
    patch.around(patch.backend.ops, "modulated", lambda made, x, shift, scale, dtype: made(x, scale, shift, dtype))


def scale_without_one(patch: Patch) -> None:
    patch.around(patch.backend.ops, "modulated", lambda made, x, shift, scale, dtype: made(x, shift, scale - 1, dtype))


def no_time(patch: Patch) -> None:
    _around(patch, "TimestepBlock", lambda call, own, x, time: x)


def further_values_not_added(patch: Patch) -> None:
    """The layers of the values that are always 0."""

    def alone(call: Any, own: Any, x: Any, time: Any) -> Any:
        more, own.more = own.more, ()
        try:
            return call(own, x, time[..., : time.shape[-1] // (1 + len(more))])
        finally:
            own.more = more

    _around(patch, "TimestepBlock", alone)


def values_in_another_order(patch: Patch) -> None:
    """The time in the place of the first of the further values."""

    def turned(call: Any, own: Any, x: Any, time: Any) -> Any:
        return call(own, x, patch.backend.lib.roll(time, time.shape[-1] // (1 + len(own.more)), -1))

    _around(patch, "TimestepBlock", turned)


def _known(patch: Patch, change: Callable[..., Any]) -> None:
    patch.around(patch.backend.network("cascade_unet"), "with_known", change)


def text_not_seen(patch: Patch) -> None:
    _known(patch, lambda made, attend, k, v, known: (k, v))


def image_does_not_see_itself(patch: Patch) -> None:
    _known(patch, lambda made, attend, k, v, known: (known[0], attend.values(known[1])))


def last_of_the_condition_not_seen(patch: Patch) -> None:
    _known(patch, lambda made, attend, k, v, known: made(attend, k, v, (known[0][:, :-1], known[1][:, :-1])))


def keys_and_values_exchanged(patch: Patch) -> None:
    patch.exchanged(_class(patch, "Attention"), "pair", "to_k", "to_v")


def attention_without_its_norm(patch: Patch) -> None:
    def raw(call: Any, own: Any, x: Any, context: Any) -> Any:
        return patch.backend.ops.residual(x, own.attention(x, context))

    _around(patch, "AttnBlock", raw)


def tokens_of_no_picture_missing(patch: Patch) -> None:
    def cut(made: Any, own: Any, pooled: Any, text: Any) -> Any:
        tokens = made(own, pooled, text)
        return tokens if text is None else tokens[:, : -own.config.clip_seq]

    patch.around(_class(patch, "CascadeUNet"), "condition", cut)


def condition_not_normed(patch: Patch) -> None:
    norm = patch.backend.ops.unit_norm

    def raw(made: Any, own: Any, *given: Any) -> Any:
        patch.backend.ops.unit_norm = lambda x, eps: x
        try:
            return made(own, *given)
        finally:
            patch.backend.ops.unit_norm = norm

    patch.around(_class(patch, "CascadeUNet"), "condition", raw)


def _skips(patch: Patch, change: Callable[[Any, Any], Any]) -> None:
    def other(call: Any, own: Any, x: Any, plane: Any, *skip: Any) -> Any:
        return call(own, x, plane, *(change(x, one) for one in skip))

    _around(patch, "ResBlock", other)


def skip_of_zeros(patch: Patch) -> None:
    _skips(patch, lambda x, skip: 0.0 * skip)


def stream_for_its_skip(patch: Patch) -> None:
    _skips(patch, lambda x, skip: x)


def _levels(patch: Patch, change: Callable[..., Any]) -> None:
    patch.around(_class(patch, "CascadeUNet"), "run", change)


def levels_run_once(patch: Patch) -> None:
    _levels(patch, lambda run, own, level, *rest: run(own, level._replace(repeats=1), *rest))


def no_layer_between_repetitions(patch: Patch) -> None:
    def without(run: Any, own: Any, level: Any, blocks: Any, between: Any, *rest: Any) -> Any:
        return run(own, level, blocks, [lambda x: x] * len(between), *rest)

    _levels(patch, without)


def levels_led_to_without_norm(patch: Patch) -> None:
    def raw(made: Any, own: Any, layer: Any, x: Any, plane: Any) -> Any:
        norm, patch.backend.ops.unit_norm = patch.backend.ops.unit_norm, lambda x, eps: x
        try:
            return made(own, layer, x, plane)
        finally:
            patch.backend.ops.unit_norm = norm

    patch.around(_class(patch, "CascadeUNet"), "scaled", raw)


def stretched_by_one_more(patch: Patch) -> None:
    """Corners that are not kept."""
    _, rows, columns = patch.backend.axes()

    def larger(made: Any, x: Any, height: int, width: int) -> Any:
        wider = made(x, height + 1, width + 1)
        cut = [slice(None)] * 4
        cut[rows], cut[columns] = slice(height), slice(width)
        return wider[tuple(cut)]

    patch.around(patch.backend.ops, "stretched", larger)


def _mapped(patch: Patch, change: Callable[[Any, bool], Any]) -> None:
    """Makes what enters besides the latents change(itself, whether it is the pixels)."""
    network = patch.backend.network("cascade_unet")
    patch.around(network, "mapped", lambda made, layers, hidden: change(made(layers, hidden), hidden.shape[1] == 1))


def pixels_not_added(patch: Patch) -> None:
    _mapped(patch, lambda made, pixels: 0.0 * made if pixels else made)


def embedding_not_added(patch: Patch) -> None:
    _mapped(patch, lambda made, pixels: made if pixels else 0.0 * made)


def patches_one_channel_later(patch: Patch) -> None:
    axis = patch.backend.axes()[0]
    patch.around(patch.backend.images, "patches", lambda made, x, size: patch.backend.lib.roll(made(x, size), 1, axis))


# The VAE


def edges_of_zeros(patch: Patch) -> None:
    lib, (_, rows, columns) = patch.backend.lib, patch.backend.axes()

    def zeros(made: Any, x: Any) -> Any:
        if patch.backend.torch:
            return lib.nn.functional.pad(x, (1, 1, 1, 1))
        return lib.pad(x, [(int(axis in (rows, columns)),) * 2 for axis in range(4)])

    patch.around(patch.backend.images, "edged", zeros)


def _gammas(patch: Patch, by: int) -> None:
    patch.loaded(lambda entry, made: patch.backend.lib.roll(made, by, -1) if "gammas" in entry.name else made)


def halves_of_a_block_exchanged(patch: Patch) -> None:
    """Their numbers."""
    _gammas(patch, 3)


def numbers_one_later(patch: Patch) -> None:
    _gammas(patch, 1)


def pixels_0_to_1(patch: Patch) -> None:
    owner = _class(patch, "PaellaVAE", "paella_vae")
    patch.around(owner, "decode", lambda decode, *given: (decode(*given) + 1) / 2)


# Times and noise levels


def _sinusoids(patch: Patch, change: Callable[..., Any]) -> None:
    patch.around(cascade_conditioning, "unet_sinusoids", change)


def cosines_before_sines(patch: Patch) -> None:
    def turned(made: Any, *rest: Any, **more: Any) -> Any:
        features = made(*rest, **more)
        return np.roll(features, features.shape[-1] // 2, axis=-1)

    _sinusoids(patch, turned)


def frequencies_not_shifted(patch: Patch) -> None:
    """`freq_shift` 0 for 1."""
    _sinusoids(patch, lambda made, *rest, shift, **more: made(*rest, shift=0, **more))


def time_off(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, config, time: made(config, 0.999 * time))


def times_of_1000(patch: Patch) -> None:
    """Not of 10000."""
    patch.around(model, "time_row", lambda made, config, time: made(config, time / 10))


def levels_2_off(patch: Patch) -> None:
    patch.around(wuerstchen.CosineConfig, "sigma", lambda made, config, time: 1.02 * made(config, time))


def noise_in_the_last_step(patch: Patch) -> None:
    patch.set(wuerstchen, "ddpm", table.find("ddpm").function)


# What the decoder sees of the prior


def embedding_turned(patch: Patch) -> None:
    """Its rows one later."""
    roll = patch.backend.lib.roll

    def turned(made: Any, runner: Any, pooled: Any, text: Any = None, embedding: Any = None, *grid: Any) -> Any:
        return made(runner, pooled, text, None if embedding is None else roll(embedding, 1, 2), *grid)

    patch.around(_class(patch, "Runner"), "condition", turned)


def decoder_guided_as_the_prior(patch: Patch) -> None:
    patch.set(Cascade, "requests", lambda model, request: {"transformer": request, "decoder": request})


# The encoder of pictures


def epsilon_of_the_last_norm(patch: Patch) -> None:
    patch.built(patch.backend.ops.BatchNorm, lambda norm: setattr(norm, "eps", 1e-5))


def norms_without_gain(patch: Patch) -> None:
    def plain(call: Any, own: Any, x: Any) -> Any:
        affine, own.affine = own.affine, False
        try:
            return call(own, x)
        finally:
            own.affine = affine

    patch.around(patch.backend.ops.BatchNorm, patch.backend.calls, plain)


def last_norm_left_out(patch: Patch) -> None:
    norm = patch.backend.ops.BatchNorm
    patch.around(norm, patch.backend.calls, lambda call, own, x: call(own, x) if own.affine else x)


def kernels_without_silu(patch: Patch) -> None:
    patch.set(patch.backend.network("effnet"), "active", lambda layers, x: layers[1](layers[0](x)))


def channels_not_weighed(patch: Patch) -> None:
    _around(patch, "Squeeze", lambda call, own, x: x, "effnet")


def blocks_without_their_input(patch: Patch) -> None:
    patch.built(_class(patch, "Block", "effnet"), lambda block: setattr(block, "adds", False))


# The texts


def text_with_final_norm(patch: Patch) -> None:
    patch.set(
        CascadeTexts, "used_states", lambda texts, config, skip: (ClipTexts.used_states(texts, config, skip)[0], True)
    )


def padding_seen(patch: Patch) -> None:
    patch.around(_class(patch, "CLIPTextEncoder", "clip"), patch.backend.calls, lambda call, *given: call(*given[:7]))


def first_word_not_encoded(patch: Patch) -> None:
    patch.around(
        _class(patch, "Runner", "clip"),
        "encode",
        lambda encode, runner, ids, *rest: encode(runner, [[one[0], *one[2:], one[-1]] for one in ids], *rest),
    )


def latents_5_off(patch: Patch) -> None:
    patch.around(VAEHalves, "decode", lambda decode, halves, z: decode(halves, 1.05 * z))


MUTANTS = (
    Mutant(no_response_norm, "no response norm"),
    Mutant(response_without_its_mean, "every channel as long as the mean in the response norm"),
    Mutant(response_not_shifted, "the response norm without its shift"),
    Mutant(response_without_its_input, "the response norm without its input"),
    Mutant(epsilon_of_others, "an epsilon of 0.01 in norms"),
    Mutant(gelu_by_tanh, "GELU by its tanh form"),
    Mutant(scale_and_shift_exchanged, "scale and shift of the time exchanged"),
    Mutant(scale_without_one, "`scale` for `1 + scale`"),
    Mutant(no_time, "blocks without the time"),
    Mutant(further_values_not_added, "the layers of further values not added"),
    Mutant(values_in_another_order, "the time in the place of another value"),
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(text_not_seen, "the condition not attended"),
    Mutant(image_does_not_see_itself, "the image not attended"),
    Mutant(last_of_the_condition_not_seen, "the last token of the condition not attended"),
    Mutant(keys_and_values_exchanged, "keys and values exchanged"),
    Mutant(attention_without_its_norm, "no norm before the attention"),
    Mutant(skip_of_zeros, "zeros for what the way down keeps"),
    Mutant(stream_for_its_skip, "the stream for what the way down keeps"),
    Mutant(levels_run_once, "levels that run once"),
    Mutant(no_layer_between_repetitions, "no layer between a level's repetitions"),
    Mutant(levels_led_to_without_norm, "no norm between levels"),
    Mutant(patches_one_channel_later, "a patch's channels one later"),
    Mutant(edges_of_zeros, "zeros at the edges of the VAE's images"),
    Mutant(halves_of_a_block_exchanged, "the numbers of a VAE block's halves exchanged"),
    Mutant(numbers_one_later, "the numbers of a VAE block one later"),
    Mutant(pixels_0_to_1, "pixels of 0 to 1"),
    Mutant(shared.kernel_turned, "rows and columns of kernels exchanged"),
    Mutant(epsilon_of_the_last_norm, "the last batch norm's epsilon in all"),
    Mutant(norms_without_gain, "batch norms without gain and bias"),
    Mutant(last_norm_left_out, "no norm of an embedding"),
    Mutant(kernels_without_silu, "no SiLU behind the encoder's kernels"),
    Mutant(channels_not_weighed, "channels not weighed by their means"),
    Mutant(blocks_without_their_input, "the encoder's blocks without their input"),
    Mutant(sd.quick_gelu_for_gelu, "quick GELU for GELU of the text"),
    Mutant(shared.text_not_causal, "a text encoder that sees what comes"),
    Mutant(sd.positions_off_by_one, "positions of the text off by one"),
    *shared.WEIGHTS_AND_PLACES,
    Mutant(shared.silu_left_out, "no SiLU before the condition's layer", picture=True),
    Mutant(condition_not_normed, "the condition without its norm", picture=True),
    Mutant(tokens_of_no_picture_missing, "no tokens of no picture", picture=True, refused=("bf16",)),
    Mutant(stretched_by_one_more, "the embedding stretched past its corners", picture=True),
    Mutant(pixels_not_added, "the layers of black pixels not added", picture=True),
    Mutant(embedding_not_added, "the embedding not added", picture=True),
    Mutant(embedding_turned, "the embedding's rows one later", picture=True),
    Mutant(decoder_guided_as_the_prior, "the prior's guidance for the decoder", picture=True),
    Mutant(cosines_before_sines, "cosines before sines of the time", picture=True),
    Mutant(frequencies_not_shifted, "`freq_shift` 0 for 1", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(times_of_1000, "times of 1000 for 10000", picture=True),
    Mutant(levels_2_off, "noise levels 2 % too high", picture=True),
    Mutant(noise_in_the_last_step, "noise in the last step", picture=True),
    Mutant(shared.velocity_sign("cascade_unet"), "the noise's sign", picture=True),
    Mutant(sd.prediction_of_another_kind, "a prediction of noise taken for one of velocity", picture=True),
    Mutant(sd.input_not_scaled, "latents not scaled before the UNets", picture=True),
    Mutant(text_with_final_norm, "the text's final norm", picture=True),
    Mutant(padding_seen, "padding that is seen", picture=True),
    Mutant(first_word_not_encoded, "the first word not encoded", picture=True),
    Mutant(sd.pooled_at_the_wrong_end, "pooled at the last token", picture=True),
    Mutant(sd.clip_skip_off_by_one, "clip skip off by one", picture=True),
    Mutant(shared.branches_swapped(Cascade), "the branches of guidance exchanged", picture=True),
    Mutant(shared.from_the_prompt(Cascade), "guidance from the prompt's prediction", picture=True),
    Mutant(latents_5_off, "the latents' scale 5 % off", picture=True),
    *shared.DECODING,
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["cascade"])
