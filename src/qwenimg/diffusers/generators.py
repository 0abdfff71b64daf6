"""torch's generators as seeds, or as the noise that diffusers would draw from them.

A fresh generator of the CPU is its seed: the recipe of the picture has it. Any other, one that has drawn before, one of
a GPU, or one for several pictures, draws the noise itself, as diffusers lets it. torch is never imported here: who
hands a generator has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

Shape = tuple[int, ...]


def starts(generator: object, count: int, shape: Callable[[], Shape | None]) -> list[dict[str, Any]]:
    """Return the options, a `seed` or `latents`, of each of `count` pictures. shape: returns that of a picture's noise,
    None if more than noise is drawn, which only a seed repeats. Raises UsageError."""
    if generator is None:
        return [{}] * count
    several = generator if isinstance(generator, list | tuple) else None
    if several is not None and len(several) != count:
        raise UsageError(f"generator: {len(several)} for {count} pictures; give one for each, or a single one")
    for one in several or [generator]:
        if not _is_generator(one) and not _is_seed(one):
            raise UsageError(f"generator is {clean(one, 40)}; give torch.Generator().manual_seed(7), or seed=7")
    if several is not None:
        return [_start(one, 1, shape)[0] for one in several]
    return _start(generator, count, shape)


def _start(generator: Any, count: int, shape: Callable[[], Shape | None]) -> list[dict[str, Any]]:
    if _is_seed(generator):
        return [{"seed": generator + i} for i in range(count)]
    fresh, drawn = _is_fresh(generator), shape()
    if fresh and count == 1:
        seed = generator.initial_seed()
        _advance(generator, drawn)
        return [{"seed": seed}]
    if drawn is None:
        what = "one generator for several pictures" if count > 1 else "a generator of a GPU, or one that has drawn"
        raise UsageError(
            f"generator: {what} is for text to image without noise in the steps; here give a list of fresh "
            "torch.Generator().manual_seed(n), one for each picture"
        )
    torch = sys.modules["torch"]
    noise = torch.randn((count * drawn[0], *drawn[1:]), generator=generator, device=generator.device)
    every = noise.cpu().numpy().reshape(count, *drawn)
    return [{"latents": every[i]} for i in range(count)]


def _is_generator(value: object) -> bool:
    return (
        all(callable(getattr(value, name, None)) for name in ("initial_seed", "get_state")) and "torch" in sys.modules
    )


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_fresh(generator: Any) -> bool:
    """Return whether nothing was drawn from a generator of the CPU."""
    if generator.device.type != "cpu":
        return False
    torch = sys.modules["torch"]
    same = torch.Generator().manual_seed(generator.initial_seed())
    return bool(torch.equal(same.get_state(), generator.get_state()))


def _advance(generator: Any, shape: Shape | None) -> None:
    """Draw from a generator whose seed was taken, so that a second picture is another one, as in diffusers."""
    sys.modules["torch"].randn(shape or (16,), generator=generator)
