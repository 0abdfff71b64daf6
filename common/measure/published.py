"""What a figure on paper is about: a model's denoiser and VAE, of its files or, for models that are known, as they are
published."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from qwenimg.common.families.catalog import ALIASES, KNOWN, KnownModel
from qwenimg.common.families.qwen_image.model import BATCHED_TOKENS
from qwenimg.common.families.registry import FAMILIES, Opened
from qwenimg.common.networks import qwen_dit
from qwenimg.common.networks.kl_vae import KLVAEConfig
from qwenimg.common.networks.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.qwen_vae import QwenVAEConfig
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.precision.precision import Kind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.kernels import Case

QWEN_TEXT, CLIP_TEXT = 64, 77  # tokens: of a prompt of some length, and of a chunk of CLIP's
Network = tuple[str, Any]  # a module of `networks`, and its configuration


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model."""

    name: str
    kind: Kind
    denoiser: Network
    vae: Network
    defaults: Defaults

    @property
    def scale(self) -> int:
        """Pixels per latent along each side."""
        scale: int = self.vae[1].scale
        return scale

    @property
    def latent_channels(self) -> int:
        config = self.vae[1]
        channels: int = config.z_dim if self._is_dit else config.latent_channels
        return channels

    def step(self, width: int, height: int, guided: bool) -> tuple[Case, int]:
        """What one step of a picture of so many pixels asks of the denoiser, and how many times: both branches of
        guidance go in one batch where the model runs them so on a GPU."""
        rows, columns = height // self.scale, width // self.scale
        branches = 2 if guided else 1
        tokens = rows * columns // self.denoiser[1].patch_size ** 2 if self._is_dit else 0
        together = tokens <= BATCHED_TOKENS
        text = QWEN_TEXT if self._is_dit else CLIP_TEXT
        case = Case(height=rows, width=columns, text=text, branches=branches if together else 1)
        return case, 1 if together else branches

    def blocks(self, case: Case) -> tuple[int, int]:
        """How many equal blocks the denoiser has, and the numbers in their streams; nothing where they differ."""
        if not self._is_dit:
            return 0, 0
        config = self.denoiser[1]
        tokens = case.height * case.width // config.patch_size**2 + case.text
        return config.num_layers, case.branches * tokens * config.dim

    def decoding(self, width: int, height: int) -> Case:
        return Case(height=height // self.scale, width=width // self.scale)

    @property
    def text_layer(self) -> str | None:
        """The path of the layer that the tokens of every prompt go through, where their number is the prompt's own."""
        return "txt_in" if self._is_dit else None

    @property
    def _is_dit(self) -> bool:
        return self.denoiser[0] == qwen_dit.NETWORK.name

    @property
    def parameters(self) -> int:
        """Of the denoiser."""
        network = next(n for family in FAMILIES for n in family.networks if n.name == self.denoiser[0])
        return sum(prod(shape) for shape in network.manifest(self.denoiser[1]).values())


def _sdxl() -> UNetConfig:
    return UNetConfig(
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=(2, 2, 2),
        attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=(1, 2, 10),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def _networks() -> dict[str, tuple[Network, Network]]:
    vae = ("kl_vae", KLVAEConfig(block_out_channels=(128, 256, 512, 512), layers_per_block=2))
    qwen = (("qwen_dit", QwenDiTConfig()), ("qwen_vae", QwenVAEConfig()))
    sdxl = (("unet", _sdxl()), vae)
    sd15 = (("unet", UNetConfig(cross_attention_dim=768)), vae)
    return {"qwen-image": qwen, "qwen-image-2512": qwen, "sd15": sd15, "sdxl": sdxl, "sdxl-turbo": sdxl}


def published(name: str) -> Subject | None:
    """A known model by its name, without its files; None where no configuration of it is known."""
    found = ALIASES.get(name.lower(), name.lower())
    networks = _networks().get(found)
    return None if networks is None else _subject(KNOWN[found], *networks)


def opened(name: str, known: KnownModel | None, model: Opened) -> Subject:
    """A model on this machine."""
    parts = model.checkpoint.components
    denoiser, vae = parts[model.family.denoiser], parts["vae"]
    return Subject(
        name=name,
        kind=model.family.precision,
        denoiser=(denoiser.network, denoiser.config),
        vae=(vae.network, vae.config),
        defaults=model.defaults(known),
    )


def _subject(known: KnownModel, denoiser: Network, vae: Network) -> Subject:
    family = next(family for family in FAMILIES if family.name == known.family)
    defaults = Defaults(width=known.width, height=known.height, steps=known.steps, guidance=known.guidance)
    return Subject(name=known.name, kind=family.precision, denoiser=denoiser, vae=vae, defaults=defaults)
