"""Qwen-Image as it is published, for code that reads no weight."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.config import parse
from qwenimg.common.families.qwen_image.checkpoint import networks
from qwenimg.common.families.qwen_image.small_files import SCHEDULER
from qwenimg.common.families.qwen_image.variants import EDIT, EDIT_2509, EDIT_2511, LAYERED, TEXT, published_config
from qwenimg.common.parts.components import absent_tokenizer, on_paper
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig

KINDS = {
    "qwen-image": TEXT,
    "qwen-image-2512": TEXT,
    "qwen-image-edit": EDIT,
    "qwen-image-edit-2509": EDIT_2509,
    "qwen-image-edit-2511": EDIT_2511,
    "qwen-image-layered": LAYERED,
}


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    if (kind := KINDS.get(name)) is None:
        return None
    configs = {part: published_config(network, kind) for part, network in networks(kind).items()}
    return Checkpoint(
        source=Path(name),
        components={part: on_paper(network, configs[part], "bfloat16") for part, network in networks(kind).items()},
        tokenizers={"text_encoder": absent_tokenizer(name)},
        scheduler=parse(FlowMatchConfig, SCHEDULER, source=name),
        variant=kind.name,
    )
