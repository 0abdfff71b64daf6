"""Components from a folder or file: the configuration is read, and the headers are checked against its manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse, read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.networks.network import Network
from qwenimg.common.runtime.checkpoint import Component, TokenizerFiles
from qwenimg.common.weights import keys, part_names, quantize
from qwenimg.common.weights import on_paper as papers
from qwenimg.common.weights import plan as plans
from qwenimg.common.weights.plan import LoadPlan

QUANTIZATION = ("quantization", "quantization_config")
"""Fields in which MLX's tools write how weights are quantized. It is read from the tensors, which show it as well."""


def read_config(network: Network, folder: Path, refused: Mapping[str, str] | None = None) -> Any:
    """Read the configuration of `network` in `folder`. `refused` maps the start of a class name to the reason why it is
    not supported. Raises ModelError."""
    path = folder / "config.json"
    data = read_json(path)
    kind = str(data.get(network.key, network.kind))
    for start, reason in (refused or {}).items():
        if kind.startswith(start):
            raise ModelError(f"{clean(path)}: {reason}")
    if kind not in network.kinds and network.key == "_class_name":
        raise ModelError(f"{clean(path)}: is of class {clean(kind, 60)!r}; expected {network.kind!r}")
    _check_quantization(path, data)
    try:
        fields = network.fields({key: value for key, value in data.items() if key not in QUANTIZATION})
    except ModelError as error:
        raise ModelError(f"{clean(path)}: {error}") from None
    return parse(network.config, {**fields, **network.stated}, source=path, ignored=network.ignored)


def find_config(
    network: Network,
    folders: Sequence[Path],
    published: Callable[[], Any] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Any:
    """Return the configuration of `network` in the first of `folders` that has one, else the `published` one. Where
    that is None too, it has to be in the last of them. `refused` as for `read_config`. Raises ModelError."""
    source = next((folder for folder in folders if is_file(folder / "config.json")), None)
    if source is None and published is not None:
        return published()
    return read_config(network, source or folders[-1], refused)


def config_at(network: Network, path: Path, like: Any, refused: Mapping[str, str] | None = None) -> Any:
    """Return the configuration of `network` in the folder `path`; `like` for one without, and for a file. `refused` as
    for `read_config`. Raises ModelError."""
    return find_config(network, [path], lambda: like, refused)


def _check_quantization(path: Path, data: Mapping[str, object]) -> None:
    """Raise ModelError for weights that another program quantized in its own way."""
    for key in QUANTIZATION:
        table = data.get(key) or {}
        if not isinstance(table, Mapping):
            raise ModelError(f"{clean(path)}: '{key}' is {clean(table, 40)}; expected a table")
        if (method := table.get("quant_method")) is not None:
            raise ModelError(
                f"{clean(path)}: the weights are quantized by {clean(method, 40)!r}, which is not read; "
                "use the model's own weights, with -q for fewer bits"
            )


def component(network: Network, config: Any, plan: LoadPlan, *, for_rewrite: bool = False) -> Component:
    """Return `network` with the weights of `plan`. for_rewrite: to write them again, so that tables stay quantized."""
    stored = quantize.keep(plan, frozenset() if for_rewrite else network.tables)
    return Component(
        network=network.name,
        role=network.role,
        config=config,
        plan=stored,
        blocks=network.blocks,
        streamable=network.streamable,
        compiled=network.compiled,
        cached_blocks=network.cached_blocks(config) if network.cached_blocks else None,
        picture_input=network.picture_input,
    )


def on_paper(network: Network, config: Any, dtype: str) -> Component:
    """Return `network` with a plan of weights that are in no file here; the published ones are in `dtype`."""
    made = component(network, config, papers.plan(network.role, network.uses(config), dtype))
    return replace(made, reopen=lambda other, config: on_paper(other or network, config, dtype))


def is_absent(part: Component) -> bool:
    """Return whether `part` is a stand-in without files."""
    return not part.plan.files


def is_bare(folder: Path) -> bool:
    """Return whether the folder of a component has its configurations alone, as this package ships those of known
    models."""
    names = [path.name for path in folder.iterdir()] if is_folder(folder) else []
    return bool(names) and all(name.endswith(".json") and not name.endswith(".index.json") for name in names)


def open_tokenizer(path: Path, load: Callable[[Path], Any], config: Any) -> TokenizerFiles:
    """Return the tokenizer in the folder `path` for the text encoder of `config`; `load` reads it at its first use."""

    def read(folder: Path) -> Any:
        tokenizer = load(folder)
        tokenizer.check_vocabulary(config.vocab_size)
        return tokenizer

    return TokenizerFiles(path=path, read=read)


def given_twice(component: str, *paths: Path) -> UsageError:
    """Return the error for a text encoder that the user gives in two files."""
    names = " and ".join(clean(path.name, 60) for path in paths)
    return UsageError(f"--text-encoder: {names} are both the model's {component}; give one of them")


def renaming(network: Network, config: Any, rename: keys.Rename | None = None) -> keys.Rename:
    """Return the function from a name in a file, with the prefix of its part or without, to the manifest's; None for a
    tensor of another part, or of no use. rename: for the names without the prefix; the default is the network's."""
    names = rename or network.rename_for(config)

    def in_file(key: str) -> str | None:
        name = part_names.plain(network.role, key)
        return None if name is None else names(name)

    return in_file


def open_component(
    network: Network,
    path: Path,
    config: Any,
    title: str,
    rename: keys.Rename | None = None,
    *,
    for_rewrite: bool = False,
    beside: Path | None = None,
) -> Component:
    """Open `network` with the weights in the folder or file `path`, and in a second file `beside` it. title: the name
    in messages. rename: from a name in the file, without the prefix of its part, to the manifest's; the default is the
    network's. for_rewrite: plan all tensors as they are stored. Tensors that no forward uses may be missing. Raises
    ModelError."""
    manifest, used = network.manifest(config), network.uses(config)
    planned = plans.uses_for_export(manifest, used) if for_rewrite else used
    plan = keys.plan(
        path,
        title,
        manifest,
        uses=lambda stored: planned,
        rename=renaming(network, config, rename),
        architectures=network.architectures,
        channels_last=network.channels_last,
        optional=network.optional | frozenset(manifest.keys() - used.keys()),
        copies=network.copies,
        joins=network.joins(manifest),
        splits=network.splits(config),
        beside=beside,
    )
    made = component(network, config, plan, for_rewrite=for_rewrite)

    def reopen(other: Network | None, config: Any) -> Component:
        return open_component(other or network, path, config, title, beside=beside)

    return replace(made, reopen=reopen)
