"""The file of an upscaler: which network it has, by its tensors alone, and its weights.

A file is safetensors, or what `torch.save` writes. Its tensors may be in a table of their own, `params_ema` or
`params`, as training programs write them; the first is the average over the training, and comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, closed_on_error
from qwenimg.common.formats.files import first
from qwenimg.common.formats.headers import open_weights
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.upscalers import rrdbnet, srvgg
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import Place, plan_places
from qwenimg.common.weights.plan import stored_uses

_NETWORKS: tuple[ModuleType, ...] = (rrdbnet, srvgg)
_FIRST = (
    "conv_first.weight",
    "model.0.weight",
    "body.0.weight",
)  # of each spelling: what is before it is a table's name
_AVERAGED = "params_ema."
# What a file of another network for pictures is, by one of its tensors.
_OTHERS = {
    "block_1.c1_r.sk.weight": "a SPAN upscaler",
    "unet1.conv1.conv.0.weight": "a Real-CUGAN upscaler",
    "feats.1.lk.conv.weight": "a PLKSR upscaler",
    "before_RG.1.weight": "a DAT upscaler",
    "layers.0.residual_group.blocks.0.conv_block.cab.0.weight": "a HAT upscaler",
    "layers.0.residual_group.td": "an ATD upscaler",
    "layers.0.residual_group.blocks.0.mlp.fc1.bias": "a SwinIR upscaler",
    "residual_layer.0.residual_layer.0.layer.0.fn.0.weight": "an OmniSR upscaler",
    "model.1.sub.0.RDB1.conv1x1.weight": "an ESRGAN+ upscaler",
    "stylegan_decoder.style_mlp.1.weight": "a GFPGAN model, which restores faces",
    "quantize.embedding.weight": "a CodeFormer model, which restores faces",
}
READ = "upscalers of the ESRGAN family are read (RRDBNet, and Real-ESRGAN's compact networks)"


@dataclass(frozen=True, kw_only=True)
class Upscaler:
    """An upscaler whose weights are not read yet. Its plan holds the file open."""

    path: Path
    kind: str  # the name of its network
    scale: int
    patch: int  # the sides of its picture are multiples of this
    component: Component

    @property
    def title(self) -> str:
        """Its network, scale and size: `RRDBNet, x4, 16.7 million parameters`."""
        count = self.component.plan.parameters
        return (
            f"{self.kind}, x{self.scale}, {f'{count / 1e6:.1f} million' if count >= 1e5 else f'{count:,}'} parameters"
        )

    def close(self) -> None:
        self.component.plan.close()


def open_upscaler(path: Path, what: Callable[[Header], str | None] = lambda header: None) -> Upscaler:
    """Return the upscaler in the file `path`, checked whole; no weight is read. Raises ModelError.

    what: names the kind of a file that is none, for the message."""
    header = open_weights(path)
    with closed_on_error(header.file):
        upscaler = _opened(header)
        if upscaler is None:
            other = _other(header) or what(header)
            is_what = (
                "is no upscaler that is read" if other is None else f"is {other}, which is not read as an upscaler"
            )
            raise bad(path, f"{is_what}; {READ}")
    return upscaler


def described(path: Path) -> str | None:
    """Return what the upscaler in the file `path` is, for `info`; None for a file that is none. Raises ModelError."""
    header = open_weights(path)
    with closing(header.file):
        upscaler = _opened(header)
        return None if upscaler is None else upscaler.title


def _opened(header: Header) -> Upscaler | None:
    """Return the upscaler in an open file; None in a file that is none. Raises ModelError. The caller closes the file
    after an error."""
    path, told = header.file.path, _network(header)
    if told is None:
        return None
    network, config, keys = told
    places = {name: Place(key) for key, name in keys.items()}
    manifest = network.manifest(config)
    missing, extra = manifest.keys() - places.keys(), places.keys() - manifest.keys()
    if missing or extra:
        fault = f"lacks tensor {first(sorted(missing))}" if missing else f"holds unknown tensor {first(sorted(extra))}"
        raise bad(path, f"{fault}: it is no whole {network.kind}")
    plan = plan_places(header, "upscaler", places, manifest, stored_uses(manifest))
    component = Component(network=network.name, role=network.role, config=config, plan=plan)
    patch = config.patch if isinstance(config, rrdbnet.RRDBNetConfig) else 1
    return Upscaler(path=path, kind=network.kind, scale=config.scale, patch=patch, component=component)


def _network(header: Header) -> tuple[Network, Any, Mapping[str, str]] | None:
    """Return the network of a file, its configuration, and the manifest's name of each key; None for another file.
    Raises ModelError."""
    for table in _tables(header.tensors):
        keys = [key for key in header.tensors if key.startswith(table)]
        for module in _NETWORKS:
            named = module.names(key.removeprefix(table) for key in keys)
            shapes = {name: header.tensors[table + key].shape for key, name in named.items()}
            try:
                config = module.config_of(shapes)
            except ModelError as error:
                raise bad(header.file.path, str(error)) from None
            if config is None:
                continue
            _check_names(header, [key for key in keys if key.removeprefix(table) not in named], named)
            return module.NETWORK, config, {table + key: name for key, name in named.items()}
    return None


def _check_names(header: Header, unknown: Iterable[str], named: Mapping[str, str]) -> None:
    """Raise ModelError for tensors that the network does not have, and for two of one name."""
    unknown = list(unknown)
    if unknown:
        other = _other(header)
        what = "" if other is None else f", so it is {other}, which is not read"
        raise bad(header.file.path, f"holds unknown tensor {first(unknown)}{what}")
    if len(set(named.values())) < len(named):
        raise bad(header.file.path, "holds a tensor under two names")


def _tables(keys: Iterable[str]) -> list[str]:
    """Return the starts of names that may be those of a table with a network, the best first."""
    starts = {key.removesuffix(name) for key in keys for name in _FIRST if key.endswith(name)}
    tables = [start for start in starts if start == "" or start.endswith(".")]
    return sorted(tables, key=lambda start: (start != _AVERAGED, start))


def _other(header: Header) -> str | None:
    """Return what a file of another network is, if it is known."""
    return next((what for name, what in _OTHERS.items() if any(key.endswith(name) for key in header.tensors)), None)
