"""The contents of a converted folder: the weights of each component in files, and the small files beside them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import INDEX, has_index, model_index, read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad, is_file, open_regular
from qwenimg.common.base.text import clean
from qwenimg.common.families import repository
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.formats.files import MAX_SHARDS
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.formats.stored import DTYPES
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import QUANTIZATION, read_config
from qwenimg.common.quant.affine import Affine
from qwenimg.common.quant.block_float import BlockFloat
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.plan import Entry
from qwenimg.common.weights.storage import Dense, Packed, rotation_of
from qwenimg.common.weights.write import Weight, shards

SHARD = 2_000_000_000  # bytes of a file: the most that a continued run writes again
MAX_SMALL = 64 << 20  # bytes of a tokenizer's file
LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "LICENSE.TXT")


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvertedPart:
    """One component in the form in which it is written."""

    name: str  # the name of its folder
    stem: str  # of the names of its files
    shards: tuple[tuple[Weight, ...], ...]
    config: Mapping[str, object]
    source: str  # fingerprint of the files that its weights come from

    @property
    def files(self) -> list[str]:
        """The names of its files of weights."""
        count = len(self.shards)
        if count == 1:
            return [f"{self.stem}.safetensors"]
        return [f"{self.stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]

    @property
    def coded(self) -> bool:
        """True if weights are packed in words."""
        return any(_packed_code(weight) for shard in self.shards for weight in shard)


def parts(opened: OpenModel, dtype: str | None) -> list[ConvertedPart]:
    """Return the components of a model that was opened whole. Unquantized weights get `dtype`, or keep their file's."""
    networks, folders = {network.name: network for network in opened.family.networks}, opened.family.folders
    return [
        _part(folders.get(name, name), networks[component.network], component, dtype)
        for name, component in opened.checkpoint.components.items()
    ]


def _part(name: str, network: Network, component: Component, dtype: str | None) -> ConvertedPart:
    stored = network.manifest(component.config)
    weights = [
        Weight(network.published(key), stored[key], _kept(entry, dtype))
        for key, entry in component.plan.entries.items()
    ]
    most = max(SHARD, 2 * sum(weight.nbytes for weight in weights) // MAX_SHARDS)
    return ConvertedPart(
        name=name,
        stem="model" if network.key == "model_type" else "diffusion_pytorch_model",  # of transformers or diffusers
        shards=tuple(tuple(shard) for shard in shards(weights, most)),
        config=_config(network, component) | _quantization(weights),
        source=fingerprint(component.plan.files),
    )


def _kept(entry: Entry, dtype: str | None) -> Entry:
    """Return `entry` with the dtype to write. Raises UsageError for a LoRA on weights quantized in the file."""
    if isinstance(entry.storage, Packed):
        if entry.fused and entry.source.quant_storage is not None:
            shown = clean(entry.source.first.file.path.name, 60)
            raise UsageError(
                f"--lora: {shown} is quantized, and a LoRA is added before that; convert the original model"
            )
        return entry
    dense = DTYPES.get(entry.source.first.dtype, "bfloat16")  # of codes, and of a dtype with scales
    return replace(entry, storage=Dense(dtype or dense))


# Configurations


def _config(network: Network, component: Component) -> dict[str, object]:
    """Return the component's config.json without its quantization; if it has none, one made from its configuration."""
    folder = component.plan.files[0].path.parent
    with suppress(ModelError):
        if is_file(folder / "config.json") and read_config(network, folder) == component.config:
            return {key: v for key, v in read_json(folder / "config.json").items() if key not in QUANTIZATION}
    return network.written(component.config)


def _quantization(weights: list[Weight]) -> dict[str, object]:
    """Return mlx-lm's entries: the commonest code, layers with another one, and false for layers without one."""
    codes: dict[str, Affine | BlockFloat | None] = {}
    for weight in weights:
        code = _packed_code(weight)
        if len(weight.shape) == 2 or code is not None:
            codes[weight.key.removesuffix(".weight")] = code
    counts = Counter(code for code in codes.values() if code is not None)
    if not counts:
        return {}
    usual, _ = counts.most_common(1)[0]
    others = {layer: _code_fields(code) if code else False for layer, code in codes.items() if code != usual}
    return {key: {**_code_fields(usual), **others} for key in QUANTIZATION}


def _packed_code(weight: Weight) -> Affine | BlockFloat | None:
    """Return the code in which `weight` is written, if it is packed in words."""
    storage = weight.entry.storage
    return storage.code if isinstance(storage, Packed) and isinstance(storage.code, Affine | BlockFloat) else None


def _code_fields(code: Affine | BlockFloat) -> dict[str, object]:
    fields = {"group_size": code.group, "bits": code.bits, "mode": "affine" if isinstance(code, Affine) else code.mode}
    return fields | ({"rotation": rotation} if (rotation := rotation_of(code)) else {})


# Small files


def small_files(opened: OpenModel, prediction: str | None) -> dict[str, bytes]:
    """Return pipeline, scheduler, tokenizers and license by their paths in the folder. Raises ModelError."""
    source, checkpoint = opened.checkpoint.source, opened.checkpoint
    is_bare, index = not has_index(source), model_index(source)
    tables: dict[str, Any] = _of_family(opened) if is_bare else {}
    data_of: dict[str, bytes] = {}
    if not is_bare:
        weights = {name for group in opened.family.components for name in group}  # of a part that was left out, too
        for path in repository.used(source):
            inside = path.relative_to(source).as_posix()
            if inside.split("/")[0] not in weights:
                data_of[inside] = _read(path)
        data_of |= {name: _read(source / name) for name in LICENSES if is_file(source / name)}
        folders = [opened.family.folders.get(name, name) for name in checkpoint.components]
        tables[index.name] = _index(read_json(index), data_of, folders)
        if prediction is not None:
            scheduler = "scheduler/scheduler_config.json"
            fields = read_json(source / scheduler, infinities=True)
            tables[scheduler] = fields | {"prediction_type": checkpoint.scheduler.prediction_type}
    if opened.family.class_name is not None:
        tables[INDEX]["_class_name"] = opened.family.class_name(checkpoint)
    for name, tokenizer in checkpoint.tokenizers.items():
        folder = name.replace("text_encoder", "tokenizer")
        inside = tokenizer.path.name if tokenizer.path.parent == source else folder
        if not any(path.startswith(f"{inside}/") for path in data_of):  # it is elsewhere
            data_of |= {f"{folder}/{path.name}": _read(path) for path in _vocabulary(tokenizer.path)}
            if not is_bare:
                tables |= {path: data for path, data in _of_family(opened).items() if path.startswith(f"{folder}/")}
    return data_of | {path: as_json(data) for path, data in tables.items()}


def _of_family(opened: OpenModel) -> dict[str, dict[str, object]]:
    """Return the family's own small files, for a model that lacks them."""
    assert opened.family.small_files is not None
    return opened.family.small_files(opened.checkpoint)


def _vocabulary(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if repository.needed(f"tokenizer/{path.name}") and is_file(path)]


def _index(index: dict[str, object], files: Mapping[str, bytes], folders: Iterable[str]) -> dict[str, object]:
    """Return model_index.json without the parts that are not written, such as a safety checker."""
    there = {*folders, *(path.partition("/")[0] for path in files)}
    absent = [None, None]
    return {key: absent if isinstance(v, list) and len(v) == 2 and key not in there else v for key, v in index.items()}


def _read(path: Path) -> bytes:
    with closing(open_regular(path)) as file:
        if file.size > MAX_SMALL:
            raise bad(path, f"has {file.size} bytes; at most {MAX_SMALL} are copied")
        return file.read(0, file.size)


def as_json(data: object) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()
