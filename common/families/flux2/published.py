"""Flux.2 klein as it is published, for code that reads no weight: two sizes, each distilled and not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from qwenimg.common.base.config import parse
from qwenimg.common.base.hf_cache import told_name
from qwenimg.common.families.flux2.known import BASE_4B, KLEIN_4B
from qwenimg.common.families.flux2.networks import NETWORKS, TAPS
from qwenimg.common.families.flux2.small_files import SCHEDULER
from qwenimg.common.families.flux2.transformer_file import FILE
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.networks.vaes.flux2_vae import Flux2VAEConfig
from qwenimg.common.parts.components import paper_checkpoint
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig


class Klein(NamedTuple):
    transformer: Flux2Config
    text_encoder: Qwen3Config
    distilled: bool


def _klein(layers: int, singles: int, heads: int, text: Qwen3Config) -> Flux2Config:
    return Flux2Config(
        num_layers=layers,
        num_single_layers=singles,
        num_attention_heads=heads,
        joint_attention_dim=len(TAPS) * text.hidden_size,
        guidance_embeds=False,
    )


def variants() -> dict[str, Klein]:
    """Return the published models, by name."""
    small, large = Qwen3Config(), Qwen3Config(hidden_size=4096, intermediate_size=12288)
    sizes = {"4b": (_klein(5, 20, 24, small), small), "9b": (_klein(8, 24, 32, large), large)}
    return {
        f"flux2-klein-{kind}{size}": Klein(*parts, distilled)
        for kind, distilled in (("", True), ("base-", False))
        for size, parts in sizes.items()
    }


def model_of(transformer: Path) -> str:
    """Return the name of the published model that the transformer in a folder or file is of: of the size that its width
    is nearer to, and distilled unless its name says `base`. Raises ModelError."""
    small, large = variants()["flux2-klein-4b"].transformer, variants()["flux2-klein-9b"].transformer
    width, *_ = FILE.shape(transformer, "x_embedder.weight") or (small.dim,)
    size = "4b" if width - small.dim < large.dim - width else "9b"
    return f"flux2-klein-{'base-' if 'base' in told_name(transformer).lower() else ''}{size}"


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    variant = variants().get(name)
    if variant is None:
        return None
    configs = {
        "transformer": variant.transformer,
        "text_encoder": replace(variant.text_encoder, taps=TAPS),
        "vae": Flux2VAEConfig(),
    }
    parts = {part: (network, configs[part]) for part, network in NETWORKS.items()}
    levels = parse(FlowMatchConfig, SCHEDULER, source=name)
    return replace(paper_checkpoint(name, parts, levels), distilled=variant.distilled)


def defaults(distilled: bool) -> Defaults:
    """Return the defaults: an image is a reference, and the run starts from noise."""
    return Defaults(**(KLEIN_4B if distilled else BASE_4B).usual, strength=1.0, mask_strength=0.8)
