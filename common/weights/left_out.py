"""Tensors in model files that no network here uses: they are reported and not loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from qwenimg.common.base.amounts import counted
from qwenimg.common.formats.stored import Header
from qwenimg.common.quant.doubles import DTYPE as DOUBLE

_KINDS: Mapping[str, re.Pattern[str]] = {
    "safety checker": re.compile(r"safety_checker\..+"),
    "ControlNet (control_model.*)": re.compile(r"(model\.)?control_model\..+"),
    "rotary tables": re.compile(
        r"(.+\.)?(inv_freq|freqs|freqs_cis|freqs_cos|freqs_sin|pos_freqs|neg_freqs|cos_cached|sin_cached)(\.\d{1,2})?"
    ),
}


def kind(key: str) -> str | None:
    """Return what the tensor `key` belongs to, if it is left out of every model: a table that is computed here, or a
    network that this version does not use; else None."""
    return next((title for title, pattern in _KINDS.items() if pattern.fullmatch(key)), None)


def line(header: Header) -> str | None:
    """Return the line about the tensors of a file that are left out or read in another dtype; None without any."""
    counts = Counter(title for key in header.tensors if (title := kind(key)) is not None)
    doubles = sum(stored.dtype == DOUBLE and kind(key) is None for key, stored in header.tensors.items())
    listed = ", ".join(f"{title} ({counted(count, 'tensor')})" for title, count in counts.items())
    parts = [f"left out, since nothing here uses it: {listed}"] if counts else []
    parts += [f"{counted(doubles, 'tensor')} in 64 bits, read in float32"] if doubles else []
    return "; ".join(parts) or None
