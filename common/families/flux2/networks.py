"""The networks of Flux.2 klein, by the names of their components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qwenimg.common.networks.denoisers import flux2_dit
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import flux2_vae

TAPS = (9, 18, 27)
"""The layers of the text encoder behind which states are taken. No file of a model states them."""


def _with_taps(data: Mapping[str, Any]) -> dict[str, Any]:
    return qwen3.fields(data) | {"taps": TAPS}


NETWORKS: dict[str, Network] = {
    "transformer": flux2_dit.NETWORK,
    "text_encoder": replace(qwen3.NETWORK, fields=_with_taps),
    "vae": flux2_vae.NETWORK,
}
