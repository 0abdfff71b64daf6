"""Qwen-Image as it is published, for code that reads no weight."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.base.config import parse
from qwenimg.common.families.qwen_image.checkpoint import networks
from qwenimg.common.families.qwen_image.small_files import SCHEDULER
from qwenimg.common.families.qwen_image.variants import EDIT, EDIT_2509, EDIT_2511, LAYERED, TEXT, published_config
from qwenimg.common.parts.components import paper_checkpoint
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
    parts = {part: (network, published_config(network, kind)) for part, network in networks(kind).items()}
    levels = parse(FlowMatchConfig, SCHEDULER, source=name)
    return replace(paper_checkpoint(name, parts, levels), variant=kind.name)
