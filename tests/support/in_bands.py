"""A VAE that runs over bands of rows, whatever memory there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qwenimg.common.memory import bands
from qwenimg.common.parts.dc_vae import DCHalves


def in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every whole image too large, so that it is decoded and encoded in bands of 16 rows."""
    needed: Callable[..., int] = bands.encode_bytes
    of_sana: Callable[..., int] = DCHalves._encoding
    monkeypatch.setattr(bands, "ROWS", (16,))
    monkeypatch.setattr(bands, "is_small", lambda *given: False)
    monkeypatch.setattr(bands, "encode_bytes", lambda *given: 2**60 if given[5] is None else needed(*given))
    monkeypatch.setattr(DCHalves, "_is_whole", lambda *given: False)
    monkeypatch.setattr(DCHalves, "_encoding", lambda *given: 2**60 if given[3] is None else of_sana(*given))
