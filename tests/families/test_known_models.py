"""Models that are known by name: their defaults are those of their files, their licenses, other spellings of their
names, and what is said before and after a download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_hub import REPO
from support.hub_cases import check_complete, pulled
from support.published import write_published

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.qwen_image import variants
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.families.stable_diffusion.kinds import KINDS
from qwenimg.common.hub import requirements
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.vaes import qwen_vae


def shift(value: float, known: Any, model: Any, folder: Path) -> None:
    assert model.checkpoint.scheduler.shift == value


def opens(known: Any, model: Any, folder: Path) -> None:
    """A folder with the model's files is that model."""
    write_published(folder, known.name)
    with pytest.raises(ModelError, match="tokenizer"):
        registry.open_model(folder).checkpoint.read_tokenizers()
    opened = registry.open_model(folder)
    assert opened.defaults() == model.defaults()
    assert opened.checkpoint["transformer"].plan.shapes == model.checkpoint["transformer"].plan.shapes


def repo(name: str, known: Any, model: Any, folder: Path) -> None:
    assert known.repo.lower() == f"black-forest-labs/{name}"


def gated(word: str, known: Any, model: Any, folder: Path) -> None:
    assert known.gated and word in known.purpose and catalog.refusal(known.repo or "") is None
    assert model.defaults() == replace(model.family.defaults(model.checkpoint), width=1024, height=1024)


def krea2(known: Any, model: Any, folder: Path) -> None:
    levels, turbo = model.checkpoint.scheduler, known.name == "krea-2-turbo"
    assert known.gated and model.checkpoint.distilled is turbo and "revenue" in known.license
    assert (levels.base_shift, levels.max_shift, levels.max_image_seq_len) == (1.15 if turbo else 0.5, 1.15, 6400)
    assert model.checkpoint["transformer"].plan.parameters == 12_820_073_036


def size(parameters: int, known: Any, model: Any, folder: Path) -> None:
    """Counted on the reference class, in millions."""
    assert round(model.checkpoint["transformer"].plan.parameters / 1e6) == parameters and not known.gated


def longcat(variant: str, known: Any, model: Any, folder: Path) -> None:
    size(6271, known, model, folder)
    assert model.checkpoint.variant == variant and ("visual" in str(model.checkpoint["text_encoder"].plan.shapes)) == (
        variant == "edit"
    )


def pixart(variant: str, parameters: int, known: Any, model: Any, folder: Path) -> None:
    checkpoint = model.checkpoint
    assert checkpoint.variant == variant and checkpoint["transformer"].plan.parameters == parameters
    assert checkpoint["vae"].config.scaling_factor == (0.13025 if variant == "pixart-sigma" else 0.18215)
    assert checkpoint.distilled is (known.name == "pixart-lcm")


def hunyuan(variant: str, parameters: int, known: Any, model: Any, folder: Path) -> None:
    checkpoint = model.checkpoint
    assert checkpoint.variant == variant and checkpoint["transformer"].plan.parameters == parameters
    assert checkpoint.scheduler.beta_end == (0.018 if variant == "hunyuan-dit" else 0.03)
    assert checkpoint.distilled is ("distilled" in known.name)


def edits(kind: variants.QwenVariant, known: Any, model: Any, folder: Path) -> None:
    assert model.checkpoint.variant == kind.name
    assert model.checkpoint["transformer"].config.zero_cond_t is kind.zero_cond_t
    assert model.checkpoint["text_encoder"].plan.parameters == 8_292_166_656 - 152064 * 3584
    defaults = model.defaults()
    assert (defaults.strength, defaults.mask_strength, defaults.edited) == (1.0, 0.6, 1024**2)


def layers(known: Any, model: Any, folder: Path) -> None:
    assert known.width == 640 and model.checkpoint.variant == "layered" and model.defaults().edited == 640**2
    config, vae = model.checkpoint["transformer"].config, model.checkpoint["vae"].config
    assert config.use_additional_t_cond and config.use_layer3d_rope and not config.zero_cond_t
    stored = sum(int(np.prod(shape)) for shape in qwen_vae.manifest(vae).values())
    assert vae.input_channels == 4 and round(stored / 1e3) == 126_898


# By name: family, a part of the license, steps and guidance; what else is so of it and of its published files.
Row = tuple[str, str, int, float, Callable[[Any, Any, Path], None]]
STABILITY, BFL = "Stability AI Community", "FLUX Non-Commercial"
KNOWN: dict[str, Row] = {
    "z-image-turbo": ("z-image", "Apache-2.0", 8, 0.0, partial(shift, 3.0)),
    "z-image": ("z-image", "Apache-2.0", 50, 4.0, partial(shift, 6.0)),
    "sd3-medium": ("sd3", STABILITY, 28, 7.0, opens),
    "sd3.5-medium": ("sd3", STABILITY, 40, 4.5, opens),
    "sd3.5-large": ("sd3", STABILITY, 28, 3.5, opens),
    "sd3.5-large-turbo": ("sd3", STABILITY, 4, 0.0, opens),
    "flux2-klein-4b": ("flux2", "Apache-2.0", 4, 1.0, partial(repo, "flux.2-klein-4b")),
    "flux2-klein-9b": ("flux2", BFL, 4, 1.0, partial(repo, "flux.2-klein-9b")),
    "flux2-klein-9b-kv": ("flux2", BFL, 4, 1.0, partial(repo, "flux.2-klein-9b-kv")),
    "flux2-klein-base-4b": ("flux2", "Apache-2.0", 50, 4.0, partial(repo, "flux.2-klein-base-4b")),
    "flux2-klein-base-9b": ("flux2", BFL, 50, 4.0, partial(repo, "flux.2-klein-base-9b")),
    "flux2-dev": ("flux2-dev", BFL, 50, 4.0, partial(repo, "flux.2-dev")),
    "flux3-klein": ("flux3", "non-commercial", 16, 1.0, partial(repo, "flux-3-image-klein")),
    "flux3-klein-base": ("flux3", "non-commercial", 50, 4.0, partial(repo, "flux-3-image-klein-base")),
    "ernie-image": ("ernie", "Apache-2.0", 50, 4.0, partial(shift, 4.0)),
    "ernie-image-turbo": ("ernie", "Apache-2.0", 8, 1.0, partial(shift, 4.0)),
    "krea-2-turbo": ("krea2", "revenue limit", 8, 0.0, krea2),
    "krea-2-raw": ("krea2", "revenue limit", 52, 3.5, krea2),
    "longcat-image": ("longcat", "Apache-2.0", 50, 4.0, partial(longcat, "text")),
    "longcat-image-edit": ("longcat", "Apache-2.0", 50, 4.5, partial(longcat, "edit")),
    "chroma1-hd": ("chroma", "Apache-2.0", 40, 3.0, partial(size, 8900)),
    "lumina-image-2": ("lumina", "Gemma", 50, 4.0, partial(shift, 6.0)),
    "netayume-lumina": ("lumina", "Gemma", 30, 4.0, partial(shift, 6.0)),
    "pixart-sigma": ("pixart", "RAIL++", 20, 4.5, partial(pixart, "pixart-sigma", 610_856_096)),
    "pixart-alpha": ("pixart", "RAIL++", 20, 4.5, partial(pixart, "pixart-alpha", 611_349_152)),
    "pixart-lcm": ("pixart", "RAIL++", 4, 1.0, partial(pixart, "pixart-alpha", 611_349_152)),
    "auraflow": ("auraflow", "Apache-2.0", 50, 3.5, partial(shift, 1.73)),
    "auraflow-0.2": ("auraflow", "Apache-2.0", 50, 3.5, partial(shift, 1.73)),
    "auraflow-0.1": ("auraflow", "Apache-2.0", 50, 3.5, partial(shift, 1.73)),
    "pony-v7": ("auraflow", "Pony", 30, 3.5, partial(shift, 1.73)),
    **{
        name: ("sana", "NVIDIA non-commercial", steps, 4.5, partial(shift, value))
        for name, steps, value in (
            ("sana-1.5", 20, 3.0),
            ("sana-1.5-4.8b", 20, 3.0),
            ("sana-1.6b", 20, 3.0),
            ("sana-0.6b", 20, 3.0),
            ("sana-sprint", 2, 1.0),
            ("sana-sprint-0.6b", 2, 1.0),
        )
    },
    "hunyuan-dit": ("hunyuan", "Tencent", 50, 5.0, partial(hunyuan, "hunyuan-dit", 1_499_952_032)),
    "hunyuan-dit-distilled": ("hunyuan", "Tencent", 25, 5.0, partial(hunyuan, "hunyuan-dit", 1_499_952_032)),
    "hunyuan-dit-1.1": ("hunyuan", "Tencent", 50, 5.0, partial(hunyuan, "hunyuan-dit-1.1", 1_516_534_048)),
    "hunyuan-dit-1.1-distilled": ("hunyuan", "Tencent", 25, 5.0, partial(hunyuan, "hunyuan-dit-1.1", 1_516_534_048)),
    "hunyuan-dit-1.0": ("hunyuan", "Tencent", 50, 5.0, partial(hunyuan, "hunyuan-dit-1.1", 1_516_534_048)),
    "anima": ("anima", "Non-Commercial", 40, 4.0, partial(shift, 3.0)),
    "flux-kontext": ("flux", "Non-Commercial", 28, 2.5, partial(gated, "edits")),
    "flux-fill": ("flux", "Non-Commercial", 50, 30.0, partial(gated, "masked")),
    "flux-canny": ("flux", "Non-Commercial", 50, 30.0, partial(gated, "edges")),
    "flux-depth": ("flux", "Non-Commercial", 30, 10.0, partial(gated, "depth")),
    "qwen-image-edit": ("qwen-image", "", 50, 4.0, partial(edits, variants.EDIT)),
    "qwen-image-edit-2509": ("qwen-image", "", 40, 4.0, partial(edits, variants.EDIT_2509)),
    "qwen-image-edit-2511": ("qwen-image", "", 40, 4.0, partial(edits, variants.EDIT_2511)),
    "qwen-image-layered": ("qwen-image", "", 50, 4.0, layers),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.sample(7)
def test_names_have_the_defaults_of_their_files(name: str, tmp_path: Path) -> None:
    known, (family, license, steps, guidance, more) = catalog.KNOWN[name], KNOWN[name]
    model = registry.published(known)
    assert model is not None and known.family == family and license in known.license
    usual, fields = model.defaults(), ("width", "height", "steps", "guidance", "negative_prompt")
    assert [getattr(known, field) for field in fields] == [getattr(usual, field) for field in fields]
    negative = " " if family == "qwen-image" else ""
    assert (known.steps, known.guidance, known.negative_prompt) == (steps, guidance, negative)
    assert known.width == known.height == 1024 or family == "qwen-image"
    more(known, model, tmp_path / name)


@pytest.mark.parametrize(("name", "kind"), [("sd15", "sd1"), ("sdxl", "sdxl"), ("sdxl-turbo", "sdxl")])
def test_published_latents_have_the_scale_of_those_of_files(name: str, kind: str) -> None:
    """SDXL's were those of Stable Diffusion 1.5."""
    model = registry.published(catalog.KNOWN[name])
    assert model is not None and model.checkpoint["vae"].config.scaling_factor == KINDS[kind].scaling_factor


SPELLINGS = {
    "Z-Image-Turbo": "z-image-turbo", "zimage-turbo": "z-image-turbo", "tongyi-mai/z-image-turbo": "z-image-turbo",
    "Z-Image": "z-image", "z-image-base": "z-image", "Tongyi-MAI/Z-Image": "z-image",
    "sd3": "sd3-medium", "SD3.5-Large": "sd3.5-large", "sd35-large-turbo": "sd3.5-large-turbo",
    "stabilityai/stable-diffusion-3.5-medium": "sd3.5-medium",
    "FLUX.2-klein-4B": "flux2-klein-4b", "black-forest-labs/flux.2-klein-base-9b": "flux2-klein-base-9b",
    "flux-3-image-klein": "flux3-klein", "black-forest-labs/FLUX-3-image-klein-base": "flux3-klein-base",
    "baidu/ERNIE-Image-Turbo": "ernie-image-turbo", "ERNIE-Image": "ernie-image",
    "krea/krea-2-turbo": "krea-2-turbo", "Krea-2": "krea-2-turbo", "krea2-raw": "krea-2-raw",
    "lumina2": "lumina-image-2", "Alpha-VLLM/Lumina-Image-2.0": "lumina-image-2", "NetaYume": "netayume-lumina",
    "PixArt-alpha/PixArt-XL-2-1024-MS": "pixart-alpha", "pixart": "pixart-sigma",
    "PixArt-alpha/PixArt-LCM-XL-2-1024-MS": "pixart-lcm",
    "fal/AuraFlow": "auraflow-0.1", "AuraFlow-v0.3": "auraflow", "purplesmartai/pony-v7-base": "pony-v7",
    "sana": "sana-1.5", "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": "sana-1.5-4.8b",
    "Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers": "hunyuan-dit", "HunyuanDiT": "hunyuan-dit",
    "circlestone-labs/Anima-Base-v1.0-Diffusers": "anima", "Anima-Base": "anima",
    "black-forest-labs/FLUX.2-dev": "flux2-dev", "flux.2-dev": "flux2-dev",
    "flux2-klein": "flux2-klein-4b", "flux.1-fill-dev": "flux-fill",
    "black-forest-labs/FLUX.1-Canny-dev": "flux-canny", "FLUX.1-Depth-dev": "flux-depth",
    "Qwen/Qwen-Image-Edit-2509": "qwen-image-edit-2509", "Qwen/Qwen-Image-Layered": "qwen-image-layered",
}  # fmt: skip


@pytest.mark.parametrize("given", SPELLINGS)
def test_names(given: str) -> None:
    known = catalog.find(given)
    assert known is not None and known.name == SPELLINGS[given]


@pytest.mark.parametrize(
    ("name", "memory", "license"),
    [
        ("z-image-turbo", "14.0 GB", "Apache-2.0"),
        ("z-image", "14.0 GB", "Apache-2.0"),
        ("sd3.5-large", "12.5 GB", STABILITY),
        ("flux2-klein-9b", "20.2 GB", BFL),
    ],
)
def test_a_pull_names_memory_and_license_first(name: str, memory: str, license: str) -> None:
    text = requirements.machine_text(catalog.KNOWN[name], 0)
    assert f"{memory} of memory on a GPU or a Mac" in text and license in text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("z-image", "pipeline: Z-Image-Turbo, text to image"),
        ("flux2-klein", "FLUX.2 klein"),
        ("flux2-base", "FLUX.2 klein"),
        ("flux2-dev", "license: FLUX Non-Commercial"),
        ("anima", "license: CircleStone Labs Non-Commercial"),
    ],
)
def test_info_describes_a_folder(tiny: dict[str, Path], kind: str, words: str) -> None:
    description = describe(tiny[kind])
    assert not description.faults and any(words in line for line in description.lines)
    for name in ("transformer", "text_encoder", "vae"):
        assert any(line.startswith(f"{name}: ") and "parameters" in line for line in description.lines)


@pytest.mark.parametrize(
    ("name", "kind", "guidance"), [("z-image", "z-image", 4.0), ("anima", "anima", 4.0), ("sd3.5-medium", "sd3", 4.5)]
)
@pytest.mark.sample(1)
def test_a_pulled_model_has_the_defaults_of_its_name(
    fake, cache, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, kind: str, guidance: float
) -> None:
    """Also where its files are the other variant's, as a repository may change. With all text encoders and tokenizers
    that it has; without the files of T5 it is incomplete."""
    files = {path.relative_to(tiny[kind]).as_posix(): path for path in tiny[kind].rglob("*") if path.is_file()}
    fake.files = {name: path.read_bytes() for name, path in files.items() if not name.endswith(".jinja")}
    monkeypatch.setitem(catalog.KNOWN, name, replace(catalog.KNOWN[name], repo=REPO))
    folder, _, _ = pulled(name)
    check_complete(folder, fake.files)
    model = registry.published(catalog.KNOWN[name])
    with qwenimg.load(name, backend="cpu", precision="fp32") as pipe:
        assert model is not None and pipe.defaults == model.defaults()
        result = pipe("a ring", width=32, height=32, steps=1, seed=1)
    assert result.recipe["model"] == name and result.recipe["guidance"] == guidance
    if (folder / T5).exists():
        next((folder / T5).glob("*.safetensors")).unlink()
        with pytest.raises(ModelError, match=f"incomplete, it lacks {T5}/"):
            qwenimg.load(name, backend="cpu")
