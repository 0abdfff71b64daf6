"""The torch engine: wires the torch models to the protocol of `qwenimg.common.backend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from qwenimg.backends.torch import load, nn
from qwenimg.backends.torch.cpu import computes
from qwenimg.backends.torch.diffusion import ClipEncoder, UNet
from qwenimg.backends.torch.kl_vae import KLVAE
from qwenimg.backends.torch.qwen_dit import Pair, QwenImageTransformer, Rope, TransformerBlock
from qwenimg.backends.torch.qwen_vae import QwenImageVAE
from qwenimg.backends.torch.qwen_vl import QwenTextEncoder
from qwenimg.common import conditioning, geometry
from qwenimg.common.amounts import counted
from qwenimg.common.backend import NumpyArray, Observer
from qwenimg.common.checkpoint import LoadPlan
from qwenimg.common.errors import BackendMissing
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


def has_cuda() -> bool:
    """Whether torch sees an NVIDIA GPU. Queries the driver."""
    return torch.cuda.is_available() and torch.version.hip is None


# Components


class TextEncoder:
    def __init__(self, config: QwenVLConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        self.config, self.device = config, device
        stream = nn.DTYPES[precision.residual_dtype("text")]
        self.model = load.empty(lambda: QwenTextEncoder(config, stream))
        load.fill(self.model, plan, lambda name: precision.weight_dtype("text", name), device)
        self.table_dtype = nn.DTYPES[precision.compute_dtype("text")]

    @computes
    def encode(self, ids: Sequence[int]) -> Tensor:
        """[1, S, C]."""
        table = geometry.text_rope(len(ids), self.config.head_dim, self.config.rope_theta)
        cos, sin = (nn.table(part, self.table_dtype, self.device) for part in table)
        return self.model(torch.tensor([list(ids)], device=self.device), (cos, sin))


@dataclass(frozen=True)
class Condition:
    txt: Tensor
    rope: Rope
    index: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class Modulation:
    blocks: list[Pair]  # per block: image [T or T+1, 6C], text [T, 6C]
    final: Tensor  # [T, 2C]

    def at(self, step: int, with_zero: bool) -> tuple[list[Pair], Tensor]:
        """One step's rows; with_zero adds the row of timestep 0, the last one, to the image stream's."""
        one = slice(step, step + 1)
        rows = [(torch.cat((img[one], img[-1:])) if with_zero else img[one], txt[one]) for img, txt in self.blocks]
        return rows, self.final[one]


class Transformer:
    def __init__(self, config: QwenDiTConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        self.config, self.plan, self.device = config, plan, device
        self.dtype_of: Callable[[str], str] = lambda name: precision.weight_dtype("transformer", name)
        stream = nn.DTYPES[precision.residual_dtype("transformer")]
        self.table_dtype = nn.DTYPES[precision.compute_dtype("transformer")]
        self.model = load.empty(lambda: QwenImageTransformer(config, stream))
        resident = plan.only(lambda name: not qwen_dit.timestep_only(name))
        load.fill(self.model, resident, self.dtype_of, device)

    @computes
    def modulate(self, features: NumpyArray, addition: int = 0) -> Modulation:
        """The rows of every block for sinusoids [T 256] (`conditioning.time_rows`); each block's weights are read, used
        and freed in turn."""
        rows = nn.table(features, self.table_dtype, self.device)
        chosen = torch.tensor([addition], device=self.device)
        temb = self._briefly("time_text_embed.", lambda: self.model.time_text_embed(rows, chosen))
        final = self._briefly("norm_out.", lambda: self.model.norm_out.modulation(temb))
        blocks = [
            self._briefly(f"transformer_blocks.{i}.", partial(cast(TransformerBlock, block).modulation, temb))
            for i, block in enumerate(self.model.transformer_blocks)
        ]
        return Modulation(blocks, final)

    @computes
    def condition(self, texts: Sequence[Tensor], shapes: Sequence[tuple[int, int, int]]) -> Condition:
        lengths = [text.shape[1] for text in texts]
        longest = max(lengths)
        padded = [nn.pad_tokens(text, longest) for text in texts]
        tables = conditioning.image_and_text_rope(self.config, shapes, longest)
        img, txt = ([nn.table(part, self.table_dtype, self.device) for part in pair] for pair in tables)
        mask = conditioning.key_mask(lengths, sum(f * h * w for f, h, w in shapes))
        index = conditioning.zero_index(self.config, shapes)
        return Condition(
            txt=self.model.context(torch.cat(padded)),
            rope=((img[0], img[1]), (txt[0], txt[1])),
            index=None if index is None else torch.from_numpy(index).to(self.device),
            mask=None if mask is None else torch.from_numpy(mask).to(self.device),
        )

    @computes
    def predict(self, latents: Tensor, condition: Condition, modulation: Modulation, step: int) -> Tensor:
        mods, final = modulation.at(step, condition.index is not None)
        latents = latents.expand(condition.txt.shape[0], -1, -1)
        velocity = self.model(latents, condition.txt, mods, final, condition.rope, condition.index, condition.mask)
        return nn.at_least_float32(velocity)

    def _briefly(self, prefix: str, use: Callable[[], T]) -> T:
        """Calls `use` while the timestep-only weights under `prefix` are loaded."""
        plan = self.plan.only(lambda name: name.startswith(prefix) and qwen_dit.timestep_only(name))
        load.fill(self.model, plan, self.dtype_of, self.device)
        result = use()
        load.drop(self.model, plan.entries)
        return result


class VAE:
    def __init__(
        self,
        build: Callable[[], QwenImageVAE | KLVAE],
        decoder_only: Callable[[str], bool],
        plan: LoadPlan,
        precision: Precision,
        device: torch.device,
    ):
        self.decoder_only, self.plan = decoder_only, plan
        self.device = device
        self.dtype_of: Callable[[str], str] = lambda name: precision.weight_dtype("vae", name)
        self.dtype = nn.DTYPES[precision.compute_dtype("vae")]
        self.model = load.empty(build)

    @computes
    def decode(self, latents: NumpyArray, tile: int | None = None) -> NumpyArray:
        self._need(self.decoder_only)
        height, width = latents.shape[2:]
        z = nn.table(latents, self.dtype, self.device)
        pixels = self.model.decode(z, height, width, tile or WIDE)
        return nn.at_least_float32(pixels).cpu().numpy()

    @computes
    def encode(self, pixels: NumpyArray) -> NumpyArray:
        self._need(lambda name: not self.decoder_only(name))
        moments = self.model.encode(nn.table(pixels, self.dtype, self.device))
        return nn.at_least_float32(moments).cpu().numpy()

    def _need(self, wanted: Callable[[str], bool]) -> None:
        """Loads the half of the model that is used, once."""
        plan = self.plan.only(wanted)
        if load.missing(self.model, plan.entries):
            load.fill(self.model, plan, self.dtype_of, self.device)


# Engine


class TorchEngine:
    def __init__(self, name: str):
        if name == "cuda" and not has_cuda():
            raise BackendMissing(
                "--backend cuda: torch sees no NVIDIA GPU here; use --backend cpu, or install a CUDA build of torch"
            )
        self.name = name
        self.on_gpu = name == "cuda"
        self.decode_buffers = 3.5  # measured on a CPU: 3.1; a GPU's workspace for convolutions comes on top
        self._device = torch.device("cuda" if self.on_gpu else "cpu")
        threads = counted(torch.get_num_threads(), "thread")
        self.device = torch.cuda.get_device_name() if self.on_gpu else f"CPU (torch, {threads})"
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    def text_encoder(self, config: QwenVLConfig, plan: LoadPlan, precision: Precision) -> TextEncoder:
        return TextEncoder(config, plan, precision, self._device)

    def transformer(self, config: QwenDiTConfig, plan: LoadPlan, precision: Precision) -> Transformer:
        return Transformer(config, plan, precision, self._device)

    def vae(self, config: QwenVAEConfig, plan: LoadPlan, precision: Precision) -> VAE:
        return VAE(lambda: QwenImageVAE(config), qwen_vae.decoder_only, plan, precision, self._device)

    def clip(self, config: CLIPConfig, plan: LoadPlan, precision: Precision) -> ClipEncoder:
        return ClipEncoder(config, plan, precision, self._device)

    def unet(self, config: UNetConfig, plan: LoadPlan, precision: Precision) -> UNet:
        return UNet(config, plan, precision, self._device)

    def kl_vae(self, config: KLVAEConfig, plan: LoadPlan, precision: Precision) -> VAE:
        return VAE(lambda: KLVAE(config), kl_vae.decoder_only, plan, precision, self._device)

    def array(self, values: NumpyArray) -> Tensor:
        return nn.table(values, torch.float32, self._device)

    def numpy(self, array: Tensor) -> NumpyArray:
        return nn.at_least_float32(array).cpu().numpy()

    def finite(self, array: Tensor) -> bool:
        return bool(torch.isfinite(array).all())

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        with torch.inference_mode():
            return nn.guide(conditional, unconditional, scale)

    def rescale(self, guided: Tensor, conditional: Tensor, share: float) -> Tensor:
        with torch.inference_mode():
            return nn.rescale(guided, conditional, share)

    def join(self, arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(arrays), dim=1)

    def split(self, batch: Tensor) -> list[Tensor]:
        return list(batch.split(1))

    def free_memory(self) -> int:
        """Bytes free on the GPU, torch's own cache included; on the CPU what the system could still give."""
        if not self.on_gpu:
            return free_ram()
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def release(self) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        return nn.observe(observer)

    def check_fp32(self) -> float:
        generator = np.random.RandomState(0)
        a, b = (generator.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
        exact = a.astype(np.float64) @ b.astype(np.float64)
        return float(np.linalg.norm(self.numpy(self.array(a) @ self.array(b)) - exact) / np.linalg.norm(exact))

    def versions(self) -> dict[str, str]:
        cuda = {"cuda": str(torch.version.cuda)} if self.on_gpu else {}
        return {"torch": torch.__version__, **cuda}
