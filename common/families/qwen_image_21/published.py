"""Qwen-Image-2.1 as it is published, for code that reads no weight: both models have the same configurations."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.base.config import parse
from qwenimg.common.families.qwen_image_21 import references, small_files
from qwenimg.common.families.qwen_image_21.checkpoint import NETWORKS
from qwenimg.common.families.qwen_image_21.known import BASE, TURBO
from qwenimg.common.parts.components import paper_checkpoint
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig

LEVELS: dict[str, tuple[float, ...]] = {"qwen-image-2.1": (), "qwen-image-2.1-turbo": small_files.TURBO}


def of_name(name: str) -> str:
    """Return the published model that a file or folder called `name` is of: Turbo if it says so."""
    return "qwen-image-2.1-turbo" if "turbo" in name.lower() else "qwen-image-2.1"


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    if (levels := LEVELS.get(name)) is None:
        return None
    config = parse(FlowMatchConfig, small_files.scheduler(levels), source=name)
    parts = {part: (network, network.config()) for part, network in NETWORKS.items()}
    return replace(paper_checkpoint(name, parts, replace(config, sample_sigmas=levels)), distilled=bool(levels))


def defaults(checkpoint: Checkpoint) -> Defaults:
    """Return the defaults: an image is a reference, and the run starts from noise."""
    usual = (TURBO if checkpoint.scheduler.sample_sigmas else BASE).usual
    steps = len(checkpoint.scheduler.sample_sigmas) or usual["steps"]
    return Defaults(**usual | {"steps": steps}, strength=1.0, mask_strength=0.8, edited=references.AREA)
