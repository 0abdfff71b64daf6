"""Transformers in files with their authors' names: the prefixes of these names, and how such a file is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from qwenimg.common.base.safe_files import bad, closed_on_error, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.formats import gguf
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import open_header, peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import component, open_component, read_config
from qwenimg.common.parts.ldm_configs import Shapes, behind
from qwenimg.common.parts.ldm_keys import Places
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights import left_out
from qwenimg.common.weights.keys import Place, check_architecture, plan_places
from qwenimg.common.weights.part_names import DENOISERS, plain

Layers: TypeAlias = Mapping[str, str | Place]
"""The authors' names by those of diffusers, or places of layers that are not one tensor there."""
QKV = ((0, "q"), (1, "k"), (2, "v"))
"""Layers of attention in the order of their rows in one tensor of the authors'."""
# Tensors that the file of a whole model may have beside its parts: ends of names, and starts
_BESIDE = (".logit_scale", ".embeddings.position_ids", "scaled_fp8", "spiece_model", ".encoder.embed_tokens.weight")
_OF_TRAINING = ("first_stage_model.loss.", "first_stage_model.model_ema.", "model_ema.")


def prefix_of(names: Collection[str], sign: str) -> str | None:
    """Return the first prefix of a denoiser's names with which `sign` is one of `names`; None if there is none."""
    return next((prefix for prefix in DENOISERS if prefix + sign in names), None)


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
    behind_prefix = (key for key in header.tensors if key.startswith(prefix) and plain("transformer", key) is not None)
    check_known(header.file.path, [key for key in behind_prefix if key not in known], title)
    return component(network, config, plan, whole=whole)


@dataclass(frozen=True, kw_only=True)
class TransformerFile:
    """A family's transformer in one file, with its authors' names behind a prefix or with diffusers'."""

    network: Network
    title: str  # the model's, for messages
    sign: str  # a tensor that no other model has, in its authors' names
    diffusers_sign: str  # a tensor that no other model has, in diffusers' names
    place: Callable[[str], Place]  # of a parameter, in its authors' names
    # The configuration for the shapes in a file; fields that shapes do not show are those of another configuration. The
    # last argument maps a name of diffusers to the file's. Raises ModelError
    config: Callable[[Path, Shapes, Any, Callable[[str], str]], Any]

    def prefix(self, names: Collection[str]) -> str | None:
        """Return the prefix of its authors' names among `names`; None without them."""
        return prefix_of(names, self.sign)

    def reads(self, header: Header) -> bool:
        """Return whether a file with this header has the transformer."""
        known = self.prefix(header.tensors) is not None or self.diffusers_sign in header.tensors
        return known and gguf.may_be(header, self.network.architectures)

    def shape(self, path: Path, name: str) -> tuple[int, ...] | None:
        """Return the shape of a parameter in a folder or file, by its name in diffusers; None if it is not there.
        Raises ModelError."""
        for file in find_files(path).files:
            tensors = peek(file).tensors
            prefix = self.prefix(tensors)
            key = name if prefix is None else prefix + self.place(name).key
            if key in tensors:
                return tensors[key].shape
        return None

    def open(self, path: Path, like: Any, *, whole: bool = False) -> Component:
        """Open the transformer in a folder, or in a file, alone or with a whole model. Its sizes are those of the
        file; `like` has the fields that no tensor shows. Raises ModelError."""
        network, title = self.network, "transformer"
        if is_folder(path):
            return open_component(network, path, read_config(network, path), title, whole=whole)
        header = open_header(path)
        with closed_on_error(header.file):
            check_architecture(header, network.architectures, title)
            prefix = self.prefix(header.tensors)
            if prefix is not None:
                config = self.config(path, behind(header, prefix), like, lambda name: self.place(name).key)
                return open_transformer(header, prefix, network, config, self.place, self.title, whole=whole)
            if self.diffusers_sign not in header.tensors:
                raise bad(path, f"holds no transformer of {self.title}, by its authors' names or diffusers'")
            config = self.config(path, behind(header, ""), like, lambda name: name)
        header.file.close()
        return open_component(network, path, config, title, whole=whole)


def count_blocks(shapes: Shapes, *starts: str) -> int:
    """Return the number of blocks whose names begin with one of `starts`."""
    return len({key.split(".")[1] for key in shapes if key.startswith(starts)})


def place_of(layers: Layers, name: str) -> Place:
    """Return the place of a layer."""
    there = layers[name]
    return there if isinstance(there, Place) else Place(there)


def layers(place: Callable[[str], Place], paths: Iterable[str]) -> dict[str, list[Place]]:
    """Map the path of each layer to its place in one with its authors' name, by `place` of its weight."""
    places = {path: place(f"{path}.weight") for path in paths}
    return {path: [there._replace(key=there.key.removesuffix(".weight"))] for path, there in places.items()}


def check_whole(header: Header, parts: Iterable[Component], title: str, others: Iterable[str] = ()) -> None:
    """Raise ModelError if the file of a model holds a tensor that belongs to none of its `parts`, unless its name
    starts with one of `others`."""
    known, starts = {key for part in parts for key in part.plan.known}, (*_OF_TRAINING, *others)
    unknown = [
        key for key in header.tensors if key not in known and not key.endswith(_BESIDE) and not key.startswith(starts)
    ]
    check_known(header.file.path, unknown, title)


def check_known(path: Path, unknown: Sequence[str], title: str) -> None:
    """Raise ModelError if a file has `unknown` tensors, which the published model of this `title` has not, but for
    those that are left out of every model."""
    unknown = [key for key in unknown if left_out.kind(key) is None]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if unknown[1:] else ""
        raise bad(path, f"holds unknown tensor '{clean(unknown[0], 100)}'{more}: not {title} as it is published")
