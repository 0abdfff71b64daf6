"""Small models in every layout of files, by family: what is drawn from them, what `info` says, what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import test_merged_files
from huggingface_hub import constants
from safetensors.torch import save_file

import qwenimg
from qwenimg.common.runtime import rates
from support import (
    tiny_auraflow,
    tiny_control,
    tiny_edit,
    tiny_flux,
    tiny_flux2,
    tiny_hunyuan,
    tiny_ldm,
    tiny_model,
    tiny_pixart,
    tiny_qwen21,
    tiny_sana,
    tiny_sd,
    tiny_sd3,
    tiny_zimage,
)
from support.cli_runner import cli
from support.comfy_files import LAYOUTS, comfy
from support.family_cases import BACKENDS, SEEN, given_a_picture, see_few_pixels
from support.folder_tensors import tensors
from support.gguf_files import fitting, write
from support.mflux_folders import save_as_mflux
from support.rules import ROOT
from support.tiny_layered import write_tiny_layered

Row = dict[str, str]
"""How a model is opened: the keywords of `qwenimg.load`, paths from the folder in which it was written."""
DATA = ROOT / "tests" / "golden"
MACHINES = DATA / "machines.json"
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 3, "guidance": 2.0}
PACKAGES = ("torch", "mlx", "numpy", "diffusers", "transformers", "safetensors", "tokenizers")


def machine() -> str:
    """The processor and the packages that decide the bits of latents."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return ", ".join([found[1] if found else platform.processor(), *(f"{name} {version(name)}" for name in PACKAGES)])


@contextlib.contextmanager
def inside(place: Path) -> Iterator[None]:
    """`place` as the working folder, nothing in the cache, and models that see few pixels."""
    with pytest.MonkeyPatch.context() as patch, tiny_qwen21.small_pictures():
        patch.chdir(place)
        patch.setattr(constants, "HF_HUB_CACHE", str(place / "hf"))
        patch.setattr(rates, "SECONDS", 0.01)
        see_few_pixels(patch)
        yield


# Files


def saved(name: str, values: dict[str, torch.Tensor], notes: dict[str, str] | None = None) -> str:
    """Write a file of `values` and return its name."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.clone().contiguous() for key, value in values.items()}, name, notes)
    return name


def as_gguf(name: str, values: dict[str, torch.Tensor], architecture: str | None, kind: str = "Q8_0") -> str:
    arrays = {key: value.float().numpy() for key, value in values.items() if value.is_floating_point()}
    write(Path(name), {key: (value, fitting(value, kind)) for key, value in arrays.items()}, architecture)
    return name


def foreign_transformer(
    folder: str, values: dict[str, torch.Tensor], architecture: str, layouts: tuple[str, ...] = ("newer", "convrot")
) -> dict[str, Row]:
    """A folder's transformer, in its authors' names, in the files that other programs make of it."""
    start = f"files/{folder}-"
    rows = {
        "authors' names": saved(f"{start}authors.safetensors", values),
        "ComfyUI's prefix": saved(f"{start}comfyui.safetensors", tiny_ldm.behind("model.diffusion_model.", values)),
        "GGUF F32": as_gguf(f"{start}f32.gguf", values, architecture, "F32"),
        "GGUF Q8_0": as_gguf(f"{start}q8.gguf", values, architecture),
    }
    for layout in layouts:
        made = comfy(values, layout, lambda name: "embed" not in name and "mod" not in name)
        rows[f"ComfyUI {layout}"] = saved(f"{start}{layout}.safetensors", made.tensors, made.notes)
    return {f"{folder}, transformer: {name}": {"model": folder, "transformer": file} for name, file in rows.items()}


def converted(folder: str) -> dict[str, Row]:
    rows = {}
    for bits in (4, 8):
        assert cli("convert", folder, f"{folder}-q{bits}", "-q", str(bits), "--quiet").code == 0
        rows[f"{folder}, converted -q {bits}"] = {"model": f"{folder}-q{bits}"}
    return rows


def own_parts(folder: str) -> dict[str, Row]:
    """Each part of a folder as a file given beside it."""
    rows = {}
    for part in parts_of(Path(folder)):
        if part not in ("unet", "transformer"):
            rows[f"{folder}, {part}: file"] = {
                "model": folder,
                part: saved(f"files/{folder}-{part}.safetensors", tensors(Path(folder, part))),
            }
    return rows


def parts_of(folder: Path) -> list[str]:
    return sorted({file.parent.name for file in folder.glob("*/*.safetensors")})


def plain(*folders: str) -> dict[str, Row]:
    return {f"{folder}, folder": {"model": folder} for folder in folders}


# Families


def qwen() -> dict[str, Row]:
    tiny_model.write_tiny_model(Path("qwen"))
    for kind in ("edit", "2509", "2511"):
        tiny_edit.write_tiny_edit(Path(f"qwen-{kind}"), kind)
    write_tiny_layered(Path("qwen-layered"))
    rows = plain("qwen", "qwen-edit", "qwen-2509", "qwen-2511", "qwen-layered") | own_parts("qwen")
    rows |= foreign_transformer("qwen", tensors(Path("qwen/transformer")), "qwen_image")
    Path("aio").mkdir()
    test_merged_files.Made(Path("aio"), "qwen-image")
    rows |= converted("aio/folder")
    rows["qwen, one file"] = {"model": "aio/qwen-image-turbo-aio.safetensors"}
    return rows


def qwen21() -> dict[str, Row]:
    tiny_qwen21.write_tiny_qwen21(Path("qwen21"))
    tiny_qwen21.write_tiny_qwen21(Path("qwen21-turbo"), tiny_qwen21.TURBO)
    return plain("qwen21", "qwen21-turbo") | converted("qwen21") | own_parts("qwen21")


def z_image() -> dict[str, Row]:
    tiny_zimage.write_tiny_zimage(Path("z-image"))
    rows = plain("z-image") | own_parts("z-image")
    rows |= foreign_transformer("z-image", tiny_zimage.transformer_file(tiny_zimage.tiny_dit()), "lumina2", LAYOUTS)
    Path("aio").mkdir()
    test_merged_files.Made(Path("aio"), "z-image")
    rows |= converted("aio/folder")
    rows["z-image, one file"] = {"model": "aio/z-image-turbo-aio.safetensors"}
    for bits in (None, 4):
        save_as_mflux(Path("z-image"), Path(f"z-image-mflux-{bits}"), "z-image", bits)
        rows[f"z-image, mflux {bits}"] = {"model": f"z-image-mflux-{bits}"}
    vae = tiny_ldm.vae_file(tiny_zimage.tiny_vae())
    return rows | {"z-image, vae: ldm": {"model": "z-image", "vae": saved("files/ae.safetensors", vae)}}


def flux() -> dict[str, Row]:
    from diffusers import FluxTransformer2DModel

    kinds = ("dev", "schnell", "undistilled", "kontext", "fill")
    for kind in kinds:
        tiny_flux.write_tiny_flux(Path(f"flux-{kind}"), kind)
    rows = plain(*(f"flux-{kind}" for kind in kinds)) | own_parts("flux-dev")
    for kind in ("dev", "fill"):
        model = FluxTransformer2DModel.from_pretrained(f"flux-{kind}/transformer")
        rows |= foreign_transformer(f"flux-{kind}", tiny_flux.transformer_file(model), "flux")
    tiny_flux.write_tiny_flux(Path("single"), "dev", single=True)
    saved("one/flux1-dev.safetensors", tiny_flux.one_file(Path("single")))
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(f"single/{name}", f"one/{name}")
    rows |= converted("single")
    rows["flux-dev, one file"] = {"model": "one/flux1-dev.safetensors"}
    for bits in (None, 4):
        out = Path(f"flux-dev-mflux-{bits}")
        save_as_mflux(Path("flux-dev"), out, "flux", bits)
        rows[f"flux-dev, mflux {bits}"] = {"model": str(out)}
    return rows


def flux2() -> dict[str, Row]:
    tiny_flux2.write_tiny_flux2(Path("flux2-klein"), distilled=True)
    tiny_flux2.write_tiny_flux2(Path("flux2-base"), distilled=False)
    rows = plain("flux2-klein", "flux2-base") | converted("flux2-klein") | own_parts("flux2-klein")
    rows |= foreign_transformer("flux2-klein", tiny_flux2.transformer_file(tiny_flux2.tiny_dit()), "flux2")
    save_as_mflux(Path("flux2-base"), Path("klein-base-mflux"), "flux2")
    return rows | {"flux2-base, mflux": {"model": "klein-base-mflux"}}


def sd3() -> dict[str, Row]:
    for kind in tiny_sd3.KINDS:
        tiny_sd3.write_tiny_sd3(Path(f"sd3-{kind}"), kind)
    rows = plain(*(f"sd3-{kind}" for kind in tiny_sd3.KINDS)) | own_parts("sd3-medium")
    rows |= foreign_transformer("sd3-medium", tiny_sd3.transformer_file(tiny_sd3.tiny_dit("medium")), "sd3")
    tiny_sd3.write_tiny_sd3(Path("wide"), wide=True)
    saved("one/sd3.5_medium.safetensors", tiny_sd3.one_file(tiny_sd3.models_of("medium", wide=True)))
    for tokens in Path("wide").glob("tokenizer*"):
        shutil.copytree(tokens, Path("one") / tokens.name)
    rows |= converted("wide")
    return rows | {"sd3-medium, one file": {"model": "one/sd3.5_medium.safetensors"}}


def stable_diffusion() -> dict[str, Row]:
    for kind in tiny_sd.TEXTS:
        tiny_sd.write_tiny_sd(Path(kind), kind)
    rows = plain("sd15", "sd21", "sdxl", "inpaint") | converted("sd15") | converted("sdxl") | own_parts("sdxl")
    rows["sdxl, refiner"] = {"model": "sdxl", "refiner": "refiner"}
    for kind in ("sd1", "sd2", "sdxl"):
        models = tiny_ldm.models_of(kind)
        tiny_ldm.pipeline(Path(f"ldm-{kind}"), kind, models)
        values = tiny_ldm.one_file(kind, models)
        rows[f"{kind}, one file"] = {"model": saved(f"ldm-{kind}/model.safetensors", values)}
        rows[f"{kind}, one file, GGUF"] = {"model": as_gguf(f"ldm-{kind}/model.gguf", values, None, "F32")}
    return rows


def auraflow() -> dict[str, Row]:
    sizes = tiny_auraflow.WIDE, tiny_auraflow.WIDE_TEXT, tiny_auraflow.WIDE_VAE
    tiny_auraflow.write_tiny_auraflow(Path("auraflow"), "5GB", *sizes)
    rows = plain("auraflow") | converted("auraflow") | own_parts("auraflow")
    given = tiny_auraflow.transformer_file(tiny_auraflow.tiny_dit(**sizes[0]))
    return rows | foreign_transformer("auraflow", given, "aura", ())


def hunyuan() -> dict[str, Row]:
    bert, t5 = tiny_hunyuan.WIDE_BERT, tiny_hunyuan.WIDE_TEXT
    for kind in tiny_hunyuan.KINDS:
        tiny_hunyuan.write_tiny_hunyuan(Path(kind), kind, "5GB", tiny_hunyuan.WIDE, bert, **t5)
    rows = plain(*tiny_hunyuan.KINDS) | converted("hunyuan") | own_parts("hunyuan")
    given = tiny_hunyuan.transformer_file(tiny_hunyuan.tiny_dit(**tiny_hunyuan.WIDE))
    return rows | foreign_transformer("hunyuan", given, "hydit", ())


def pixart() -> dict[str, Row]:
    for kind in tiny_pixart.KINDS:
        tiny_pixart.write_tiny_pixart(Path(kind), kind, "5GB", tiny_pixart.WIDE, **tiny_pixart.WIDE_TEXT)
    rows = plain(*tiny_pixart.KINDS) | converted("pixart") | own_parts("pixart")
    given = tiny_pixart.authors_file(tiny_pixart.tiny_dit(**tiny_pixart.WIDE))
    return rows | foreign_transformer("pixart", given, "pixart", ())


def sana() -> dict[str, Row]:
    for kind in tiny_sana.KINDS:
        tiny_sana.write_tiny_sana(Path(kind), kind, "5GB", tiny_sana.WIDE)
    given = tiny_sana.transformer_file(tiny_sana.tiny_dit(**tiny_sana.WIDE))
    return plain(*tiny_sana.KINDS) | own_parts("sana") | foreign_transformer("sana", given, "sana", ())


FAMILIES: dict[str, tuple[Callable[[], dict[str, Row]], str]] = {
    "qwen-image": (qwen, "qwen"),
    "qwen-image-2.1": (qwen21, "qwen21"),
    "z-image": (z_image, "z-image"),
    "flux": (flux, "flux-dev"),
    "flux2": (flux2, "flux2-klein"),
    "sd3": (sd3, "sd3-medium"),
    "stable-diffusion": (stable_diffusion, "sdxl"),
    "auraflow": (auraflow, "auraflow"),
    "hunyuan": (hunyuan, "hunyuan"),
    "pixart": (pixart, "pixart"),
    "sana": (sana, "sana"),
}
"""By family what writes its layouts, and the folder whose parts are broken."""


# What comes of them


def latents(row: Row, backend: str) -> dict[str, Any]:
    """The hash of the latents of two steps, and figures for another machine."""
    try:
        opened = qwenimg.load(**row, backend=backend, precision="fp32")
    except (qwenimg.ModelError, qwenimg.UsageError) as error:
        return {"refused": str(error)}
    with opened:
        pipe = given_a_picture(opened) if opened.model.inputs.fewest else opened
        asked = ASKED | ({"steps": 8} if row["model"] == "qwen21-turbo" else {})  # which draws in no other number
        made = np.ascontiguousarray(pipe("a red circle", negative_prompt="blue", **asked).latents, np.float32)
    some = [float(value) for value in made.ravel()[:: max(1, made.size // 8)][:8]]
    sums = {"mean": float(made.mean(dtype=np.float64)), "std": float(made.std(dtype=np.float64))}
    return {"sha256": hashlib.sha256(made.tobytes()).hexdigest(), "shape": list(made.shape), **sums, "values": some}


def told(*args: str) -> dict[str, Any]:
    """The exit code of a command and its lines, without what differs between machines and folders."""
    ran = cli(*args)
    text = f"{ran.out.decode()}{ran.err}".replace(str(Path.cwd()), "DIR").replace(str(Path.cwd().resolve()), "DIR")
    text = re.sub(r"[\d.,]+ (GB|MB|GiB|MiB|KB|bytes|seconds|minutes|s|min)\b", r"N \1", text)
    text = re.sub(r"\"(free|total|seconds|available)\w*\": [\d.]+", r'"\1": N', text)
    return {"exit": ran.code, "lines": text.splitlines() if ran.code or args[0] == "info" else []}


def linked(folder: str, out: str, part: str) -> Path:
    """Copy a folder as hard links and return where one part of it is."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out, copy_function=os.link)
    return Path(out, part)


BROKEN: dict[str, Callable[[Path, dict[str, torch.Tensor]], object]] = {
    "absent": lambda place, values: shutil.rmtree(place),
    "no weights": lambda place, values: None,
    "empty file": lambda place, values: weights(place).write_bytes(b""),
    "truncated": lambda place, values: weights(place).write_bytes(weights(place, values).read_bytes()[:-9]),
    "no header": lambda place, values: weights(place).write_bytes(b"not a file of weights, but text"),
    "lacks a tensor": lambda place, values: weights(
        place, {k: v for i, (k, v) in enumerate(values.items()) if i != len(values) // 2}
    ),
    "unknown tensor": lambda place, values: weights(place, values | {"something.x": torch.ones(2)}),
    "narrower": lambda place, values: weights(
        place, {k: v[: len(v) // 2] if v.ndim > 1 else v for k, v in values.items()}
    ),
    "int64": lambda place, values: weights(place, {k: v.long() for k, v in values.items()}),
    "config is no JSON": lambda place, values: replaced(place, values, "{"),
    "config is empty": lambda place, values: replaced(place, values, "{}"),
    "config of a list": lambda place, values: replaced(place, values, "[1]"),
}


def weights(place: Path, values: dict[str, torch.Tensor] | None = None) -> Path:
    name = "model" if place.name.startswith("text") else "diffusion_pytorch_model"
    path = place / f"{name}.safetensors"
    if values is not None:
        saved(str(path), values)
    return path


def replaced(place: Path, values: dict[str, torch.Tensor], config: str) -> None:
    weights(place, values)
    (place / "config.json").unlink()
    (place / "config.json").write_text(config)


def option(part: str) -> str:
    return "--text-encoder" if part.startswith("text_encoder") else f"--{part.replace('_', '-')}"


def refusals(base: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Commands on a family's folder that are refused; what they need is written as they come."""
    folder, draw = (
        Path(base),
        ("a ring", "--backend", "cpu", "--size", "48x32", "--steps", "1", "--seed", "1", "-o", "a.png", "--overwrite"),
    )
    strangers = {
        "Z-Image's transformer": saved(
            "files/strange-dit.safetensors", tiny_zimage.transformer_file(tiny_zimage.tiny_dit())
        ),
        "Qwen-Image's transformer": saved("files/strange-qwen.safetensors", tiny_model.tiny_dit().state_dict()),
        "CLIP": saved("files/strange-clip.safetensors", tiny_ldm.clip_file(tiny_ldm.tiny_texts("sd1")["text_encoder"])),
        "Stable Diffusion's VAE": saved("files/strange-vae.safetensors", tiny_ldm.vae_file(tiny_ldm.tiny_kl_vae())),
        "FLUX.2's VAE": saved("files/strange-flux2.safetensors", tiny_flux2.tiny_vae().state_dict()),
        "one tensor": saved("files/one.safetensors", {"x": torch.ones(2)}),
        "nothing": "files/nothing.safetensors",
    }
    half = {f"transformer.nowhere.{i}.to_q.lora_{ab}.weight": torch.ones(2, 2) for i in range(2) for ab in "AB"}
    loras = {
        "nothing": "files/nothing.safetensors",
        "one tensor": "files/one.safetensors",
        "of no layer": saved("files/lora.safetensors", half),
        "one half": saved("files/half.safetensors", dict(list(half.items())[:1])),
        "bad strength": "files/lora.safetensors:much",
        "a folder": base,
    }
    controls = {
        "of Qwen-Image": str(tiny_control.write_controlnet(Path("files/control"))),
        "patches of another width": saved("files/patches.safetensors", tiny_control.tiny_patches(width=44)),
        "one tensor": "files/one.safetensors",
        "nothing": "files/nothing.safetensors",
    }
    from PIL import Image

    Image.fromarray(SEEN).save("files/seen.png")
    for part in parts_of(folder):
        values = tensors(folder / part)
        for name, change in BROKEN.items():
            place = linked(base, "broken", part)
            for file in (*place.glob("*.safetensors"), *place.glob("*.index.json")):
                file.unlink()
            change(place, values)
            yield f"{part} {name}", (*draw, "-m", "broken")
        for name, file in strangers.items():
            if part != "unet":
                yield f"{part}: {name}", (*draw, "-m", base, option(part), file)
    place = linked(base, "broken", "")
    place.joinpath("model_index.json").unlink()
    yield "no model_index.json", (*draw, "-m", "broken")
    (place / "model_index.json").write_text('{"_class_name": "NoSuchPipeline"}')
    yield "unknown class", (*draw, "-m", "broken")
    for name, file in loras.items():
        yield f"LoRA: {name}", (*draw, "-m", base, "--lora", file)
    for name, file in controls.items():
        yield f"control: {name}", (*draw, "-m", base, "--control", f"{file}=files/seen.png")
    for words in WRONG:
        yield " ".join(words), (*draw, "-m", base, *words)


WRONG: tuple[tuple[str, ...], ...] = (
    ("--steps", "0"), ("--steps", "many"), ("--size", "0x16"), ("--size", "big"), ("--sampler", "nothing"),
    ("--schedule", "nothing"), ("--precision", "fp7"), ("--backend", "abacus"), ("--guidance", "nan"),
    ("--strength", "0.5"), ("--mask", "files/seen.png"), ("--image", "files/nothing.png"), ("--quantize", "5"),
    ("--refiner", "files/one.safetensors"), ("--variant", "nothing"), ("--layers", "3"), ("--clip-skip", "99"),
    ("--max-memory", "1KB"), ("--nothing",), ("--tokenizer", "files"), ("--step-cache", "much"),
)  # fmt: skip


def record(family: str, place: Path, *, drawing: bool = True) -> dict[str, Any]:
    """Everything about a family, made in the empty folder `place`."""
    make, base = FAMILIES[family]
    with inside(place):
        rows = make()
        found: dict[str, Any] = {"info": {}, "latents": {}, "refusals": {}}
        for path in sorted({path for row in rows.values() for path in row.values()}):
            found["info"][path] = told("info", path)
        for name, args in refusals(base):
            found["refusals"][name] = told(*args)
        for name, row in rows.items() if drawing else ():
            for backend in BACKENDS:
                found["latents"][f"{name}, {backend}"] = latents(row, backend)
    return found


def load(family: str) -> dict[str, Any]:
    return dict(json.loads((DATA / f"{family}.json").read_text(encoding="utf-8")))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each row that is not equal, absent or new."""
    lines = []
    for kind in old:
        for name in old[kind] | new[kind]:
            before, after = old[kind].get(name), new[kind].get(name)
            if before != after:
                both = (json.dumps(value, ensure_ascii=False) for value in (before, after))
                lines.append("\n  ".join((f"{kind}: {name}", *both)))
    return lines
