"""Parts of a model that must fit each other: channels that one takes and others make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.runtime.checkpoint import Component

Configs: TypeAlias = Mapping[str, Any]
"""The configurations of a model's parts, by their folders."""


class Fit(NamedTuple):
    """Channels that must be equal."""

    words: str  # of the message, with {} for either number
    taken: Callable[[Configs], int]
    made: Callable[[Configs], Sequence[int]]  # numbers that fit, most often one; none if the model lacks the part


def text_states(
    made: Callable[[Configs], int],
    taken: Callable[[Configs], int] = lambda configs: configs["transformer"].joint_attention_dim,
) -> Fit:
    """Return the row of the channels of text states."""
    words = "the transformer wants text states of {} channels, the text encoder makes {}"
    return Fit(words, taken, lambda configs: [made(configs)])


LATENTS = Fit(
    "the transformer takes {} channels, the VAE's latents have {}",
    lambda configs: configs["transformer"].in_channels,
    lambda configs: [configs["vae"].latent_channels],
)
Z_LATENTS = Fit(LATENTS.words, LATENTS.taken, lambda configs: [configs["vae"].z_dim])
"""The same by the name that Qwen-Image's VAEs have for it."""
MADE_LATENTS = Fit(
    "the transformer makes {} channels, the VAE's latents have {}",
    lambda configs: configs["transformer"].out_channels,
    lambda configs: [configs["vae"].latent_channels],
)


def patches(made: Callable[[Configs], int]) -> Fit:
    """Return the row of the channels of latents in patches."""
    words = "the transformer takes {} channels, the VAE's latents have {} in patches"
    return Fit(words, lambda configs: configs["transformer"].in_channels, lambda configs: [made(configs)])


def check(source: Path, parts: Mapping[str, Component], fits: Iterable[Fit]) -> None:
    """Check that the `parts` of the model in `source` fit each other. Raises ModelError."""
    configs = {name: part.config for name, part in parts.items()}
    for fit in fits:
        taken, made = fit.taken(configs), fit.made(configs)
        if made and taken not in made:
            words = fit.words.format(taken, " or ".join(map(str, made)))
            raise ModelError(f"{clean(source, 120)}: {words}")
