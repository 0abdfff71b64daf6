"""What a figure on paper is about: a model's denoiser and VAE, of its files or, for models that are known, as they are
published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from paper.kernels import Case
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.flux.model import LENGTHS
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.qwen_image.model import BATCHED_TOKENS
from qwenimg.common.families.registry import FAMILIES, OpenModel
from qwenimg.common.networks.denoisers import (
    anima_dit,
    aura_dit,
    chroma_dit,
    ernie_dit,
    flux2_dit,
    flux2_kv_dit,
    flux3_dit,
    flux_dit,
    hunyuan_dit,
    krea2_dit,
    longcat_dit,
    lumina_dit,
    ovis_dit,
    pixart_dit,
    qwen_dit,
    sana_dit,
    sd3_dit,
    zimage_dit,
)
from qwenimg.common.networks.vaes import flux2_vae
from qwenimg.common.precision.precision import DenoiserKind
from qwenimg.common.request.request import Defaults

QWEN_TEXT, CLIP_TEXT = 64, 77  # tokens: of a prompt of some length, and of a chunk of CLIP's
# Tokens of a text, of networks that compute one branch of guidance at a time
TEXTS: dict[str, Callable[[Any], int]] = {
    zimage_dit.NETWORK.name: lambda config: QWEN_TEXT,
    flux_dit.NETWORK.name: lambda config: LENGTHS[not config.guidance_embeds],  # schnell is published without
    longcat_dit.NETWORK.name: lambda config: 512,  # padded, as the next two
    flux2_dit.NETWORK.name: lambda config: 512,
    flux2_kv_dit.NETWORK.name: lambda config: 512,
    flux3_dit.NETWORK.name: lambda config: 80,  # padded to a multiple of it
    chroma_dit.NETWORK.name: lambda config: QWEN_TEXT,
    ernie_dit.NETWORK.name: lambda config: QWEN_TEXT,
    krea2_dit.NETWORK.name: lambda config: QWEN_TEXT,
    lumina_dit.NETWORK.name: lambda config: QWEN_TEXT,
    pixart_dit.NETWORK.name: lambda config: QWEN_TEXT,
    sana_dit.NETWORK.name: lambda config: QWEN_TEXT,
    hunyuan_dit.NETWORK.name: lambda config: QWEN_TEXT,
    anima_dit.NETWORK.name: lambda config: 512,  # padded, as the next one
    ovis_dit.NETWORK.name: lambda config: 256,
    aura_dit.NETWORK.name: lambda config: 256,  # padded
    sd3_dit.NETWORK.name: lambda config: CLIP_TEXT + 256,  # both CLIPs side by side, then T5
}
Network = tuple[str, Any]  # a module of `networks`, and its configuration


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model."""

    name: str
    kind: DenoiserKind
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
        network, config = self.denoiser
        # Guidance is an input, in one branch
        told = network == flux_dit.NETWORK.name or getattr(config, "guidance_embeds", False)
        branches = 2 if guided and not told else 1
        if (texts := TEXTS.get(network)) is not None:
            return Case(height=rows, width=columns, text=texts(config), branches=1), branches
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
        side = self.scale * (flux2_vae.PATCH if self.vae[0] == flux2_vae.NETWORK.name else 1)
        return Case(height=height // side, width=width // side)

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


def published(name: str) -> Subject | None:
    """A known model by its name, without its files; None where no configuration of it is known."""
    known = catalog.find(name)
    model = None if known is None else registry.published(known)
    return None if known is None or model is None else opened(known.name, known, model)


def opened(name: str, known: KnownModel | None, model: OpenModel) -> Subject:
    """A model on this machine."""
    parts = model.checkpoint.components
    denoiser, vae = parts[model.family.denoiser], parts["vae"]
    return Subject(
        name=name,
        kind=model.family.precision,
        denoiser=(denoiser.network, denoiser.config),
        vae=(vae.network, vae.config),
        defaults=model.defaults(),
    )
