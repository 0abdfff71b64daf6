"""Faults in control of Stable Diffusion by pictures: in a ControlNet Union and a T2I-Adapter, and in what becomes of
their changes, scales and kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qwenimg.common.families.stable_diffusion import adapter, control
from qwenimg.common.networks.denoisers import unet_controlnet_union
from support.mutant import Patch

# Where changes go


def _changes(patch: Patch, change: Callable[[Any], Any]) -> None:
    """Makes the UNet add change(the sum of all changes)."""
    patch.around(patch.backend.network("unet"), "together", lambda made, control: change(made(control)))


def _moved(changes: Any, places: list[int]) -> Any:
    """Changes of a ControlNet, each that at its number in `places`, where that has its size."""
    flat = [one for level in changes.down for one in level]
    moved = iter(flat[j] if flat[j].shape == flat[i].shape else flat[i] for i, j in enumerate(places))
    return replace(changes, down=[[next(moved) for _ in level] for level in changes.down])


def _count(changes: Any) -> int:
    return sum(map(len, changes.down))


def one_block_late(patch: Patch) -> None:
    """The first twice."""
    _changes(patch, lambda made: _moved(made, [max(0, i - 1) for i in range(_count(made))]))


def joined_in_reverse(patch: Patch) -> None:
    """In each level the changes in the order in which the up blocks join them."""
    _changes(patch, lambda made: replace(made, down=[_fitting(level) for level in made.down]))


def _fitting(level: list[Any]) -> list[Any]:
    turned = level[::-1]
    return turned if [one.shape for one in turned] == [one.shape for one in level] else level


def _last_features(patch: Patch, change: Callable[[list[Any]], list[Any]]) -> None:
    _changes(patch, lambda made: replace(made, features=change(made.features)))


def features_one_block_late(patch: Patch) -> None:
    """The last at the mid block, whose sides it has: the block before gets none."""
    _last_features(patch, lambda features: [*features[:-1], 0 * features[-1], features[-1]])


def features_in_reverse(patch: Patch) -> None:
    """Each feature's channels."""
    axis = patch.backend.axes()[0]
    _last_features(patch, lambda features: [_flipped(patch, one, axis) for one in features])


def _flipped(patch: Patch, x: Any, axis: int) -> Any:
    return patch.backend.join(patch.backend.halves(x, axis), axis)


def features_behind_the_states(patch: Patch) -> None:
    """Added to what follows alone, not to the states that the up blocks join."""

    def without(call: Any, block: Any, x: Any, states: Any, temb: Any, context: Any, feature: Any = None) -> Any:
        made = call(block, x, states, temb, context)
        return made if feature is None else patch.backend.ops.add(made, feature)

    patch.around(patch.backend.network("unet").DownBlock, patch.backend.calls, without)


# Scales, branches, kinds


def scale_twice(patch: Patch) -> None:
    for owner in (control, adapter):
        patch.around(owner, "scales", lambda made, config, scale, **more: made(config, scale * scale, **more))
    patch.around(
        control.ActiveControl, "weights_at", lambda made, own, sigma: tuple(one * one for one in made(own, sigma))
    )


def without_a_prompt_controlled(patch: Patch) -> None:
    """The unconditional branch is given the picture, where it is not to lead."""
    patch.set(control, "controlled", lambda request, positions, branches: len(positions))


def kinds_swapped(patch: Patch) -> None:
    kinds = unet_controlnet_union.KINDS
    patch.set(unet_controlnet_union, "KINDS", {**kinds, "depth": kinds["lineart"], "lineart": kinds["depth"]})


def kinds_not_embedded(patch: Patch) -> None:
    def without(made: Any, net: Any, features: Any, addition: Any, kinds: Any = None) -> Any:
        return made(net, features, addition)

    patch.around(patch.backend.network("unet").UNetHalf, "time", without)


def window_ignored(patch: Patch) -> None:
    patch.set(control.ActiveControl, "weights_at", lambda own, sigma: own.weights)


# The networks


def token_not_used(patch: Patch) -> None:
    """Pictures without what comes of their tokens."""

    def sum_alone(made: Any, net: Any, pictures: Any, kinds: Any, scales: Any) -> Any:
        total = pictures[0] * scales[0]
        for picture, scale in zip(pictures[1:], scales[1:], strict=True):
            total = patch.backend.ops.add(total, picture * scale)
        return total

    patch.around(patch.backend.network("unet_controlnet_union").UNetControlNetUnion, "together", sum_alone)


def keys_for_values(patch: Patch) -> None:
    def keys(layer: Any, x: Any) -> Any:
        width = x.shape[-1]
        return layer.out_proj(layer.in_proj(x)[..., width : 2 * width])

    patch.set(patch.backend.network("unet_controlnet_union").Values, patch.backend.calls, keys)


def relu_leaks(patch: Patch) -> None:
    patch.around(patch.backend.ops, "leaky_relu", lambda made, x, slope: made(x, slope or 0.01))
