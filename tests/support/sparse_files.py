"""Files of weights that are headers alone: what is planned of a model of the published size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path


def sparse(
    path: Path, entries: Mapping[str, tuple[str, tuple[int, ...], int]], notes: Mapping[str, str] | None = None
) -> Path:
    """A safetensors file of these dtypes, shapes and bytes of a value; its data is a hole."""
    at, header = 0, {} if notes is None else {"__metadata__": dict(notes)}
    for name, (dtype, shape, size) in entries.items():
        end = at + math.prod(shape) * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
    return path
