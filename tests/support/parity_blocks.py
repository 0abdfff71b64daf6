"""Every kind of block, each described once: its inputs, their families, and the call, which is the same on any backend.

The twins have the same classes, attributes and calls, so that one description runs on both and in float64.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from qwenimg.common.networks.denoisers import qwen_conditioning
from qwenimg.common.networks.encoders import decoder
from qwenimg.common.parity import parity
from qwenimg.common.precision.precision import Precision, at_least_float32
from qwenimg.common.precision.residency import ONCE
from support.parity_cases import DIT, TEXT, Twin, rounded
from support.parity_recorded import own_k

SHAPES = [(1, 5, 7)]  # image tokens
WORDS = 11  # text tokens
TIMES = (981.0, 437.3, 20.0)
IDS = [3, 130, 0, 17, 17, 99, 64, 5, 1, 88, 42, 120, 7]

# Input families

NEAR = 0.1  # deviation of the near-constant inputs about 1


def _outlier(noise: np.ndarray) -> np.ndarray:
    noise.flat[noise.size // 3] = 1e3
    return noise


FAMILIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "normal": lambda noise: noise,
    "std 0.03": lambda noise: 0.03 * noise,  # a wrong epsilon shows
    "x 1000": lambda noise: 1e3 * noise,
    "near-constant": lambda noise: 1 + NEAR * noise,
    "one outlier": _outlier,
}

# Blocks

HEADS = {"transformer": "proj_out.weight", "unet": "conv_out.weight"}
KINDS: dict[str, Callable[[Precision, str], str]] = {
    "stream": lambda p, part: p.residual_dtype(part),
    "compute": lambda p, part: p.compute_dtype(part),
    "wide": lambda p, part: at_least_float32(p.compute_dtype(part)),
    "modulation": lambda p, part: p.weight_dtype(part, "transformer_blocks.0.img_mod.1.weight", ONCE),
    "start": lambda p, part: p.weight_dtype(part, "img_in.weight"),
    "head": lambda p, part: p.weight_dtype(part, HEADS[part]),
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a component that can run alone: `run` takes the component and its inputs, on any backend."""

    name: str
    part: str
    inputs: dict[str, tuple[str, tuple[int, ...]]]  # kind and shape; the first is the stream that the families shape
    run: Callable[..., object]
    returned: str = "compute"
    dtype: str = "compute"  # whose roundoff is the measure
    residual: tuple[str, ...] = ()  # the inputs that the outputs are updates of
    image: bool = False
    blocks: int = 1
    centred: bool = False  # whether a LayerNorm sees the first input

    def case(self, precision: Precision, family: str) -> parity.Case:
        dtype = KINDS[self.dtype](precision, self.part)
        return parity.Case(
            component=self.name,
            k=own_k(self.name, dtype),
            dtype=dtype,
            returned=KINDS[self.returned](precision, self.part),
            blocks=self.blocks,
            offset=1 / NEAR if self.centred and family == "near-constant" else 0.0,
        )

    def values(self, family: str, stored: str) -> dict[str, np.ndarray]:
        """The inputs as float64 numbers of the dtype under test; tables are as exact as each side can take them."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        made = {}
        for name, (kind, shape) in self.inputs.items():
            noise = rng.standard_normal(shape)
            if kind == "table":
                made[name] = TABLES[name]
            elif kind == "modulation":
                made[name] = rounded(0.4 * noise, stored)
            else:
                shaped = name in ("x", "img", "txt")
                made[name] = rounded(FAMILIES[family](noise) if shaped else noise, stored)
        return made

    def on(
        self, twin: Twin, component: object, precision: Precision, values: dict[str, np.ndarray]
    ) -> list[parity.Output]:
        """Every output of the block there."""
        arrays = {}
        for name, (kind, _) in self.inputs.items():
            dtype = KINDS["wide" if kind == "table" else kind](precision, self.part)
            arrays[name] = twin.array(values[name], dtype, self.image)
        with torch.inference_mode():
            made = self.run(component, SimpleNamespace(**arrays, twin=twin))
            parts = made if isinstance(made, tuple) else (made,)
            return [twin.output(part, self.image) for part in parts]


def _tables() -> dict[str, np.ndarray]:
    (img_cos, img_sin), (txt_cos, txt_sin) = qwen_conditioning.image_and_text_rope(DIT, SHAPES, WORDS)
    cos, sin = decoder.text_table(TEXT, len(IDS))
    features = qwen_conditioning.time_rows(DIT, TIMES, "float32")
    made = {"img_cos": img_cos, "img_sin": img_sin, "txt_cos": txt_cos, "txt_sin": txt_sin}
    return made | {"cos": cos, "sin": sin, "features": features}


TABLES = _tables()


def _table(*names: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("table", TABLES[name].shape) for name in names}


def _rope(a: SimpleNamespace):
    freqs = a.twin.nn.rope_freqs
    return freqs(a.img_cos, a.img_sin), freqs(a.txt_cos, a.txt_sin)


def _indices(a: SimpleNamespace, values: list[int]):
    if a.twin.name == "torch":
        return torch.tensor(values)
    import mlx.core as mx

    return mx.array(values)


def _briefly(component, prefix: str, use: Callable[[], object]) -> object:
    """Return the result of `use`, called while the weights under `prefix` that only make modulation are loaded."""
    load = sys.modules[type(component).__module__].load  # the backend's own
    device = (component.device,) if hasattr(component, "device") else ()
    return load.briefly(component.model, component.plan, *device, prefix, use)


INPUT_FREE = ("dit.time", "text.model")  # blocks that no family shapes
L, C = SHAPES[0][1] * SHAPES[0][2], DIT.dim

BLOCKS = (
    Block(
        name="dit.block",
        part="transformer",
        inputs={
            "img": ("stream", (2, L, C)),
            "txt": ("stream", (2, WORDS, C)),
            "img_mod": ("modulation", (1, 6 * C)),
            "txt_mod": ("modulation", (1, 6 * C)),
            **_table("img_cos", "img_sin", "txt_cos", "txt_sin"),
        },
        run=lambda c, a: c.model.transformer_blocks[0](a.img, a.txt, (a.img_mod, a.txt_mod), _rope(a), None, None),
        returned="stream",
        residual=("img", "txt"),
        centred=True,
    ),
    Block(
        name="dit.head",
        part="transformer",
        inputs={"x": ("stream", (1, L, C)), "mod": ("head", (1, 2 * C))},
        run=lambda c, a: c.model.proj_out(c.model.norm_out(a.x, a.mod, c.model.proj_out.weight.dtype)),
        returned="head",
        dtype="head",
        centred=True,
    ),
    Block(
        name="dit.time",
        part="transformer",
        inputs=_table("features"),
        run=lambda c, a: _briefly(c, "time_text_embed.", lambda: c.model.time_text_embed(a.features, _indices(a, [0]))),
        returned="modulation",
        dtype="modulation",
    ),
    Block(
        name="dit.modulation",
        part="transformer",
        inputs={"x": ("modulation", (3, C))},
        run=lambda c, a: _briefly(c, "transformer_blocks.1.", lambda: c.model.transformer_blocks[1].modulation(a.x)),
        returned="modulation",
        dtype="modulation",
    ),
    Block(
        name="dit.img_in",
        part="transformer",
        inputs={"x": ("wide", (2, L, DIT.in_channels))},
        run=lambda c, a: c.model.img_in(a.x),
        returned="start",
        dtype="start",
    ),
    Block(
        name="dit.context",
        part="transformer",
        inputs={"x": ("wide", (2, WORDS, DIT.joint_attention_dim))},
        run=lambda c, a: c.model.context(a.x),
        returned="stream",
        dtype="start",
    ),
    Block(
        name="dit.model",
        part="transformer",
        inputs={"x": ("wide", (1, L, DIT.in_channels)), "words": ("wide", (1, WORDS, DIT.joint_attention_dim))},
        run=lambda c, a: c.predict(a.x, (c.modulate(TABLES["features"]), 1), c.condition([a.words], SHAPES)),
        returned="wide",
        blocks=3,
    ),
    Block(
        name="dit.batch",  # two prompts of different length, the shorter one padded and masked
        part="transformer",
        inputs={
            "x": ("wide", (1, L, DIT.in_channels)),
            "words": ("wide", (1, WORDS, DIT.joint_attention_dim)),
            "few": ("wide", (1, 4, DIT.joint_attention_dim)),
        },
        run=lambda c, a: c.predict(a.x, (c.modulate(TABLES["features"]), 1), c.condition([a.words, a.few], SHAPES)),
        returned="wide",
        blocks=3,
    ),
    Block(
        name="text.model",
        part="text",
        inputs={},
        run=lambda c, a: c.encode(IDS),
        returned="wide",
        blocks=TEXT.num_hidden_layers,
    ),
    Block(
        name="text.layer",
        part="text",
        inputs={"x": ("stream", (2, len(IDS), TEXT.hidden_size)), **_table("cos", "sin")},
        run=lambda c, a: c.model.layers[1](a.x, (a.cos, a.sin)),
        returned="stream",
        residual=("x",),
    ),
    Block(
        name="vae.residual",
        part="vae",
        inputs={"x": ("compute", (2, 24, 7, 9))},
        run=lambda c, a: c.model.encoder.down_blocks[0](a.x),
        residual=("x",),
        image=True,
    ),
    Block(
        name="vae.shortcut",  # a residual block whose width changes: its input is not in its output
        part="vae",
        inputs={"x": ("compute", (2, 48, 5, 7))},
        run=lambda c, a: c.model.decoder.up_blocks[1].resnets[0](a.x),
        image=True,
    ),
    Block(
        name="vae.attention",
        part="vae",
        inputs={"x": ("compute", (2, 96, 5, 7))},
        run=lambda c, a: c.model.decoder.mid_block.attentions[0](a.x),
        residual=("x",),
        image=True,
    ),
    Block(
        name="vae.mid",
        part="vae",
        inputs={"x": ("compute", (1, 96, 5, 7))},
        run=lambda c, a: c.model.decoder.mid_block(a.x),
        residual=("x",),
        image=True,
        blocks=3,
    ),
    Block(
        name="vae.up",
        part="vae",
        inputs={"x": ("compute", (1, 96, 5, 7))},
        run=lambda c, a: c.model.decoder.up_blocks[0](a.x),
        image=True,
        blocks=3,
    ),
    Block(
        name="vae.down",
        part="vae",
        inputs={"x": ("compute", (2, 24, 7, 9))},
        run=lambda c, a: c.model.encoder.down_blocks[1](a.x),
        image=True,
    ),
    Block(
        name="vae.encoder",
        part="vae",
        inputs={"x": ("compute", (1, 3, 40, 24))},
        run=lambda c, a: c.model.encode(a.x),
        image=True,
        blocks=10,
    ),
    Block(
        name="vae.decoder",
        part="vae",
        inputs={"x": ("compute", (1, 16, 5, 3))},
        run=lambda c, a: c.model.decode(a.x, 5, 3, 1000),
        image=True,
        blocks=14,
    ),
)
