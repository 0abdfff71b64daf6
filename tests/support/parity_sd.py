"""Every kind of block of Stable Diffusion's UNet and VAE, described once for both backends and float64, as
`parity_blocks` does for Qwen-Image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch

from qwenimg.common.families.stable_diffusion.family import KIND
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.parity import parity
from qwenimg.common.precision.precision import Precision, bases
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import stored_uses
from support.parity_bench import Bench
from support.parity_blocks import FAMILIES, KINDS, Block
from support.parity_cases import weights
from support.parity_verdict import Verdict, judge
from support.policies import parse
from support.sd_models import MLX, PUBLISHED, TORCH, VAE_PUBLISHED, ExactSinusoids, Side, unet_config, vae_config

UNET = unet_config(
    PUBLISHED["SDXL base"]
    | {
        "block_out_channels": [32, 64, 96],
        "norm_num_groups": 8,
        "attention_head_dim": [2, 4, 6],
        "layers_per_block": 1,
        "transformer_layers_per_block": [1, 1, 2],
        "cross_attention_dim": 72,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 40 + 6 * 8,
    }
)
VAE = vae_config(VAE_PUBLISHED | {"block_out_channels": [16, 32, 48, 48], "norm_num_groups": 8, "layers_per_block": 1})

BASES = bases(KIND)
POLICIES: Mapping[str, tuple[Precision, ...]] = {
    "unet": tuple(BASES.values()),
    "vae": (BASES["fp32"], *(parse(f"bf16,vae={low}", on_gpu=False, kind=KIND) for low in ("bf16", "fp16"))),
}
MARGIN = 3.0  # between a recorded K and the limit in float32
# The larger K of both backends on normal inputs of unit variance, in float32 and in bfloat16 (the base bf16; the VAE
# with vae=bf16). MLX's CPU adds the sums of a group norm one by one, which is most of what it has more than torch.
RECORDED: dict[str, tuple[float, float]] = {
    "unet.time": (2.40, 0.66),
    "unet.residual": (7.82, 1.30),
    "unet.shortcut": (3.91, 0.66),
    "unet.tokens": (4.68, 0.69),
    "unet.transformer": (3.47, 0.59),
    "unet.down": (3.24, 0.58),
    "unet.plain_down": (4.14, 0.70),
    "unet.mid": (2.86, 0.49),
    "unet.up": (2.94, 0.46),
    "unet.plain_up": (3.64, 0.53),
    "unet.head": (5.27, 0.88),
    "unet.model": (3.12, 0.46),
    "kl.residual": (7.48, 1.52),
    "kl.shortcut": (3.98, 0.91),
    "kl.attention": (5.87, 1.47),
    "kl.mid": (4.23, 1.05),
    "kl.up": (4.53, 0.81),
    "kl.down": (3.85, 0.81),
    "kl.encoder": (3.57, 0.97),
    "kl.decoder": (4.52, 1.00),
}


@dataclass(frozen=True, kw_only=True)
class SDBlock(Block):
    def case(self, precision: Precision, family: str) -> parity.Case:
        recorded = RECORDED.get(self.name)
        case = super().case(precision, family)
        return replace(case, k=MARGIN * recorded[0]) if recorded and case.dtype == "float32" else case

    @property
    def judged(self) -> tuple[str, ...]:
        """The families of inputs that are judged. Of near-constant ones a group norm subtracts a mean ten times their
        deviation, where torch and MLX sum differently: these are told only. The encoder makes such of dark pictures,
        and no sinusoid is beyond 1."""
        told = {"near-constant"} | {"kl.encoder": {"std 0.03"}, "unet.time": {"x 1000", "one outlier"}}.get(
            self.name, set()
        )
        return tuple(family for family in FAMILIES if family not in told)

    def on(self, twin: Side, component: object, precision: Precision, values: dict[str, np.ndarray]):
        arrays = {}
        for name, (kind, _) in self.inputs.items():
            arrays[name] = twin.array(values[name], kind_dtype(kind, precision, self.part))
        with torch.inference_mode():
            made = self.run(component, SimpleNamespace(**arrays, twin=twin))
        parts = made if isinstance(made, (tuple, list)) else (made,)
        return [parity.Output(values=twin.numpy(part), dtype=parity.dtype_name(part)) for part in parts]


def kind_dtype(kind: str, precision: Precision, part: str) -> str:
    return KINDS["wide" if kind == "table" else kind](precision, part)


class SDFiles:
    """Random checkpoints of both parts, stored in one dtype."""

    def __init__(self, folder: Path, stored: str):
        self.plans = {}
        manifests = {"unet": unet.manifest(UNET), "vae": kl_vae.manifest(VAE)}
        for seed, (part, manifest) in enumerate(manifests.items()):
            path = folder / f"{part}-{stored}.safetensors"
            made = {key: value.to(getattr(torch, stored)) for key, value in weights(manifest, seed).items()}
            safetensors.torch.save_file(made, path)
            self.plans[part] = keys.plan(path, part, manifest, uses=unet.uses if part == "unet" else stored_uses)


class SDBench(Bench):
    """The same bench with these parts and backends."""

    make_files = SDFiles
    make_torch = staticmethod(TORCH)

    def component(self, twin: Side, part: str, precision: Precision, stored: str):
        key = (twin.name, part, precision.name, stored)
        if key not in self._components:
            make, config = (twin.unet, UNET) if part == "unet" else (twin.vae, VAE)
            self._components[key] = make(config, self.files(stored).plans[part], precision)
        return self._components[key]

    def judge(self, block: Block, precision: Precision, family: str = "normal") -> list[Verdict]:
        stored = precision.stored_dtype(block.part)
        references, values = self.reference(block, family, stored), block.values(family, stored)
        made = {
            side.name: block.on(side, self.component(side, block.part, precision, stored), precision, values)
            for side in (TORCH(), MLX())
        }
        streams = [values[name] for name in block.residual] or [None] * len(references)
        case = block.case(precision, family)
        return [
            judge(case, reference, {name: outputs[i] for name, outputs in made.items()}, streams[i])
            for i, reference in enumerate(references)
        ]


# Blocks

TEMB = ("modulation", (2, UNET.time_width))  # behind its SiLU
TEXT = ("wide", (2, 7, UNET.cross_attention_dim))


def _mid(c):
    return c.mid_block.attentions[0]


def _down(block, a, context):
    states = []
    x = block(a.x, states, a.temb, context)
    return [*states[0][1:], block.downsampled(x)]


def _features() -> np.ndarray:
    return ExactSinusoids(UNET.time_channels)(torch.tensor([981.0, 437.0])).numpy()


def unet_block(name: str, inputs: dict, run, **more) -> SDBlock:
    return SDBlock(name=name, part="unet", inputs=inputs, run=run, **({"returned": "stream"} | more))


def vae_block(name: str, shape: tuple[int, ...], run, **more) -> SDBlock:
    return SDBlock(name=name, part="vae", inputs={"x": ("compute", shape)}, run=run, **more)


BLOCKS = (
    unet_block(
        "unet.time",
        {"x": ("wide", (2, UNET.time_channels))},
        lambda c, a: c.time_embedding(a.x),
        returned="modulation",
        dtype="modulation",
    ),
    unet_block(
        "unet.residual",
        {"x": ("stream", (2, 96, 5, 7)), "temb": TEMB},
        lambda c, a: c.mid_block.resnets[0](a.x, a.temb),
        residual=("x",),
    ),
    unet_block(  # its width changes: its input is not in its output
        "unet.shortcut",
        {"x": ("stream", (2, 32, 5, 7)), "temb": TEMB},
        lambda c, a: c.down_blocks[1].resnets[0](a.x, a.temb),
    ),
    unet_block(
        "unet.tokens",
        {"x": ("stream", (2, 35, 96)), "text": TEXT},
        lambda c, a: _mid(c).transformer_blocks[0](a.x, _mid(c).transformer_blocks[0].context(a.text)),
        residual=("x",),
        blocks=3,
    ),
    unet_block(
        "unet.transformer",
        {"x": ("stream", (2, 96, 5, 7)), "text": TEXT},
        lambda c, a: _mid(c)(a.x, _mid(c).context(a.text)),
        residual=("x",),
        blocks=6,
    ),
    unet_block(
        "unet.down",
        {"x": ("stream", (2, 32, 5, 7)), "temb": TEMB, "text": TEXT},
        lambda c, a: _down(c.down_blocks[1], a, c.down_blocks[1].context(a.text)),
        blocks=5,
    ),
    unet_block(
        "unet.plain_down",
        {"x": ("stream", (2, 32, 5, 7)), "temb": TEMB},
        lambda c, a: _down(c.down_blocks[0], a, []),
        blocks=2,
    ),
    unet_block(
        "unet.mid",
        {"x": ("stream", (2, 96, 5, 7)), "temb": TEMB, "text": TEXT},
        lambda c, a: c.mid_block(a.x, a.temb, c.mid_block.context(a.text)),
        residual=("x",),
        blocks=8,
    ),
    unet_block(
        "unet.up",
        {
            "x": ("stream", (2, 96, 3, 4)),
            "before": ("stream", (2, 32, 5, 7)),  # only its sides count: odd ones
            "kept2": ("stream", (2, 32, 3, 4)),
            "kept1": ("stream", (2, 64, 3, 4)),
            "temb": TEMB,
            "text": TEXT,
        },
        lambda c, a: c.up_blocks[1](a.x, [[a.before], [a.kept2, a.kept1]], a.temb, c.up_blocks[1].context(a.text)),
        blocks=9,
    ),
    unet_block(
        "unet.plain_up",
        {
            "x": ("stream", (2, 64, 5, 7)),
            "kept2": ("stream", (2, 32, 5, 7)),
            "kept1": ("stream", (2, 32, 5, 7)),
            "temb": TEMB,
        },
        lambda c, a: c.up_blocks[2](a.x, [[a.kept2, a.kept1]], a.temb, []),
        blocks=2,
    ),
    unet_block(
        "unet.head",
        {"x": ("stream", (2, 32, 5, 7))},
        lambda c, a: c.conv_out(a.twin.nn.silu(c.conv_norm_out(a.x))),
        returned="head",
        dtype="head",
    ),
    unet_block(
        "unet.model",
        {"x": ("wide", (2, 4, 9, 7)), "text": TEXT, "sizes": ("wide", (2, 88))},
        lambda c, a: c(a.x, a.twin.array(_features(), a.twin.wide(a.x)), c.context(a.text), a.sizes),
        returned="head",
        blocks=30,
    ),
    vae_block("kl.residual", (2, 48, 7, 9), lambda c, a: c.decoder.up_blocks[1].resnets[1](a.x), residual=("x",)),
    vae_block("kl.shortcut", (2, 48, 5, 7), lambda c, a: c.decoder.up_blocks[2].resnets[0](a.x)),
    vae_block("kl.attention", (2, 48, 5, 7), lambda c, a: c.decoder.mid_block.attentions[0](a.x), residual=("x",)),
    vae_block("kl.mid", (2, 48, 5, 7), lambda c, a: c.encoder.mid_block(a.x), residual=("x",), blocks=3),
    vae_block("kl.up", (1, 48, 5, 7), lambda c, a: c.decoder.up_blocks[2](a.x), blocks=3),
    vae_block("kl.down", (1, 16, 8, 6), lambda c, a: c.encoder.down_blocks[1](a.x), blocks=2),
    vae_block("kl.encoder", (1, 3, 40, 24), lambda c, a: c.encode(a.x), blocks=10),
    vae_block("kl.decoder", (1, 4, 5, 3), lambda c, a: c.decode(a.x, 5, 3, 1000), blocks=14),
)
