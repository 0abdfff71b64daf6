"""The MLX engine: wires the MLX models to the protocol of `qwenimg.common.backend`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from qwenimg.backends.mlx import load, nn
from qwenimg.backends.mlx.diffusion import ClipEncoder, UNet
from qwenimg.backends.mlx.kl_vae import KLVAE
from qwenimg.backends.mlx.qwen_dit import Pair, QwenImageTransformer, Rope
from qwenimg.backends.mlx.qwen_vae import QwenImageVAE
from qwenimg.backends.mlx.qwen_vl import QwenTextEncoder
from qwenimg.common import conditioning, geometry
from qwenimg.common.backend import NumpyArray, Observer
from qwenimg.common.checkpoint import LoadPlan
from qwenimg.common.memory import free_ram
from qwenimg.common.models import kl_vae, qwen_dit, qwen_vae
from qwenimg.common.models.clip import CLIPConfig
from qwenimg.common.models.kl_vae import KLVAEConfig
from qwenimg.common.models.qwen_dit import QwenDiTConfig
from qwenimg.common.models.qwen_vae import QwenVAEConfig
from qwenimg.common.models.qwen_vl import QwenVLConfig
from qwenimg.common.models.unet import UNetConfig
from qwenimg.common.precision import Precision

T = TypeVar("T")
WIDE = 2**20  # a tile side that no image reaches


# Components


class TextEncoder:
    def __init__(self, config: QwenVLConfig, plan: LoadPlan, precision: Precision):
        self.config = config
        stream = nn.DTYPES[precision.residual_dtype("text")]
        self.model = load.empty(lambda: QwenTextEncoder(config, stream))
        load.fill(self.model, plan, lambda name: precision.weight_dtype("text", name))
        self.table_dtype = nn.DTYPES[precision.compute_dtype("text")]

    def encode(self, ids: Sequence[int]) -> Array:
        """[1, S, C]."""
        table = geometry.text_rope(len(ids), self.config.head_dim, self.config.rope_theta)
        cos, sin = (nn.table(part, self.table_dtype) for part in table)
        return nn.settle(self.model(mx.array([list(ids)]), (cos, sin)))


@dataclass(frozen=True)
class Condition:
    txt: Array
    rope: Rope
    index: Array | None
    mask: Array | None


@dataclass(frozen=True)
class Modulation:
    blocks: list[Pair]  # per block: image [T or T+1, 6C], text [T, 6C]
    final: Array  # [T, 2C]

    def at(self, step: int, with_zero: bool) -> tuple[list[Pair], Array]:
        """One step's rows; with_zero adds the row of timestep 0, the last one, to the image stream's."""
        one = slice(step, step + 1)
        rows = [(mx.concatenate((img[one], img[-1:])) if with_zero else img[one], txt[one]) for img, txt in self.blocks]
        return rows, self.final[one]


class Transformer:
    def __init__(self, config: QwenDiTConfig, plan: LoadPlan, precision: Precision):
        self.config, self.plan = config, plan
        self.dtype_of: Callable[[str], str] = lambda name: precision.weight_dtype("transformer", name)
        stream = nn.DTYPES[precision.residual_dtype("transformer")]
        self.table_dtype = nn.DTYPES[precision.compute_dtype("transformer")]
        self.model = load.empty(lambda: QwenImageTransformer(config, stream))
        resident = plan.only(lambda name: not qwen_dit.timestep_only(name))
        load.fill(self.model, resident, self.dtype_of)

    def modulate(self, features: NumpyArray, addition: int = 0) -> Modulation:
        """The rows of every block for sinusoids [T 256] (`conditioning.time_rows`); each block's weights are read, used
        and freed in turn."""
        rows = nn.table(features, self.table_dtype)
        chosen = mx.array([addition])
        temb = self._briefly("time_text_embed.", lambda: self.model.time_text_embed(rows, chosen))
        final = self._briefly("norm_out.", lambda: self.model.norm_out.modulation(temb))
        blocks = [
            self._briefly(f"transformer_blocks.{i}.", partial(block.modulation, temb))
            for i, block in enumerate(self.model.transformer_blocks)
        ]
        return Modulation(blocks, final)

    def condition(self, texts: Sequence[Array], shapes: Sequence[tuple[int, int, int]]) -> Condition:
        lengths = [text.shape[1] for text in texts]
        longest = max(lengths)
        padded = [nn.pad_tokens(text, longest) for text in texts]
        tables = conditioning.image_and_text_rope(self.config, shapes, longest)
        img, txt = ([nn.table(part, self.table_dtype) for part in pair] for pair in tables)
        mask = conditioning.key_mask(lengths, sum(f * h * w for f, h, w in shapes))
        index = conditioning.zero_index(self.config, shapes)
        return Condition(
            txt=self.model.context(mx.concatenate(padded)),
            rope=((img[0], img[1]), (txt[0], txt[1])),
            index=None if index is None else mx.array(index),
            mask=None if mask is None else mx.array(mask),
        )

    def predict(self, latents: Array, condition: Condition, modulation: Modulation, step: int) -> Array:
        mods, final = modulation.at(step, condition.index is not None)
        latents = mx.broadcast_to(latents, (condition.txt.shape[0], *latents.shape[1:]))
        velocity = self.model(latents, condition.txt, mods, final, condition.rope, condition.index, condition.mask)
        return nn.at_least_float32(velocity)

    def _briefly(self, prefix: str, use: Callable[[], T]) -> T:
        """Calls `use` while the timestep-only weights under `prefix` are loaded."""
        plan = self.plan.only(lambda name: name.startswith(prefix) and qwen_dit.timestep_only(name))
        load.fill(self.model, plan, self.dtype_of)
        result = use()
        mx.eval(result)
        load.drop(self.model, plan.entries)
        return result


class VAE:
    def __init__(
        self,
        build: Callable[[], QwenImageVAE | KLVAE],
        decoder_only: Callable[[str], bool],
        plan: LoadPlan,
        precision: Precision,
    ):
        self.decoder_only, self.plan = decoder_only, plan
        self.dtype_of: Callable[[str], str] = lambda name: precision.weight_dtype("vae", name)
        self.dtype = nn.DTYPES[precision.compute_dtype("vae")]
        self.model = load.empty(build)

    def decode(self, latents: NumpyArray, tile: int | None = None) -> NumpyArray:
        self._need(self.decoder_only)
        height, width = latents.shape[2:]
        z = nn.table(latents.transpose(0, 2, 3, 1), self.dtype)
        pixels = self.model.decode(z, height, width, tile or WIDE)
        return np.array(nn.at_least_float32(pixels)).transpose(0, 3, 1, 2)

    def encode(self, pixels: NumpyArray) -> NumpyArray:
        self._need(lambda name: not self.decoder_only(name))
        moments = self.model.encode(nn.table(pixels.transpose(0, 2, 3, 1), self.dtype))
        return np.array(nn.at_least_float32(moments)).transpose(0, 3, 1, 2)

    def _need(self, wanted: Callable[[str], bool]) -> None:
        """Loads the half of the model that is used, once."""
        plan = self.plan.only(wanted)
        if load.missing(self.model, plan.entries):
            load.fill(self.model, plan, self.dtype_of)


# Engine


class MLXEngine:
    name = "mlx"

    def __init__(self) -> None:
        self.on_gpu = nn.on_gpu()
        # Measured on a CPU: 15.1, since its convolutions copy every window. Metal has no such copy; not measured there.
        self.decode_buffers = 6.0 if self.on_gpu else 16.0
        self.score_bytes = 0 if self.on_gpu else 2 * nn.SCORE_BYTES
        self.device = _device_name() if self.on_gpu else "CPU (mlx)"

    def text_encoder(self, config: QwenVLConfig, plan: LoadPlan, precision: Precision) -> TextEncoder:
        return TextEncoder(config, plan, precision)

    def transformer(self, config: QwenDiTConfig, plan: LoadPlan, precision: Precision) -> Transformer:
        return Transformer(config, plan, precision)

    def vae(self, config: QwenVAEConfig, plan: LoadPlan, precision: Precision) -> VAE:
        return VAE(lambda: QwenImageVAE(config), qwen_vae.decoder_only, plan, precision)

    def clip(self, config: CLIPConfig, plan: LoadPlan, precision: Precision) -> ClipEncoder:
        return ClipEncoder(config, plan, precision)

    def unet(self, config: UNetConfig, plan: LoadPlan, precision: Precision) -> UNet:
        return UNet(config, plan, precision)

    def kl_vae(self, config: KLVAEConfig, plan: LoadPlan, precision: Precision) -> VAE:
        return VAE(lambda: KLVAE(config), kl_vae.decoder_only, plan, precision)

    def array(self, values: NumpyArray) -> Array:
        return nn.table(values, mx.float32)

    def numpy(self, array: Array) -> NumpyArray:
        return np.array(nn.at_least_float32(array))

    def finite(self, array: Array) -> bool:
        return bool(mx.all(mx.isfinite(array)).item())

    def guide(self, conditional: Array, unconditional: Array, scale: float) -> Array:
        return nn.guide(conditional, unconditional, scale)

    def rescale(self, guided: Array, conditional: Array, share: float) -> Array:
        return nn.rescale(guided, conditional, share)

    def join(self, arrays: Sequence[Array]) -> Array:
        return mx.concatenate(list(arrays), axis=1)

    def split(self, batch: Array) -> list[Array]:
        return list(mx.split(batch, batch.shape[0]))

    def free_memory(self) -> int:
        """Bytes below the working set that the system recommends for the GPU; on the CPU what it could still give."""
        limit = mx.device_info().get("max_recommended_working_set_size") if self.on_gpu else None
        return int(limit) - mx.get_active_memory() if limit else free_ram()

    def release(self) -> None:
        mx.clear_cache()

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        return nn.observe(observer)

    def product_seconds(self, side: int, dtype: str) -> float:
        return nn.product_seconds(side, nn.DTYPES[dtype])

    def check_fp32(self) -> float:
        generator = np.random.RandomState(0)
        a, b = (generator.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
        exact = a.astype(np.float64) @ b.astype(np.float64)
        return float(np.linalg.norm(np.array(mx.matmul(mx.array(a), mx.array(b))) - exact) / np.linalg.norm(exact))

    def versions(self) -> dict[str, str]:
        return {"mlx": mx.__version__, **({"macos": platform.mac_ver()[0]} if platform.mac_ver()[0] else {})}


def _device_name() -> str:
    return str(mx.device_info().get("device_name", "GPU"))
