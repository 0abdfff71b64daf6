"""Qwen-Image as it is published, for code that reads no weight: both models have the same configurations."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.config import parse
from qwenimg.common.families.qwen_image.small_files import SCHEDULER
from qwenimg.common.networks import qwen_dit, qwen_vae, qwen_vl
from qwenimg.common.parts.components import absent_tokenizer, on_paper
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig

NAMES = ("qwen-image", "qwen-image-2512")


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    if name not in NAMES:
        return None
    networks = {"transformer": qwen_dit.NETWORK, "text_encoder": qwen_vl.NETWORK, "vae": qwen_vae.NETWORK}
    return Checkpoint(
        source=Path(name),
        components={part: on_paper(network, network.config(), "bfloat16") for part, network in networks.items()},
        tokenizers={"text_encoder": absent_tokenizer(name)},
        scheduler=parse(FlowMatchConfig, SCHEDULER, source=name),
    )
