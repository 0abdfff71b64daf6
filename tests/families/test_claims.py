"""Which families claim a file or a folder: those that use it, whatever the order in which they are asked."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import catalog, file_kind, registry
from qwenimg.common.families.anima.checkpoint import CONDITIONER
from qwenimg.common.families.family import Family
from qwenimg.common.families.registry import FAMILIES
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.hub.describe import layers_of_known
from qwenimg.common.hub.describe_lora import describe_lora
from qwenimg.common.networks.denoisers import (
    anima_dit,
    aura_dit,
    aura_names,
    chroma_names,
    flux2_names,
    flux3_names,
    flux_names,
    hunyuan_dit,
    hunyuan_names,
    krea2_dit,
    longcat_dit,
    lumina_dit,
    lumina_names,
    ovis_dit,
    ovis_names,
    pixart_dit,
    pixart_names,
    qwen21_names,
    sana_dit,
    sana_names,
    zimage_names,
)
from qwenimg.common.weights.keys import Place

ROWS = tuple(FAMILIES)
ORDERS = [ROWS[::-1], *(random.Random(seed).sample(ROWS, len(ROWS)) for seed in range(2))]
AUTHORS = {
    "flux": flux_names.place,
    "flux2": flux2_names.place,
    "flux2-dev": flux2_names.place,
    "flux3": flux3_names.place,
    "chroma": chroma_names.place,
    "longcat": lambda name: flux_names.place(longcat_dit.rename(name)),
    "ovis": lambda name: ovis_names.place(ovis_dit.rename(name)),
    "z-image": zimage_names.place,
    "qwen-image-2.1": qwen21_names.place,
    "krea2": lambda name: Place(krea2_dit.authors_name(name)),
    "auraflow": lambda name: aura_names.place(aura_dit.rename(name), aura_dit.AuraConfig()),
    "lumina": lambda name: lumina_names.place(name, lumina_dit.LuminaConfig()),
    "pixart": lambda name: pixart_names.place(pixart_dit.rename(name)),
    "sana": lambda name: sana_names.place(sana_dit.rename(name), sana_dit.SanaConfig()),
    "hunyuan": lambda name: hunyuan_names.place(hunyuan_dit.rename(name)),
    "anima": lambda name: Place(anima_dit.authors_name(name)),
}
GGUF = {"qwen-image-2.1": ("qwen_image",), "flux": ("flux",), "flux2": ("flux", "flux2"), "z-image": ("lumina2",),
        "flux2-dev": ("flux", "flux2"), "flux3": ("flux", "flux3"), "longcat": ("flux",), "ovis": ("flux", "ovis"),
        "chroma": ("flux",), "krea2": ("krea2",), "anima": ("cosmos",), "lumina": ("lumina2",),
        "pixart": ("pixart",), "auraflow": ("aura",), "sana": ("sana",), "hunyuan": ("hydit",)}  # fmt: skip
"""The architectures that programs write for each family's transformer."""
SHARED = {
    "flux-schnell text_encoder": {"stable-diffusion", "sd3", "flux"},  # CLIP-L
    "sd15 text_encoder": {"stable-diffusion", "sd3", "flux"},
    "sdxl text_encoder_2": {"stable-diffusion", "sd3", "cascade"},  # CLIP-G
    "flux-schnell text_encoder_2": {"sd3", "flux", "chroma", "pixart", "hunyuan"},  # T5
    "sd3-medium text_encoder_3": {"sd3", "flux", "chroma", "pixart", "hunyuan"},
    "z-image-turbo text_encoder": {"z-image", "flux2", "anima", "ovis"},  # Qwen3
    "flux2-klein-9b text_encoder": {"z-image", "flux2", "anima", "ovis"},
    "anima text_encoder": {"z-image", "flux2", "anima", "ovis"},
    "lumina-image-2 text_encoder": {"lumina", "sana"},  # Gemma 2
    "auraflow text_encoder": {"auraflow"},  # UMT5
    "sana-1.5 text_encoder": {"lumina", "sana"},
    "sana-1.5 vae": {"sana"},
    "sd3-medium vae": {"sd3", "z-image", "lumina", "flux", "longcat", "ovis", "chroma"},
    "z-image-turbo vae": {"sd3", "z-image", "lumina", "flux", "longcat", "ovis", "chroma"},
    "lumina-image-2 vae": {"sd3", "z-image", "lumina", "flux", "longcat", "ovis", "chroma"},
    "sd15 vae": {"stable-diffusion", "pixart", "auraflow", "hunyuan"},
    "auraflow vae": {"stable-diffusion", "pixart", "auraflow", "hunyuan"},
    "flux2-klein-4b vae": {"flux2", "flux2-dev", "flux3", "ernie"},
    "flux3-klein vae": {"flux2", "flux2-dev", "flux3", "ernie"},
    "flux3-klein text_encoder": {"qwen-image-2.1", "flux3", "krea2"},  # Qwen3-VL
    "flux2-dev text_encoder": {"flux2-dev"},  # Mistral's, of different widths
    "ernie-image-turbo text_encoder": {"ernie"},
    "qwen-image vae": {"qwen-image", "krea2", "anima"},
    "qwen-image-edit-2511 text_encoder": {"qwen-image", "longcat"},
    "qwen-image-2.1 text_encoder": {"qwen-image-2.1", "flux3", "krea2"},
    "qwen-image-2.1 vae": {"qwen-image-2.1"},
}


def header(names: dict[str, tuple[int, ...]], architecture: str | None = None) -> Header:
    """The header of a file with tensors of these names and shapes: GGUF's, if an architecture is named."""
    tensors = {name: Stored("F16", shape, 0, 0) for name, shape in names.items()}
    notes = {} if architecture is None else {gguf.ARCHITECTURE: architecture}
    form: Any = "safetensors" if architecture is None else "GGUF"
    return Header(file=cast(Any, None), tensors=tensors, metadata=notes, format=form)


def parts() -> Iterator[tuple[str, Family, str, dict[str, tuple[int, ...]]]]:
    """Every component of every known model: model and component, family, component, names and shapes."""
    seen = list[object]()
    for known in catalog.KNOWN.values():
        opened = registry.published(known)
        networks = {network.name: network for network in opened.family.networks} if opened else {}
        for name, one in opened.checkpoint.components.items() if opened else ():
            if (like := (opened.family.name, name, one.config)) in seen:
                continue
            seen.append(like)
            published = networks[one.network].published
            yield f"{known.name} {name}", opened.family, name, {published(key): s for key, s in one.plan.shapes.items()}


PARTS = list(parts())


def claim(file: Header, order: Any = FAMILIES) -> tuple[str, set[str]] | None:
    kind = file_kind.identify(file, order)
    return None if kind is None else (kind.option, {family.name for family in kind.families})


def test_every_part_is_claimed_by_all_families_that_use_it() -> None:
    seen = set()
    for title, family, part, names in PARTS:
        if part == CONDITIONER:
            assert claim(header(names)) is None, "no option takes it alone"
            continue
        option = "transformer" if part == family.denoiser else part.rstrip("_23")
        option = "model" if part == "decoder" else option  # Stable Cascade's: its file is opened beside the prior's
        told = claim(header(names))
        said = f"{title} is claimed as {told}; the `part` of its family's row returns {option!r} for it"
        assert told is not None and told[0] == option and family.name in told[1], said
        if title in SHARED:
            seen.add(title)
            assert told[1] == SHARED[title], f"SHARED has other families of {title}: {told[1] ^ SHARED[title]}"
    assert seen == SHARED.keys()


@pytest.mark.sample(0)
def test_their_order_decides_nothing() -> None:
    for title, family, part, names in PARTS:
        files = [header(names)]
        if part == family.denoiser and family.name in AUTHORS:
            places: list[Place] = [AUTHORS[family.name](name) for name in names]
            theirs = {place.key: shape for place, shape in zip(places, names.values(), strict=True)}
            files += [header(theirs), *(header(theirs, one) for one in (*GGUF[family.name], "pig"))]
            assert all(claim(file) == ("transformer", {family.name}) for file in files), title
        for file in files:
            assert all(claim(file, order) == claim(file) for order in ORDERS), title
    assert claim(header({"x": (1,)}, "flux")) is None, "a name alone is no claim"


def test_a_folder_is_told_by_its_class_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = [name for family in FAMILIES for start in family.refused for name in (start, f"{start}Pipeline")]
    classes += [name for family in FAMILIES for name in family.pipelines]

    def told(name: str) -> str:
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
        try:
            return registry.of_folder(tmp_path).name
        except ModelError as error:
            return str(error)

    expected = {name: told(name) for name in classes}
    assert expected["Flux2KleinKVPipeline"] == "flux2" and expected["FluxKontextPipeline"] == "flux"
    assert expected["FluxControlPipeline"] == "flux" and "beside FLUX.1" in expected["FluxControlNetPipeline"]
    for order in ORDERS:
        monkeypatch.setattr(registry, "FAMILIES", tuple(order))
        assert {name: told(name) for name in classes} == expected


TITLES = {
    "qwen-image": "Qwen-Image",
    "z-image": "Z-Image",
    "flux2-klein-4b": "FLUX.2 klein",
    "flux2-dev": "FLUX.2 dev",
    "flux3-klein": "FLUX.3 Image Klein",
    "flux-dev": "Flux.1",
    "chroma1-hd": "Chroma",
    "ernie-image": "ERNIE-Image",
    "krea-2-raw": "Krea 2",
    "anima": "Anima",
    "lumina-image-2": "Lumina-Image 2.0",
    "auraflow": "AuraFlow",
    "sana-1.5": "SANA",
    "ovis-image": "Ovis-Image",
    "pixart-sigma": "PixArt",
    "hunyuan-dit": "Hunyuan-DiT",
    "longcat-image": "Flux.1 or LongCat-Image",  # by the names in the first blocks
    "sd3.5-large": "Stable Diffusion 3",
    "sd15": "Stable Diffusion 1.x",
    "sdxl": "SDXL",
}


# Which differ in the widths of such layers alone
SIMILAR = ("FLUX.2 klein or FLUX.2 dev", "Z-Image or Lumina-Image 2.0", "Anima or PixArt or Hunyuan-DiT")
FLUX_1 = "Flux.1 or LongCat-Image or Ovis-Image"  # by the names in the first blocks, if no width tells them apart


@pytest.mark.sample(0)
def test_a_lora_fits_the_family_whose_layers_it_has(tmp_path: Path) -> None:
    """Also when it is of another width than the published models."""
    layers = layers_of_known()
    for model, title in TITLES.items():
        names = layers[model][1][0].names  # of the denoiser
        alone = [targets[0] for targets in names.values() if len(targets) == 1 and targets[0].rows.of == 1]
        chosen = {target.name.removesuffix(".weight"): target for target in alone if ".0." in target.name}
        for wider in (0, 1):
            tensors = {}
            for name, target in chosen.items():
                outputs, inputs, *kernel = target.shape
                tensors[f"{name}.lora_A.weight"] = np.ones((1, inputs + wider, *kernel), np.float16)
                tensors[f"{name}.lora_B.weight"] = np.ones((outputs, 1, *[1 for _ in kernel]), np.float16)
            save_file(tensors, tmp_path / "lora.safetensors")
            lines = describe_lora(tmp_path / "lora.safetensors", layers).lines
            print(model, *lines, sep="\n")
            of_either = wider and any(title in pair and lines[2] == f"fits: {pair}" for pair in SIMILAR)
            of_either |= wider and model in ("longcat-image", "ovis-image") and lines[2] == f"fits: {FLUX_1}"
            sizes = wider and title.startswith("S") and "channels" in lines[2]
            assert lines[2] == f"fits: {title}" or of_either or sizes
