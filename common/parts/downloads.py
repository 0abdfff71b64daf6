"""Files that some models need and lack, by the names under which `qwenimg pull` downloads them."""

from __future__ import annotations

from dataclasses import dataclass


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
    controls: str = ""  # the family of models that they control, as a control network


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
