"""What `qwenimg info` prints of a model's folder or file: from configurations and headers alone, broken or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.base.text import clean
from qwenimg.common.families import registry, repository
from qwenimg.common.families.components import read_config
from qwenimg.common.families.stable_diffusion import single_file
from qwenimg.common.families.stable_diffusion.single_file import Prediction
from qwenimg.common.weights.files import find_files
from qwenimg.common.weights.safetensors import Stored, read_header

SHOWN = 5  # names of a kind

# Layouts by a key that only they have; the first match counts.
_LAYOUTS = (
    ("lora_", "LoRA (not supported yet)"),
    ("model.diffusion_model.transformer_blocks.", "Qwen-Image transformer, ComfyUI prefix (not supported yet)"),
    ("transformer_blocks.0.img_mod.1.weight", "Qwen-Image transformer, diffusers names"),
    ("decoder.up_blocks.0.resnets.0.norm1.gamma", "Qwen-Image VAE, diffusers names"),
    ("visual.", "Qwen2.5-VL, transformers names"),
    ("down_blocks.", "a UNet or VAE, diffusers names (a VAE goes with --vae)"),
)


@dataclass(frozen=True, kw_only=True)
class Description:
    """Lines to print, and the faults: what does not fit together."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def describe(path: Path, prediction: Prediction | None = None) -> Description:
    """Of a folder in diffusers layout, one component's folder, or one safetensors file; `prediction` overrides what a
    Stable Diffusion file seems to predict. Raises ModelError where nothing can be said at all."""
    if is_folder(path) and is_file(path / "model_index.json"):
        return _folder(path)
    if is_folder(path) and is_file(path / "config.json"):
        return _component(path)
    return _file(path, prediction)


def _folder(folder: Path) -> Description:
    whole = Description(lines=["layout: diffusers folder"])
    try:
        family = registry.of_folder(folder)
        whole.lines.append(f"pipeline: {family.described(folder)}")
    except ModelError as error:
        whole.faults.append(str(error))
        return whole
    for name in repository.components(lambda name: is_file(folder / name)):
        try:
            part = _component(folder / name)
        except ModelError as error:
            whole.faults.append(str(error))
            continue
        whole.lines.extend(part.lines)
        whole.faults.extend(part.faults)
    if not whole.faults:
        whole.faults.extend(_other_faults(folder))
    return whole


def _other_faults(folder: Path) -> list[str]:
    """What only shows when everything is opened together: components that do not fit, tokenizer, scheduler."""
    try:
        opened = registry.open_model(folder)
        opened.checkpoint.close()
        opened.family.check(opened.checkpoint)
        opened.checkpoint.read_tokenizers()
    except ModelError as error:
        return [str(error)]
    return []


def _component(folder: Path) -> Description:
    """One component against the manifest of its configuration."""
    manifest, rename = _expected(folder)
    tensors = _tensors(find_files(folder).files)
    named: dict[str, Stored] = {}
    unused = 0
    for key, stored in tensors.items():
        name = rename(key)
        unused += name is None
        if name is not None:
            named[name] = stored
    part = Description(lines=[_summary(folder.name, named)])
    if unused:
        part.lines.append(f"{folder.name}: known and not needed: {counted(unused, 'tensor')}")
    shapes = {name: stored.shape for name, stored in named.items()}
    for kind, names in _differences(shapes, manifest):
        part.faults.append(f"{folder.name}: {len(names)} {kind}: {_listed(names)}")
    return part


def _expected(folder: Path) -> tuple[Manifest, Callable[[str], str | None]]:
    """The manifest of the component in `folder`, by its configuration, and the renaming of its keys."""
    path = folder / "config.json"
    data = read_json(path)
    networks = [network for family in registry.FAMILIES for network in family.networks]
    for network in networks:
        if data.get(network.key) == network.kind:
            return network.manifest(read_config(network, folder)), network.rename or _same
    if folder.name == "text_encoder":  # some are stored without a type
        network = next(network for network in networks if network.role == "text")
        return network.manifest(read_config(network, folder)), network.rename or _same
    kind = data.get("_class_name", data.get("model_type"))
    raise ModelError(f"{clean(path)}: a {clean(kind, 60)!r} is not a component that this version knows")


def _file(path: Path, prediction: Prediction | None) -> Description:
    tensors = _tensors(find_files(path).files)
    if is_file(path) and single_file.is_single_file(tensors):
        return _single_file(path, tensors, prediction)
    layout = next((text for key, text in _LAYOUTS if any(key in name for name in tensors)), "unknown")
    return Description(lines=[f"layout: {layout}", _summary("file", tensors), f"first tensors: {_listed(tensors)}"])


def _single_file(path: Path, tensors: Mapping[str, Stored], prediction: Prediction | None) -> Description:
    """Its type and the reasons for it, its models, and what does not fit."""
    whole = Description(lines=["layout: Stable Diffusion, single file", _summary("file", tensors)])
    try:
        header = read_header(path)
        header.file.close()
        whole.lines[1:1] = single_file.detect(header, prediction).reasons
        opened = single_file.open_file(path, prediction)
    except ModelError as error:
        whole.faults.append(str(error))
        return whole
    opened.close()
    for name, plan in opened.plans.items():
        whole.lines.append(f"{name}: {counted(len(plan.entries), 'tensor')}, {plan.parameters / 1e6:,.1f} M parameters")
    if opened.ignored:
        whole.lines.append(f"known and not needed: {counted(opened.ignored, 'tensor')}")
    return whole


def _tensors(files: Iterable[Path]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for path in files:
        header = read_header(path)
        header.file.close()
        found.update(header.tensors)
    return found


def _summary(name: str, tensors: Mapping[str, Stored]) -> str:
    dtypes = Counter(stored.dtype for stored in tensors.values())
    parameters = sum(prod(stored.shape) for stored in tensors.values())
    size = sum(stored.end - stored.begin for stored in tensors.values())
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
    count = counted(len(tensors), "tensor")
    return f"{name}: {count} ({kinds}), {parameters / 1e6:,.1f} M parameters, {size_text(size)}"


def _differences(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[tuple[str, list[str]]]:
    common = found.keys() & expected.keys()
    kinds = (
        ("missing", sorted(expected.keys() - found.keys())),
        ("extra", sorted(found.keys() - expected.keys())),
        ("of another shape", sorted(name for name in common if tuple(found[name]) != expected[name])),
    )
    return [(kind, names) for kind, names in kinds if names]


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(clean(name, 80) for name in every[:SHOWN]) + more


def _same(key: str) -> str | None:
    return key
