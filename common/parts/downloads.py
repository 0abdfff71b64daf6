"""Files that some models need and lack, by the names under which `qwenimg pull` downloads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, kw_only=True)
class Download:
    """Files of one repository; the first two must be there."""

    name: str
    repo: str
    title: str
    bytes: int
    license: str
    purpose: str
    files: tuple[str, ...]
    tokenizer: str = "tokenizer"  # the folder of it, if there is one
    family: str = ""  # the family of models whose small files they are
    is_tiny_vae: bool = False
    needed_by: str = ""  # of a part of a model that is published by itself: the name of the model,
    option: str = ""  # and the option that takes the part
    controls: str = ""  # the family of models that they control, as a control network or an IP-Adapter
    is_ip_adapter: bool = False  # the adapter first; its image encoder, which it may share, after it

    @property
    def is_alone(self) -> bool:
        """True if its repository has nothing else that is used, so that the hub id names it too."""
        return not (self.family or self.is_ip_adapter)

    @property
    def place(self) -> str:
        """The hub id of what is opened of a control network: its folder, or its file beside those of others."""
        return f"{self.repo}/{self.files[0]}" if self.is_ip_adapter else self.repo


CLIP_TOKENIZER = Download(
    name="clip-tokenizer",
    repo="openai/clip-vit-large-patch14",
    title="the vocabulary of CLIP",
    bytes=1_500_000,
    license="MIT",
    purpose="the words of a Stable Diffusion model in one file",
    files=("vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"),
)
T5_TOKENIZER = Download(
    name="t5-tokenizer",
    repo="google/t5-v1_1-xxl",
    title="the vocabulary of T5",
    bytes=800_000,
    license="Apache-2.0",
    purpose="the words of T5, for a model in one file",
    files=("spiece.model", "tokenizer_config.json", "special_tokens_map.json"),
)
_tiny = partial(
    Download,
    license="MIT",
    is_tiny_vae=True,
    bytes=9_800_000,
    files=("config.json", "diffusion_pytorch_model.safetensors"),
)
TINY_VAES: tuple[Download, ...] = (
    *(
        _tiny(name=name, repo=f"madebyollin/{name}", title=f"TAESD for {models}", purpose=f"--vae, previews: {models}")
        for name, models in (
            ("taesd", "Stable Diffusion 1 and 2"),
            ("taesdxl", "SDXL"),
            ("taesd3", "Stable Diffusion 3"),
            ("taef1", "FLUX.1 and Z-Image"),
        )
    ),
    _tiny(
        name="taef2",
        repo="madebyollin/taef2",
        title="TAESD for FLUX.2",
        purpose="--vae, previews: FLUX.2",
        bytes=10_700_000,
        files=("taef2.safetensors",),
    ),
    _tiny(
        name="taew2_1",
        repo="Kijai/WanVideo_comfy",
        title="TAEHV for Wan 2.1's latents",
        purpose="--vae, previews: Qwen-Image",
        bytes=22_700_000,
        files=("taew2_1.safetensors",),
    ),
)
"""Tiny VAEs by the names that their makers gave them. Their licence is their maker's, madebyollin's; sizes follow from
the shapes, in 32 bits, taew2_1's in 16. The files themselves were not seen."""
CONFIGURATIONS = (
    "model_index.json",
    "scheduler/scheduler_config.json",
    *(f"{part}/config.json" for part in ("transformer", "text_encoder", "vae")),
)
TOKENIZER_FILES = (
    *(f"{name}.json" for name in ("vocab", "tokenizer", "tokenizer_config", "added_tokens")),
    "merges.txt",
    "special_tokens_map.json",
)


@dataclass(frozen=True, kw_only=True)
class ConfigDownload(Download):
    """The small files of a folder in diffusers layout with one text encoder."""

    bytes: int = 15_900_000
    license: str = "Apache-2.0"
    purpose: str = "tokenizer and configurations, where the weights are in other files"
    files: tuple[str, ...] = (*CONFIGURATIONS, *(f"tokenizer/{name}" for name in TOKENIZER_FILES))
