"""Faults in control of Qwen-Image by pictures: in a ControlNet, in block-wise patches, and in what becomes of pictures,
masks and scales. Some are looked for in a passport by `test_passport_control`; all are held against pictures of
diffusers, and where that has no such network, of ours without a fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.qwen_image import control
from qwenimg.common.families.qwen_image.control import ControlNetworks
from qwenimg.common.numbers import packing
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pipeline import control_pictures
from qwenimg.common.pipeline.models.control_stages import OpenControl
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.request.control_text import Control
from support import oracle_control
from support.mutant import Mutant, Patch, PictureJudge, Scenes
from support.mutants_shared import mask_inverted, picture_in_0_to_1
from support.tiny_control import write_controlnet, write_patches


def _class(patch: Patch, name: str) -> Any:
    return getattr(patch.backend.network("qwen_controlnet"), name)


# The ControlNet


def picture_not_added(patch: Patch) -> None:
    patch.around(_class(patch, "QwenImageControlNet"), "picture", lambda made, *given: 0 * made(*given))


def picture_through_the_layer_of_the_latents(patch: Patch) -> None:
    def other(made: Any, net: Any, latents: Any) -> Any:
        return patch.backend.ops.stream(net.img_in(latents), net.stream)

    patch.around(_class(patch, "QwenImageControlNet"), "picture", other)


def latents_not_read(patch: Patch) -> None:
    def without(call: Any, net: Any, latents: Any, *rest: Any) -> Any:
        return call(net, 0 * latents, *rest)

    patch.around(_class(patch, "QwenImageControlNet"), patch.backend.calls, without)


def residuals_without_their_layers(patch: Patch) -> None:
    patch.layer("Linear", lambda layer, x, y: x if layer.path.startswith("controlnet_blocks.") else y)


def residuals_of_the_last_block(patch: Patch) -> None:
    """Behind every block."""

    def same(call: Any, net: Any, *given: Any) -> Any:
        residuals = call(net, *given)
        return [residuals[-1]] * len(residuals)

    patch.around(_class(patch, "QwenImageControlNet"), patch.backend.calls, same)


def text_not_normed(patch: Patch) -> None:
    def plain(made: Any, net: Any, text: Any) -> Any:
        return patch.backend.ops.stream(net.txt_in(text), net.stream)

    patch.around(_class(patch, "QwenImageControlNet"), "context", plain)


def at_the_time_of_the_first_step(patch: Patch) -> None:
    patch.around(
        _class(patch, "Runner"),
        "predict",
        lambda predict, own, x, step, *rest: predict(own, x, (step[0], 0), *rest),
    )


def rows_and_columns_swapped(patch: Patch) -> None:
    """Of the image's tokens, for the network alone."""

    def swapped(made: Any, own: Any, text: Any, grid: Any, picture: Any) -> Any:
        return made(own, text, grid[::-1], picture)

    patch.around(_class(patch, "Runner"), "condition", swapped)


# Where its residuals go


def one_block_late(patch: Patch) -> None:
    patch.around(control, "spread", lambda spread, controls, blocks: [(), *spread(controls, blocks)[:-1]])


def blocks_in_turn(patch: Patch) -> None:
    """The residuals one after the other and again, for each as many times in a row."""
    patch.set(
        control,
        "spread",
        lambda controls, blocks: [[one[block % len(one)] for one in controls] for block in range(blocks)],
    )


def last_block_without(patch: Patch) -> None:
    """Where there are fewer residuals than blocks, each once."""
    patch.set(
        control,
        "spread",
        lambda controls, blocks: [[one[i] for one in controls if i < len(one)] for i in range(blocks)],
    )


def scale_ignored(patch: Patch) -> None:
    patch.around(OpenControl, "__init__", lambda init, own, **given: init(own, **(given | {"scale": 1.0})))


def scale_squared(patch: Patch) -> None:
    patch.around(
        OpenControl,
        "__init__",
        lambda init, own, **given: init(own, **(given | {"scale": given["scale"] ** 2})),
    )


def window_one_step_wide(patch: Patch) -> None:
    """A step counts that lies in the window in part."""

    def wide(own: Control, count: int) -> tuple[int, int]:
        before = sum((step + 1) / count <= own.start for step in range(count))
        return before, sum(step / count < own.end for step in range(count))

    patch.set(Control, "steps", wide)


def window_ignored(patch: Patch) -> None:
    patch.set(Control, "steps", lambda own, count: (0, count))


def without_a_prompt_uncontrolled(patch: Patch) -> None:
    """The unconditional branch."""
    component = patch.backend.network("qwen_dit").Runner
    lengths: list[int] = []

    def first(predict: Any, own: Any, x: Any, step: Any, condition: Any, *more: Any) -> Any:
        lengths.append(condition.txt.shape[1])
        return (
            predict(own, x, step, condition, *more) if lengths[-1] == lengths[0] else predict(own, x, step, condition)
        )

    patch.around(component, "predict", first)


def text_of_the_negative_prompt(patch: Patch) -> None:
    made: list[Any] = []

    def noted(states: Any, texts: Any, prompts: Any) -> Any:
        made[:] = states(texts, prompts)
        return list(made)

    def other(make: Any, own: Any, request: Any, plan: Any, opened: Any, grid: Any, text: Any, pictures: Any) -> Any:
        return make(own, request, plan, opened, grid, made[-1], pictures)

    patch.around(TemplateTexts, "states", noted)
    patch.around(ControlNetworks, "controlling", other)


def last_control_alone(patch: Patch) -> None:
    patch.around(control, "spread", lambda spread, controls, blocks: spread(controls[-1:], blocks))


def controls_one_after_the_other(patch: Patch) -> None:
    """Each sees the change by the one before."""
    ops = patch.backend.ops

    def changed(
        call: Any, block: Any, img: Any, txt: Any, mods: Any, rope: Any, index: Any, mask: Any, *more: Any
    ) -> Any:
        img, txt = call(block, img, txt, mods, rope, index, mask)
        for change in more:
            img = ops.add_first(img, change(img))
        return img, txt

    patch.around(patch.backend.network("qwen_dit").TransformerBlock, patch.backend.calls, changed)


# Block-wise patches


def patch_norms_exchanged(patch: Patch) -> None:
    patch.exchanged(patch.backend.network("qwen_patches").Patch, patch.backend.calls, "x_rms", "y_rms")


def patch_of_a_picture_not_normed(patch: Patch) -> None:
    patch.layer("RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path.endswith(".y_rms") else y)


def patch_gelu_tanh(patch: Patch) -> None:
    patch.set(patch.backend.ops, "gelu_erf", patch.backend.ops.gelu)


def patch_scale_ignored(patch: Patch) -> None:
    owner = patch.backend.network("qwen_patches").Runner
    patch.around(
        owner, "predict", lambda predict, own, x, step, condition, scale: predict(own, x, step, condition, 1.0)
    )


def patches_in_another_order(patch: Patch) -> None:
    owner = patch.backend.network("qwen_patches").Runner
    patch.around(owner, "predict", lambda predict, *given: predict(*given)[::-1])


# The picture


def mean_of_the_picture(patch: Patch) -> None:
    """Of its latents, for a sample."""
    patch.around(
        DiffusionModel,
        "control",
        lambda control, model, nets: control(model, {name: replace(net, samples=False) for name, net in nets.items()}),
    )


def picture_turned(patch: Patch) -> None:
    """Upside down."""
    patch.around(control_pictures, "prepared", lambda made, request: tuple(one[::-1] for one in made(request)))


def picture_of_another_order(patch: Patch) -> None:
    """Of patches: channels last."""
    patch.around(control_pictures, "seen", lambda made, *given: tuple(map(_repacked, made(*given))))


def _repacked(latents: Any) -> Any:
    """Latents whose tokens have their channels last."""
    h, w = latents.shape[2:]
    return packing.unpack(packing.pack(latents, channels_last=True), h, w)


# The mask


def _masked(patch: Patch, change: Any) -> None:
    """Makes the latents with a mask behind them what `change` makes of them."""

    def changed(made: Any, *given: Any) -> Any:
        latents = made(*given)
        return np.concatenate(change(latents[:, :16], latents[:, 16:]), axis=1)

    patch.around(control_pictures, "_seen", changed)


def mask_beside_the_latents_inverted(patch: Patch) -> None:
    _masked(patch, lambda latents, kept: (latents, 1 - kept))


def mask_before_the_latents(patch: Patch) -> None:
    _masked(patch, lambda latents, kept: (kept, latents))


def mask_seven_pixels_off(patch: Patch) -> None:
    """Read from the last pixel of a latent."""
    patch.around(control_pictures, "hole", lambda hole, *given: np.roll(hole(*given), (-7, -7), (0, 1)))


def hole_grey(patch: Patch) -> None:
    """For black."""
    patch.around(
        VAEHalves, "latents", lambda made, own, pixels, normal: made(own, np.where(pixels == -1, 0, pixels), normal)
    )


MUTANTS = tuple(
    Mutant(plant, what, scene=scene)
    for scene, plant, what in (
        ("one", picture_not_added, "the picture not added to the latents"),
        ("one", picture_through_the_layer_of_the_latents, "the picture through the layer of the latents"),
        ("one", latents_not_read, "latents not read by the network"),
        ("one", residuals_without_their_layers, "residuals without their layers"),
        ("one", residuals_of_the_last_block, "the last residual behind every block"),
        ("one", text_not_normed, "no norm of the network's text"),
        ("one", at_the_time_of_the_first_step, "the network at the time of the first step"),
        ("one", rows_and_columns_swapped, "rows and columns of the network's tokens exchanged"),
        ("one", one_block_late, "residuals one block late"),
        ("one", blocks_in_turn, "residuals one after the other, for each several times"),
        ("one", last_block_without, "each residual once"),
        ("one", scale_ignored, "the scale ignored"),
        ("one", scale_squared, "the scale squared"),
        ("one", window_one_step_wide, "steps that lie in the window in part"),
        ("one", window_ignored, "the window ignored"),
        ("one", without_a_prompt_uncontrolled, "no control of the unconditional branch"),
        ("one", text_of_the_negative_prompt, "the negative prompt's text for the network"),
        ("one", mean_of_the_picture, "the mean of the picture's latents for a sample"),
        ("one", picture_turned, "the picture upside down"),
        ("one", picture_of_another_order, "channels last in the picture's patches"),
        ("one", picture_in_0_to_1, "the picture in 0..1 for -1..1"),
        ("two", last_control_alone, "the last of two controls alone"),
        ("mask", mask_inverted, "the mask inverted"),
        ("mask", mask_beside_the_latents_inverted, "the mask beside the latents inverted"),
        ("mask", mask_before_the_latents, "the mask before the latents"),
        ("mask", mask_seven_pixels_off, "the mask seven pixels off"),
        ("mask", hole_grey, "the hole grey for black"),
        ("patches", patch_norms_exchanged, "a patch's norms of stream and picture exchanged"),
        ("patches", patch_of_a_picture_not_normed, "no norm of the picture in patches"),
        ("patches", patch_gelu_tanh, "GELU by its tanh form in patches"),
        ("patches", patch_scale_ignored, "the scale of patches ignored"),
        ("patches", patches_in_another_order, "patches in another order"),
        ("both", controls_one_after_the_other, "a control that sees the change by the one before"),
    )
)

RNG = np.random.default_rng(5)
PICTURES = [RNG.integers(0, 256, (height, width, 3), np.uint8) for height, width in ((48, 64), (70, 40))]
HOLE = np.zeros((48, 64), np.uint8)
HOLE[10:30, 21:51] = 255
PROMPT, NEGATIVE, SEED, SIZE = "a red circle", "blue things that nobody wants, everywhere", 7, (64, 48)
ASKED: dict[str, Any] = {"steps": 3, "guidance": 4.0, "negative_prompt": NEGATIVE}
ALWAYS = (0.0, 1.0)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Scenes:
    folder = tiny["qwen"]
    union, painting = write_controlnet(scratch / "union"), write_controlnet(scratch / "painting", 12, extra=4)
    patches, (wide, high) = write_patches(scratch / "patches.safetensors"), PICTURES
    return Scenes(
        {
            "one": _scene(folder, [(union, wide, 1.3, (0.3, 1.0))]),
            "two": _scene(folder, [(union, wide, 0.5, ALWAYS), (union, high, 1.0, (0.3, 1.0))]),
            "mask": _scene(folder, [(painting, wide, 1.0, ALWAYS)], HOLE),
            "patches": PictureJudge(folder, _asked([(patches, wide, 0.7, ALWAYS)]), None),
            "both": PictureJudge(folder, _asked([(union, wide, 1.0, ALWAYS), (patches, high, 1.0, ALWAYS)]), None),
        }
    )


def _asked(controls: list[Any], mask: Any = None) -> dict[str, Any]:
    width, height = SIZE
    return ASKED | {"prompt": PROMPT, "control": controls, "mask": mask, "width": width, "height": height, "seed": SEED}


def _scene(folder: Path, controls: list[Any], mask: Any = None) -> PictureJudge:
    """The judge of a picture with ControlNets, of one folder, beside diffusers'."""
    nets, pictures, scales, windows = map(list, zip(*controls, strict=True))

    def theirs() -> tuple[Any, Any]:
        more = {"size": SIZE, "seed": SEED, "scales": scales, "windows": windows, "mask": mask}
        return oracle_control.generate(folder, nets[0], PROMPT, pictures, **more, **ASKED)

    return PictureJudge(folder, _asked(controls, mask), theirs)
