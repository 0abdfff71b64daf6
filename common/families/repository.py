"""The files that a model's repository must have, and those that are pulled.

It is in diffusers layout, or in another program's that a family reads: parts with weights, without configurations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.base.config import INDEX, MODULAR_INDEX
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.formats.files import STEMS, find_files

if TYPE_CHECKING:
    from qwenimg.common.families.family import Family

_ALWAYS = (INDEX, "scheduler/scheduler_config.json")
PROCESSOR = "processor"
"""The folder of the processor: some models have their tokenizer there, beside the settings of their patches."""
_OF_OTHERS = ("model.safetensors.index.json", "model.safetensors", "0.safetensors")  # one shows that a part is there
_BESIDE = re.compile(
    r"effnet_encoder\.safetensors|(modular_)?model_index\.json|scheduler/scheduler_config\.json"
    r"|processor/((preprocessor_config|chat_template)\.json|chat_template\.jinja)"
    r"|((t5_)?tokenizer(_\d)?|processor|text_encoder)/((tokenizer|vocab|tokenizer_config|added_tokens|special_tokens_map)\.json|merges\.txt|spiece\.model)"
)
# A dot within the name of a weight file marks a variant (fp16), which is not used.
_OF_COMPONENT = re.compile(r"config\.json|[A-Za-z0-9_-]{1,100}\.safetensors(\.index\.json)?")


def needed(filename: str) -> bool:
    """Return whether the program uses the file `filename` of a repository: no variant, no pickle, no Python."""
    from qwenimg.common.families import registry  # which imports every family

    folder, _, name = filename.rpartition("/")
    if any(folder in group for family in registry.FAMILIES for group in family.components):
        return (_OF_COMPONENT.fullmatch(name) or _BESIDE.fullmatch(filename)) is not None
    return _BESIDE.fullmatch(filename) is not None


def used(folder: Path) -> list[Path]:
    """Return the files in `folder` that the program uses, in the order of their names."""
    return [path for path in sorted(folder.rglob("*")) if needed(path.relative_to(folder).as_posix())]


def components(has: Callable[[str], bool]) -> list[str]:
    """Return a model's folders with weights: of each group the folders that are there, or else the first. `has` returns
    whether a file is there."""
    folders: list[str] = []
    for group in _family(has).components:
        folders += [part for part in group if has(f"{part}/config.json")] or group[:1]
    return folders


def in_other_layout(has: Callable[[str], bool]) -> Family | None:
    """Return the family that may read the model as another program saved it, by the folders of its parts, or None."""
    from qwenimg.common.families import registry

    for family in registry.FAMILIES if not any(map(has, (*_ALWAYS, MODULAR_INDEX))) else ():
        groups = [[f"{part}/{name}" for part in group for name in _OF_OTHERS] for group in family.components]
        if family.networks[0].mflux_signs and all(any(map(has, group)) for group in groups):
            return family
    return None


def _family(has: Callable[[str], bool]) -> Family:
    """Return the family with the fewest missing components, and of these the one with the most folders that are there,
    if possible one whose denoiser is there: a listing has no class name."""
    from qwenimg.common.families import registry

    def lacking(family: Family) -> tuple[int, int]:
        there = [[has(f"{part}/config.json") for part in group] for group in family.components]
        return sum(not any(group) for group in there), -sum(map(sum, there))

    likely = [family for family in registry.FAMILIES if has(f"{family.components[0][0]}/config.json")]
    return min(likely or [next(iter(registry.FAMILIES))], key=lacking)


def required(has: Callable[[str], bool]) -> list[str]:
    """Return the files that a model must have under one name."""
    if in_other_layout(has):
        return []
    always = (MODULAR_INDEX,) if has(MODULAR_INDEX) and not has(INDEX) else _ALWAYS
    return [*always, *(f"{part}/config.json" for part in components(has))]


def lacks(folder: Path, without: frozenset[str] = frozenset()) -> str | None:
    """Return the first file that `folder` needs and lacks, except the weights of the components `without`. Raises
    ModelError for a broken index of shards."""

    def has(name: str) -> bool:
        return is_file(folder / name)

    parts = components(has)
    names = required(has)
    for tokenizer in (part.replace("text_encoder", "tokenizer") for part in parts if part.startswith("text_encoder")):
        if not is_folder(folder / tokenizer):
            tokenizer = PROCESSOR if is_folder(folder / PROCESSOR) else _beside_weights(folder, tokenizer)
        if in_other_layout(has) and not is_folder(folder / tokenizer):
            continue  # another folder may have it
        alone = any(has(f"{tokenizer}/{name}") for name in ("tokenizer.json", "spiece.model"))
        names += [] if alone else [f"{tokenizer}/vocab.json", f"{tokenizer}/merges.txt"]
    for name in names:
        if not has(name):
            return name
    for component in (part for part in parts if part not in without):
        missing = _lacks_weights(folder / component)
        if missing:
            return f"{component}/{missing}"
    return None


def _beside_weights(folder: Path, tokenizer: str) -> str:
    """Return the folder of the text encoder if its vocabulary is there, else that of the `tokenizer`."""
    part = tokenizer.replace("tokenizer", "text_encoder")
    return part if any(is_file(folder / part / name) for name in ("tokenizer.json", "vocab.json")) else tokenizer


def has_weights(folder: Path) -> bool:
    """Return whether `folder` has any weights of a component, and not only the small files of a model."""
    return any(path.suffix == ".safetensors" for path in used(folder))


def _lacks_weights(folder: Path) -> str | None:
    try:
        files = find_files(folder).files
    except ModelError:
        if any(is_file(folder / f"{stem}.safetensors{end}") for stem in STEMS for end in ("", ".index.json")):
            raise
        return "*.safetensors"
    return next((file.name for file in files if not is_file(file)), None)
