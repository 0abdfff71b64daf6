"""The values that must be equal on all ranks, so that they compute the same image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qwenimg.common.base.errors import ModelError

if TYPE_CHECKING:
    from qwenimg.common.pipeline.pipeline import Pipeline


def identity(pipe: Pipeline) -> dict[str, str]:
    """Return the backend, the precision, the bits and the hash of each part's files, under the names for messages."""
    from qwenimg.common.formats.fingerprint import fingerprint

    assert pipe.checkpoint is not None
    parts = {name: part.plan.files for name, part in sorted(pipe.checkpoint.components.items())}
    files = {f"the files of the {name}": fingerprint(opened) for name, opened in parts.items() if opened}
    about = {"the backend": pipe.backend, "--precision": pipe.precision.name}
    return about | {"the weights' bits": str(pipe.options.get("quantize", ""))} | files


def check_same(ours: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    """Raise ModelError for the first value that differs from rank 0's."""
    for name in [*theirs, *ours]:
        here, there = (str(values.get(name, "missing"))[:12] for values in (ours, theirs))
        if ours.get(name) != theirs.get(name):
            raise ModelError(f"{name} differs: {here} here, {there} on rank 0; give all ranks the same")
