"""The texts in the header of a LoRA: those that other programs read, and `qwenimg.run`, one JSON object on how it was
made. No path is among them, and a caption only where its owner asks for it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean

RUN = "qwenimg.run"
MAX_RUN = 1 << 16  # bytes
_MODELSPEC = "modelspec."
Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"


@dataclass(frozen=True, kw_only=True)
class LoraBase:
    """The model that a LoRA is for, by the names that trainers write."""

    architecture: str  # of modelspec, such as stable-diffusion-xl-v1-base
    version: str  # of sd-scripts, such as sdxl_base_v1-0
    v2: bool = False  # whether it is a Stable Diffusion 2, as sd-scripts says it


def made(
    base: LoraBase,
    *,
    title: str,
    rank: int | None,
    run: Mapping[str, Json],
    trigger: str = "",
    resolution: tuple[int, int] | None = None,
) -> dict[str, str]:
    """Return the metadata of a LoRA whose scale is 1. rank: None if its layers have several. run: how it was made."""
    dim = "Dynamic" if rank is None else str(rank)
    texts = {
        "format": "pt",
        f"{_MODELSPEC}sai_model_spec": "1.0.0",
        f"{_MODELSPEC}architecture": f"{base.architecture}/lora",
        f"{_MODELSPEC}implementation": "diffusers",
        f"{_MODELSPEC}title": title,
        f"{_MODELSPEC}date": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()),
        "ss_network_module": "networks.lora",
        "ss_network_dim": dim,
        "ss_base_model_version": base.version,
        "ss_v2": str(base.v2),
        RUN: json.dumps(run, ensure_ascii=False, sort_keys=True),
    }
    if rank is not None:  # of several ranks none is the alpha of all
        texts["ss_network_alpha"] = dim
    if trigger:
        texts[f"{_MODELSPEC}trigger_phrase"] = trigger
    if resolution is not None:
        texts[f"{_MODELSPEC}resolution"] = f"{resolution[0]}x{resolution[1]}"
    return texts


def trigger(metadata: Mapping[str, str]) -> str:
    """Return the words that call a LoRA in a prompt; "" if its header has none."""
    return metadata.get(f"{_MODELSPEC}trigger_phrase", "")


# Reading

_FOREIGN = {
    "ss_output_name": "name",
    "ss_sd_model_name": "base",
    "ss_num_train_images": "pictures",
    "ss_num_epochs": "epochs",
    "ss_steps": "steps",
    "ss_max_train_steps": "of at most",
    "ss_learning_rate": "rate",
    "ss_unet_lr": "rate of the UNet",
    "ss_resolution": "size",
    "ss_optimizer": "optimizer",
}
"""What sd-scripts and its kin write, and the word for it; `None` stands for nothing there."""


def lines(metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield lines for `qwenimg info`: the base, the words that call the LoRA, and how it was made."""
    spec = [metadata.get(_MODELSPEC + key, "") for key in ("title", "architecture", "date")]
    if any(spec):
        yield f"made: {', '.join(clean(one, 80) for one in spec if one)}"
    if words := trigger(metadata):
        yield f"words that call it: {clean(words, 200)}"
    if run := read_run(metadata):
        shown = (f"{clean(key, 40)} {_shown(value)}" for key, value in run.items() if value not in (None, "", [], {}))
        yield f"run: {', '.join(shown)}"
        return
    found = {word: metadata[key] for key, word in _FOREIGN.items() if metadata.get(key, "None") not in ("None", "")}
    if found:
        yield f"trained: {', '.join(f'{word} {clean(value, 80)}' for word, value in found.items())}"
    if tags := _frequent(metadata.get("ss_tag_frequency", "")):
        yield f"frequent words of its captions: {', '.join(clean(tag, 40) for tag in tags)}"


def read_run(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the object of `qwenimg.run`; an empty one if there is none, or one that is not read."""
    return _object(metadata.get(RUN, ""), MAX_RUN, 6)


def _object(text: str, most: int, depth: int) -> dict[str, object]:
    raw = text.encode(errors="replace")
    if not raw or len(raw) > most:
        return {}
    try:
        data = strict_json(raw, RUN, depth=depth, values=20_000)
    except ModelError:
        return {}
    return data if isinstance(data, dict) else {}


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "(" + "; ".join(_shown(one) for one in value[:8]) + ("; …)" if len(value) > 8 else ")")
    if isinstance(value, dict):
        return " ".join(f"{clean(key, 30)} {_shown(one)}" for key, one in value.items())
    return f"{value:g}" if isinstance(value, float) else clean(value, 80)


def _frequent(text: str, most: int = 8) -> list[str]:
    """Return the tags that sd-scripts counted most, {folder: {tag: count}}."""
    counts: dict[str, int] = {}
    for tags in _object(text, 1 << 20, 3).values():
        for tag, count in tags.items() if isinstance(tags, dict) else ():
            counts[tag] = counts.get(tag, 0) + (count if isinstance(count, int) else 0)
    return sorted(counts, key=lambda tag: -counts[tag])[:most]
