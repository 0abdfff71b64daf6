"""Faults in control of Flux.1 by pictures: in a ControlNet, and in what becomes of its residuals, pictures, kinds and
scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qwenimg.common.families.flux import controlnet as control
from qwenimg.common.families.flux.controlnet import ControlNetworks
from qwenimg.common.networks.denoisers import flux_controlnet
from qwenimg.common.pipeline.models.control_stages import OpenControl
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from support.mutant import Patch
from support.mutants_qwen_control import picture_turned, window_ignored  # noqa: F401  (of all control networks)


def _class(patch: Patch, name: str) -> Any:
    return getattr(patch.backend.network("flux_controlnet"), name)


# The network


def picture_not_added(patch: Patch) -> None:
    patch.around(_class(patch, "FluxControlNet"), "picture", lambda made, *given: 0 * made(*given))


def kind_not_read(patch: Patch) -> None:
    patch.around(_class(patch, "FluxControlNet"), "with_kind", lambda made, net, txt, kind: txt)


def residuals_without_their_layers(patch: Patch) -> None:
    patch.layer("Linear", lambda layer, x, y: x if layer.path.startswith("controlnet_blocks.") else y)


def at_the_time_of_the_first_step(patch: Patch) -> None:
    patch.around(
        _class(patch, "Runner"),
        "predict",
        lambda predict, own, x, step, *rest: predict(own, x, (step[0], 0), *rest),
    )


def rows_and_columns_swapped(patch: Patch) -> None:
    """Of the image's tokens, for the network alone."""

    def swapped(made: Any, own: Any, text: Any, extra: Any, picture: Any) -> Any:
        grid, kind = extra
        return made(own, text, (grid[::-1], kind), picture)

    patch.around(_class(patch, "Runner"), "condition", swapped)


# Where its residuals go


def one_block_late(patch: Patch) -> None:
    patch.around(control, "spread", lambda spread, controls, blocks: [(), *spread(controls, blocks)[:-1]])


def blocks_in_turn(patch: Patch) -> None:
    """As XLabs' networks have it."""

    def turned(controls: Any, blocks: int) -> Any:
        return [[one[block % len(one)] for one in controls if one] for block in range(blocks)]

    patch.set(control, "spread", turned)


def none_of_one_stream(patch: Patch) -> None:
    """Behind blocks of one stream."""
    counts: list[int] = []

    def first(spread: Any, controls: Any, blocks: int) -> Any:
        counts.append(blocks)
        return spread(controls, blocks) if len(counts) % 2 else [()] * blocks

    patch.around(control, "spread", first)


def scale_squared(patch: Patch) -> None:
    patch.around(
        OpenControl,
        "__init__",
        lambda init, own, **given: init(own, **(given | {"scale": given["scale"] ** 2})),
    )


def last_control_alone(patch: Patch) -> None:
    patch.around(control, "spread", lambda spread, controls, blocks: spread(controls[-1:], blocks))


# What it is given


def kind_of_another_picture(patch: Patch) -> None:
    patch.set(flux_controlnet, "KINDS", {**flux_controlnet.KINDS, "depth": flux_controlnet.KINDS["tile"]})


def guidance_1_off(patch: Patch) -> None:
    patch.around(control, "guidance_row", lambda made, guidance, dtype: made(1.01 * guidance, dtype))


def pooled_text_not_its_own(patch: Patch) -> None:
    """Of the branch without the prompt: with another sign."""
    patch.around(
        ControlNetworks, "open", lambda made, own, request, run, steps, pooled: made(own, request, run, steps, -pooled)
    )


def mean_of_the_picture(patch: Patch) -> None:
    """Of its latents, for a sample."""
    patch.around(
        DiffusionModel,
        "control",
        lambda given, model, nets: given(model, {name: replace(net, samples=False) for name, net in nets.items()}),
    )
