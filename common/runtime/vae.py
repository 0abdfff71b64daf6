"""A VAE on an engine as its two halves: each is loaded when it is first used, once it is known to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import VAE
from qwenimg.common.runtime.runtime import Runtime


class VAEHalves:
    """`make_room` frees what it can where so many bytes are not free."""

    def __init__(self, runtime: Runtime, vae: Component, make_room: Callable[[int], None]):
        self.runtime, self.make_room = runtime, make_room
        self.halves = {
            "encoder": replace(vae, plan=vae.plan.only(lambda name: not decodes(name))),
            "decoder": replace(vae, plan=vae.plan.only(decodes)),
        }
        self._open: dict[str, VAE] = {}

    def encoder(self) -> VAE:
        return self._half("encoder")

    def decoder(self) -> VAE:
        return self._half("decoder")

    def free(self) -> None:
        self._open.clear()

    def _half(self, half: str) -> VAE:
        if half not in self._open:
            component = self.halves[half]
            self.make_room(self.runtime.weight_bytes(component))
            self._open[half] = self.runtime.open(component, f"vae {half}")
        return self._open[half]


def decodes(name: str) -> bool:
    """Whether decoding needs the parameter `name` of a VAE, and encoding does not."""
    return name.startswith(("decoder.", "post_quant_conv."))
