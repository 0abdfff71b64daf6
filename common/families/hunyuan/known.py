"""The Hunyuan-DiT models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import Download

NEWER, OLDER = "hunyuan-dit", "hunyuan-dit-1.1"
"""The folders of published configurations, and the variants: 1.2, and 1.0 and 1.1, which see sizes."""
LICENSE = "Tencent Hunyuan Community (beyond 100 M users a month: ask Tencent)"
_hunyuan = partial(KnownModel, family="hunyuan", license=LICENSE, dtype="float32", memory=12_000_000_000, guidance=5.0)
V12 = _hunyuan(
    name=NEWER,
    repo="Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers",
    title="Hunyuan-DiT 1.2, 1.5B",
    purpose="pictures of 1024 pixels from Chinese and English prompts",
    steps=50,
    bytes=14_400_000_000,
    aliases=("hunyuandit", "hunyuan-dit-1.2", "hunyuandit-v1.2"),
    files=("hunyuan_dit_1.2", "hunyuandit_1.2"),
)
V12_DISTILLED = _hunyuan(
    name="hunyuan-dit-distilled",
    folder=NEWER,
    repo="Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers-Distilled",
    title="Hunyuan-DiT 1.2 distilled, 1.5B",
    purpose="hunyuan-dit in 25 steps",
    steps=25,
    bytes=14_400_000_000,
    aliases=("hunyuan-dit-1.2-distilled",),
)
V11 = _hunyuan(
    name=OLDER,
    repo="Tencent-Hunyuan/HunyuanDiT-v1.1-Diffusers",
    title="Hunyuan-DiT 1.1, 1.5B",
    purpose="the model before 1.2, which sees the size of its pictures",
    steps=50,
    bytes=14_500_000_000,
    aliases=("hunyuandit-v1.1",),
    files=("hunyuan_dit_1.1", "hunyuandit_1.1"),
)
V11_DISTILLED = _hunyuan(
    name="hunyuan-dit-1.1-distilled",
    folder=OLDER,
    repo="Tencent-Hunyuan/HunyuanDiT-v1.1-Diffusers-Distilled",
    title="Hunyuan-DiT 1.1 distilled, 1.5B",
    purpose="hunyuan-dit-1.1 in 25 steps",
    steps=25,
    bytes=14_500_000_000,
)
V10 = _hunyuan(
    name="hunyuan-dit-1.0",
    folder=OLDER,
    repo="Tencent-Hunyuan/HunyuanDiT-Diffusers",
    title="Hunyuan-DiT 1.0, 1.5B",
    purpose="the first model, of the form of 1.1",
    steps=50,
    bytes=14_500_000_000,
    files=("hunyuan_dit_1.0", "hunyuandit_1.0"),
)
KNOWN = (V12, V12_DISTILLED, V11, V11_DISTILLED, V10)
SMALL_FILES = Download(
    name="hunyuan-dit-tokenizers",
    repo=V12.repo or "",
    title="the vocabularies of BERT and mT5",
    bytes=4_700_000,
    license=LICENSE,
    purpose="the words of Hunyuan-DiT, for a model in one file",
    files=(
        "tokenizer/vocab.txt",
        "tokenizer_2/spiece.model",
        *(f"{folder}/tokenizer_config.json" for folder in ("tokenizer", "tokenizer_2")),
    ),
    family="hunyuan",
)
