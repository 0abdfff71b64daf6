"""Transformers in files with their authors' names: the prefixes of these names, and how such a file is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import component
from qwenimg.common.parts.ldm_keys import Places
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import Place, plan_places

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")


def prefix_of(names: Collection[str], sign: str) -> str | None:
    """Return the prefix in a file with these `names`, one of which is `sign` behind it; None in a file without it."""
    return next((prefix for prefix in PREFIXES if prefix + sign in names), None)


def places(names: Iterable[str], prefix: str, place: Callable[[str], Place]) -> Places:
    """Map each parameter to its place behind `prefix`; `place` gives that in a file without a prefix."""
    return {name: (there := place(name))._replace(key=prefix + there.key) for name in names}


def open_transformer(
    header: Header,
    prefix: str,
    network: Network,
    config: Any,
    place: Callable[[str], Place],
    title: str,
    *,
    ignored: Collection[str] = (),
    whole: bool = False,
) -> Component:
    """Open the transformer behind `prefix` in a file in which each parameter has the place that `place` gives. title:
    the model's, for a message; ignored: tensors of no use, behind the prefix. The caller closes the file. Raises
    ModelError."""
    manifest = network.manifest(config)
    plan = plan_places(header, "transformer", places(manifest, prefix, place), manifest, network.uses(config))
    known = plan.known | {prefix + one for one in ignored}
    check_known(header.file.path, [key for key in header.tensors if key.startswith(prefix) and key not in known], title)
    return component(network, config, plan, whole=whole)


def check_known(path: Path, unknown: Sequence[str], title: str) -> None:
    """Raise ModelError if a file has `unknown` tensors, which the published model of this `title` has not."""
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if unknown[1:] else ""
        raise bad(path, f"holds unknown tensor '{clean(unknown[0], 100)}'{more}: not {title} as it is published")
