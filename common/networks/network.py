"""The description of a network as data; each file of these rooms ends with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.shape import Manifest
from qwenimg.common.weights.joined import Joins
from qwenimg.common.weights.keys import Splits
from qwenimg.common.weights.plan import ParamUses, stored_uses

NETWORKS = "qwenimg.common.networks"
ROOMS = ("denoisers", "encoders", "vaes", "upscalers")


def import_network(package: str, name: str) -> ModuleType:
    """Load the module of network `name` below `package`: its description in common, or its forward on a backend."""
    paths = (f"{package}.{room}.{name}" for room in ROOMS)
    return import_module(next(path for path in paths if find_spec(path)))


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network of one of the rooms here, as data."""

    name: str  # the name of its file, here and in the backends
    role: str  # text, transformer or vae: the part whose precision it has
    kind: str  # the value of `key` in its config.json
    older_kind: str = ""  # the same in files of before the network had a class of its own
    key: str = "_class_name"
    config: type[Any]
    manifest: Callable[[Any], Manifest]  # from a config, every stored tensor
    # From a config and the stored tensors, those that the forward uses
    used: Callable[[Any, Manifest], ParamUses] = lambda config, stored: stored_uses(stored)
    # From a config.json, the fields of `config`
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda data: data
    stated: Mapping[str, Any] = field(default_factory=dict, hash=False)  # fields of `config` that no config.json states
    ignored: frozenset[str] = frozenset()  # keys of config.json without a meaning for the forward
    blocks: re.Pattern[str] | None = None  # weights of blocks that may stay quantized; a group: the block's number
    streamable: re.Pattern[str] | None = None  # weights that may be streamed; a group: the module whose call needs them
    compiled: re.Pattern[str] | None = None  # of a denoiser, the paths of the modules that are compiled one by one
    # From a denoiser's config, the blocks that a step cache skips
    cached_blocks: Callable[[Any], CachedBlocks] | None = None
    # Of a denoiser, the weight whose inputs a LoRA for control pictures widens; its config has `seeing` for that
    picture_input: str = ""
    # Of a denoiser, before the layers' names in LoRAs that are written here: what most programs read of its models.
    # One that ends in `_` stands for kohya's names, flat and with alpha
    lora_prefix: str = "transformer."
    # From the stored tensors, other numbers of inputs that LoRAs have for a weight
    lora_widths: Callable[[Manifest], Mapping[str, tuple[int, ...]]] = lambda stored: {}
    # From the stored tensors, those that only others of its models have, which LoRAs for them change too
    lacking: Callable[[Manifest], Manifest] = lambda stored: {}
    tables: frozenset[str] = frozenset()  # matrices that are looked up and not multiplied
    traced: tuple[Block, ...] = ()  # the kinds of its modules that are compared between backends
    architectures: frozenset[str] = frozenset()  # the architecture in the header of its GGUF files
    # From a stored name, of any program, the manifest's; None if it is not used
    rename: Callable[[str], str | None] = lambda key: key
    # From a config, `rename` for names that depend on its sizes
    renames: Callable[[Any], Callable[[str], str | None]] | None = None
    mflux_signs: tuple[str, ...] = ()  # starts of names that only mflux's files have
    channels_last: str = ""  # a part of names that only files have whose kernels have their channels last
    copies: frozenset[str] = frozenset()  # stored names of copies of other tensors, not read where those are stored too
    joins: Callable[[Manifest], Joins] = lambda manifest: {}  # from a manifest, parameters of several tensors
    splits: Callable[[Any], Splits] = lambda config: {}  # from a config, tensors of several parameters
    optional: frozenset[str] = frozenset()  # parameters that files may lack: the forward makes them
    published: Callable[[str], str] = lambda name: name  # from a name of the manifest, that in published files
    described: Callable[[Any], Mapping[str, object]] = lambda config: {}  # from a config, more keys of config.json

    def __post_init__(self) -> None:
        assert self.role != "transformer" or self.compiled, f"{self.name} names no modules to compile"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The values of `key` in its config.json."""
        return (self.kind, self.older_kind) if self.older_kind else (self.kind,)

    def rename_for(self, config: Any) -> Callable[[str], str | None]:
        """Return the function from a stored name to the manifest's of this `config`."""
        return self.renames(config) if self.renames else self.rename

    def uses(self, config: Any) -> ParamUses:
        """Return the tensors that the forward uses."""
        return self.used(config, self.manifest(config))

    def written(self, config: Any) -> dict[str, object]:
        """Return the config.json of a model that comes without one."""
        stored = {one.name for one in fields(config) if one.metadata.get("in_files", True)}
        known = {name: value for name, value in asdict(config).items() if name in stored}
        return {self.key: self.kind, **known, **self.described(config)}
