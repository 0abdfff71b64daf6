"""`qwenimg models`, names that are nearly right, and what a pull says before gigabytes come."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support import tiny_ldm
from support.fake_hub import COMMIT, REPO
from support.hub_cases import FIRST, Usage, pulled
from support.refusals import refused
from support.tiny_clip import write_tiny_clip_tokenizer
from support.tiny_sd import write_tiny_sd

from qwenimg.cli.commands.models import models
from qwenimg.common.base import hf_cache
from qwenimg.common.families import catalog, repository
from qwenimg.common.hub import requirements, resolve
from qwenimg.common.hub.pull import pull
from qwenimg.common.parts.downloads import CLIP_TOKENIZER

CONTROLS = (
    "qwen-image-controlnet-union", "qwen-image-controlnet-inpainting", "qwen-image-patches-canny",
    "qwen-image-patches-depth", "qwen-image-patches-inpaint", "qwen-image-in-context-control-union",
    "z-image-controlnet-union", "z-image-controlnet-union-1",
    "flux-canny-lora", "flux-depth-lora",
    *(f"flux-controlnet-{kind}" for kind in ("union-pro-2", "union-pro", "union", "canny", "upscaler", "normals")),
    *(f"sd15-controlnet-{kind}" for kind in ("canny", "depth", "openpose", "lineart", "softedge", "scribble", "tile",
                                             "inpaint")),
    "sdxl-controlnet-canny", "sdxl-controlnet-depth", "sdxl-controlnet-union", "sdxl-controlnet-union-promax",
)  # fmt: skip
ADAPTERS = (
    "flux-redux",
    "ip-adapter_sd15", "ip-adapter-plus_sd15", "ip-adapter-plus-face_sd15", "ip-adapter-full-face_sd15",
    "ip-adapter_sdxl_vit-h", "ip-adapter-plus_sdxl_vit-h", "ip-adapter-plus-face_sdxl_vit-h", "ip-adapter_sdxl",
)  # fmt: skip
PIECES = (
    "clip-tokenizer", "t5-tokenizer", "qwen-image-files", "qwen-image-2.1-files", "z-image-files", "flux2-files",
    "flux2-dev-files", "flux3-files", "longcat-files", "ernie-files", "krea2-files",
    "anima-files", "ovis-files", "lumina-files", "auraflow-files", "sana-files", "hunyuan-dit-tokenizers",
    "stable-cascade-prior", *CONTROLS, *ADAPTERS, "taesd", "taesdxl", "taesd3", "taef1", "taef2", "taew2_1",
)  # fmt: skip


def listed() -> dict[str, dict]:
    told = CliRunner().invoke(models, ["--json"], catch_exceptions=False)
    assert told.exit_code == 0 and told.stdout.count("\n") == 1
    found = json.loads(told.stdout)
    assert found["cache"] == str(hf_cache.cache_folder())
    return {entry["name"]: entry for entry in found["models"]}


def table() -> list[str]:
    told = CliRunner().invoke(models, [], catch_exceptions=False)
    print(told.stdout)
    assert told.exit_code == 0 and all(line.isprintable() for line in told.stdout.splitlines())
    return told.stdout.splitlines()


def test_checkpoints_of_a_folder_have_their_type(tmp_path) -> None:
    """By the header alone: of a model in one file, of a UNet alone, and of a folder."""
    place, titles = (
        tmp_path / "checkpoints",
        {"sd1": "1.x", "sd2": "2.x", "sdxl": "XL base", "sdxl-refiner": "XL refiner"},
    )
    place.mkdir()
    for kind in titles:
        save_file(tiny_ldm.one_file(kind, tiny_ldm.models_of(kind)), place / f"{kind}.safetensors")
    save_file(tiny_ldm.one_file("sd1", tiny_ldm.models_of("sd1", 9)), place / "paint.safetensors")
    unet = tiny_ldm.unet_file(tiny_ldm.tiny_unet("sdxl"))
    save_file(tiny_ldm.behind("model.diffusion_model.", unet), place / "unet.safetensors")
    save_file({**unet, "edm_vpred.sigma_max": torch.ones(1)}, place / "cosxl.safetensors")
    write_tiny_sd(place / "folder", "sdxl")
    ran = CliRunner().invoke(models, ["--models-dir", str(tmp_path), "--json"], catch_exceptions=False)
    rows = {row["name"].removesuffix(".safetensors"): row for row in json.loads(ran.stdout)["files"]}
    found = {name: (row["kind"], row["type"]) for name, row in rows.items() if not row["fault"]}
    print(*found.items(), sep="\n")
    assert found == {
        **{kind: ("model", f"Stable Diffusion {title}") for kind, title in titles.items()},
        "paint": ("model", "Stable Diffusion 1.x for inpainting"),
        "unet": ("transformer", "Stable Diffusion XL base"),
        "folder": ("model", "SDXL, text to image"),
    }
    assert "CosXL" in rows["cosxl"]["fault"] and not rows["cosxl"]["use"]
    whole, random = (place / "sd1.safetensors").read_bytes(), np.random.default_rng(0)
    for number in range(100):  # of the header
        changed = bytearray(whole)
        for at in random.integers(8, 8 + int.from_bytes(whole[:8], "little"), 3):
            changed[at] = random.integers(256)
        (place / f"mutant {number}.safetensors").write_bytes(changed if number % 4 else whole[: int(at)])
    ran = CliRunner().invoke(models, ["--models-dir", str(tmp_path), "--json"], catch_exceptions=False)
    mutants = [row for row in json.loads(ran.stdout)["files"] if row["name"].startswith("mutant")]
    print(f"{len(mutants)} mutants, {sum(bool(row['fault']) for row in mutants)} with a fault")
    assert len(mutants) == 100 and all(not (row["fault"] and row["use"]) for row in mutants)
    shown = CliRunner().invoke(models, ["--models-dir", str(tmp_path)], catch_exceptions=False).stdout
    assert "model, Stable Diffusion XL base" in shown and "model, Stable Diffusion 1.x" in shown


@pytest.mark.sample(0)
def test_with_nothing_pulled(cache, no_sockets) -> None:
    entries = listed()
    assert {*entries} == {*catalog.KNOWN, *PIECES} and [*entries][-len(PIECES) :] == [*PIECES]
    assert {entry["here"] for name, entry in entries.items() if name != "shapes-v1"} == {"no"}
    assert entries["shapes-v1"]["here"] == "yes" and 10e6 < entries["shapes-v1"]["bytes"] < 30e6
    for entry in entries.values():
        assert entry["license"] and entry["purpose"] and entry["bytes"] > 0
        assert (entry["memory"] is None) == (entry["name"] in PIECES)
        assert (entry["peak"] is None) == (entry["name"] in (*PIECES, "sdxl-refiner"))
    lines = table()
    assert lines[0].split() == ["name", "here", "size", "memory", "options", "license", "for"]
    assert any(line.split()[:4] == ["qwen-image", "no", "57.7", "GB"] for line in lines) and "pull NAME" in lines[-1]
    assert not cache.exists()


@pytest.mark.sample(0)
def test_what_is_here(fake, cache) -> None:
    """A model not known by name has its hub id; what `main` lacks is there in part; a tokenizer alone is none."""
    folder, _, _ = pulled()
    for name in ("qwen-image", "sd15"):
        storage = hf_cache.storage_folder(catalog.KNOWN[name].repo or "")
        shutil.copytree(folder.parent.parent, storage, symlinks=True)
        if name == "sd15":
            (storage / "snapshots" / COMMIT / "vae" / "config.json").unlink()
    write_tiny_clip_tokenizer(hf_cache.storage_folder(CLIP_TOKENIZER.repo) / "snapshots" / COMMIT)
    entries = listed()
    found = {name: entry["here"] for name, entry in entries.items() if entry["here"] != "no"}
    pieces = dict.fromkeys(("clip-tokenizer", "qwen-image-files"), "yes")
    assert found == {"qwen-image": "yes", "sd15": "in part", "shapes-v1": "yes", **pieces, REPO: "yes"}
    assert entries[REPO]["bytes"] == sum(len(fake.files[path]) for path in fake.files if repository.needed(path))
    assert entries[REPO]["license"] is None and any(line.startswith(REPO) for line in table())


def test_a_cache_with_odd_things(cache, no_sockets) -> None:
    """Other programs' models, broken ones, pipes: passed over, and nothing waits."""
    for name in ("models--a--b", "models--bert", "datasets--a--b", "models--a--b--c--d", "models--x--\x1b[31m"):
        (cache / name / "snapshots" / COMMIT).mkdir(parents=True)
    (cache / "models--a--b" / "snapshots" / COMMIT / "model_index.json").write_text('{"_class_name": "AmusedPipeline"}')
    for name, text in (("e", "{"), ("f", '{"_class_name": 3}'), ("g", '{"_class_name": "KandinskyV22Pipeline"}')):
        (cache / f"models--a--{name}" / "snapshots" / COMMIT).mkdir(parents=True)
        (cache / f"models--a--{name}" / "snapshots" / COMMIT / "model_index.json").write_text(text)
    for pipe in ("models--a--h/snapshots/" + COMMIT + "/model_index.json", "models--a--i/refs/main", "models--a--k"):
        (cache / pipe).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(cache / pipe)
    assert {*listed()} == {*catalog.KNOWN, *PIECES}


def test_a_cache_that_is_a_file(cache, no_sockets) -> None:
    cache.write_text("")
    assert listed()["qwen-image"]["here"] == "no"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("qwenimage", "qwen-image"),
        ("qwen", "qwen-image"),
        ("Qwen-Image-2521", "qwen-image-2512"),
        ("sdx15", "sd15"),
        ("sd-xl", "sdxl"),
        ("sd1-5", "sd15"),
        ("shape", "shapes-v1"),
        ("clip-tokeniser", "clip-tokenizer"),
        ("t5-tokeniser", "t5-tokenizer"),
        ("sd3.5-larg", "sd3.5-large"),
        ("Qwen/QwenImage", "Qwen/Qwen-Image"),
        ("stabilityai/stable-diffusion-xl-base", "stabilityai/stable-diffusion-xl-base-1.0"),
    ],
)
def test_did_you_mean(given: str, meant: str, cache, no_sockets, monkeypatch) -> None:
    assert f"did you mean {meant}?" in refused(resolve.resolve, given)
    monkeypatch.setattr("qwenimg.common.transfer.http.BACKOFF", 0.001)
    monkeypatch.setattr("qwenimg.common.hub.pull._listing", lambda *_: refuse())
    monkeypatch.setattr("qwenimg.common.base.hf_cache.is_offline", lambda: False)
    assert f"did you mean {meant}?" in refused(pull, given, echo=print, progress=lambda *_: None)


def refuse() -> None:
    from qwenimg.common.base.errors import ModelError

    raise ModelError("is not on the hub")


@pytest.mark.parametrize(
    "given", ["wan", "x", "", "a/b", "someone/else", "SDXL", "shapes", "Qwen/Qwen-Image", "z" * 5000]
)
def test_nothing_is_near(given: str) -> None:
    assert catalog.nearest(given) is None


# Before gigabytes


def test_time_and_machine_come_before_the_gigabytes(fake, monkeypatch) -> None:
    fake.listing = fake.info()
    entry = next(e for e in fake.listing["siblings"] if e["rfilename"] == FIRST)
    entry["lfs"] |= {"size": 57_000_000_000}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**14, 0, 10**13))
    lines: list[str] = []

    def echo(line: str) -> None:
        assert fake.data_requests == []
        lines.append(line)

    refused(pull, REPO, echo=echo, progress=lambda *_: None)
    assert "57.0 GB, about 76 min at 100 Mbit/s; " in lines[0] and "its largest part has 57.0 GB" in lines[1]
    known = replace(catalog.KNOWN["qwen-image"], repo=REPO)
    monkeypatch.setitem(catalog.KNOWN, "qwen-image", known)
    lines.clear()
    fake.data_requests.clear()
    refused(pull, "qwen-image", echo=echo, progress=lambda *_: None)
    for part in ("Apache-2.0", "30.0 GB of memory on a GPU or a Mac", "twice that on a CPU", "this machine has"):
        assert part in lines[1]
    assert all(len(line) <= 300 for line in lines)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (700_000_000, ""),
        (4_270_000_000, ", about 6 min at 100 Mbit/s"),
        (57_700_000_000, ", about 77 min at 100 Mbit/s"),
        (10**12, ", about 22.2 h at 100 Mbit/s"),
    ],
)
def test_time(count: int, text: str) -> None:
    assert requirements.time_text(count) == text


def test_a_machine_that_is_too_small(monkeypatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**22, "SC_PAGE_SIZE": 4096}.__getitem__)
    text = requirements.machine_text(catalog.KNOWN["qwen-image"], 0)
    assert text.endswith("this machine has 17.2 GB: too little for it; -m shapes-v1 draws here")
    assert requirements.machine_text(catalog.KNOWN["sd15"], 0).endswith("this machine has 17.2 GB")
