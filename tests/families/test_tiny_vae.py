"""Tiny VAEs in models of every family: pictures on both backends, starts from pictures, previews, what is said of
their files, and every file that is refused."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.numpy import load_file as load_file_np
from safetensors.numpy import save_file
from safetensors.torch import load_file
from support import tiny_autoencoder as tiny_vaes
from support.cli_runner import cli
from support.drawing_here import drawing
from support.family_cases import BACKENDS, PICTURE
from support.recipe_cases import recipe_from_png
from support.refusals import refused

import qwenimg
from qwenimg.cli import preview
from qwenimg.cli.workers.messages import Draw, Finished, Stepped
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import storage_folder
from qwenimg.common.hub.describe import describe
from qwenimg.common.jobs.job import Job
from qwenimg.common.networks.vaes.tiny_video_vae import TinyVideoVAEConfig
from qwenimg.common.parts import tiny_vae
from qwenimg.common.parts.downloads import TINY_VAES
from qwenimg.common.pipeline.fit import FitCheck
from qwenimg.common.pipeline.fit_options import plan_memory
from qwenimg.common.pipeline.result import Step
from qwenimg.common.runtime.runtime import limit_for

NAMES = {
    "sd15": "taesd",
    "sdxl": "taesdxl",
    "sd3": "taesd3",
    "flux-dev": "taef1",
    "z-image": "taef1",
    "flux2-klein": "taef2",
    "qwen": "taew2_1",
    "flux2-dev": "taef2",
    "flux3-klein": "taef2",
    "ernie": "taef2",
    "longcat": "taef1",
    "chroma": "taef1",
    "lumina": "taef1",
    "ovis": "taef1",
    "anima": "taew2_1",
    "krea2": "taew2_1",
    "pixart": "taesdxl",
    "pixart-alpha": "taesd",
    "auraflow": "taesdxl",
    "hunyuan": "taesdxl",
}
ASKED: dict[str, Any] = {"width": 52, "height": 36, "steps": 4, "seed": 7}
LEVEL = 1  # of 255: both round a value that lies between two levels


def decoded(made: Any, weights: tiny_vaes.Weights, latents: np.ndarray) -> np.ndarray:
    """The picture of latents in the sampler's scale, in float64."""
    if isinstance(made, TinyVideoVAEConfig):
        pixels = tiny_vaes.taehv_decoded(made, weights, latents)
    else:
        plain = torch.pixel_shuffle(torch.from_numpy(latents), made.patch).numpy()
        pixels = tiny_vaes.taesd_decoded(made, weights, plain)
    return np.clip(np.rint((pixels[0].transpose(1, 2, 0) + 1) * 127.5), 0, 255)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.sample(1)
def test_a_picture_is_what_the_formula_makes_of_its_latents(
    tiny: dict[str, Path], tmp_path: Path, kind: str, backend: str
) -> None:
    path, made, weights = tiny_vaes.write_for(tmp_path, NAMES[kind], tiny[kind])
    with qwenimg.load(tiny[kind], backend=backend, precision="fp32", vae=path) as pipe:
        pipe.fit_preview()
        *steps, drawn = pipe.stream("a circle", **ASKED)
        started = pipe("a circle", image=PICTURE, strength=0.5, **ASKED)
        seen = steps[-1].preview()
    expected = decoded(made, weights, drawn.latents)[:36, :52]
    assert drawn.pixels.shape == (36, 52, 3) and np.std(expected) > 5
    off = np.abs(expected - drawn.pixels).max()
    print(f"{kind} on {backend}: at most {off:.0f} of 255 from float64")
    assert off <= LEVEL and not np.array_equal(started.pixels, drawn.pixels)
    near = np.abs(seen[:36, :52].astype(int) - drawn.pixels).mean()  # the last estimate is nearly the picture
    assert seen.shape[0] >= 36 and near < 0.5
    assert drawn.recipe["vae"] == path.name and drawn.recipe["fingerprints"]["vae"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_previews_of_another_vae(tiny: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """By the name of a file, and by the folder of another program; those that do not fit become grey, with a line."""
    path, made, weights = tiny_vaes.write_for(tmp_path / "models" / "vae_approx", "taesd", tiny["sd15"])
    for options in (
        {"preview_with": path},
        {"models_dir": tmp_path},
        {"models_dir": tmp_path, "preview_with": "taesd"},
    ):
        notes: list[str] = []
        given: dict[str, Any] = {"precision": "fp32", "notify": lambda kind, text, to=notes: to.append(text)} | options
        with qwenimg.load(tiny["sd15"], backend=backend, **given) as pipe:
            pipe.fit_preview()
            *steps, last = pipe.stream("a circle", **ASKED)
            expected = decoded(made, weights, last.latents)
            assert np.abs(steps[-1].preview() - expected).mean() < 0.5  # of the last estimate, which is near the end
            assert not any("previews are fitted" in note for note in notes)
            assert np.abs(expected[:36, :52] - last.pixels).mean() > 5  # which the model's own VAE made
            pipe.runtime.check_fit = _full  # type: ignore[method-assign]
            pipe.model.residents._drop(["preview decoder"])
            assert (steps[-1].preview() == 128).all() and any("no preview by the tiny VAE" in note for note in notes)


@pytest.mark.sample(0)
def test_plan_counts_previews(tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the denoiser's weights, for a run and for `plan`; one that does not fit is left out, and refuses no run.
    The decoder stays loaded only where the plan leaves space for it."""
    path, *_ = tiny_vaes.write_for(tmp_path, "taesd", tiny["sd15"])
    model = str(tiny["sd15"])
    ran = cli("plan", model, "--size", "52x36", "--preview-with", str(path), "--json", "--backend", "cpu")
    assert ran.code == 0, ran.err
    stages = {stage["name"]: stage for stage in json.loads(ran.out)["stages"]}
    print(stages)
    assert list(stages).index("preview") == list(stages).index("decode") - 1
    given: dict[str, Any] = {"backend": "cpu", "precision": "fp32"}
    with qwenimg.load(model, preview_with=path, **given) as pipe:
        request = pipe.check("a circle", **ASKED)
        before = plan_memory(pipe.model, request)
        pipe.fit_preview()
        counted = plan_memory(pipe.model, request)
        names = [stage.name for stage in counted.stages]
        assert "preview" not in [stage.name for stage in before.stages] and "preview" in names
        preview, denoise = (counted.stages[names.index(name)] for name in ("preview", "denoise"))
        decoder = sum(tensor.nbytes for name, tensor in load_file_np(path).items())
        assert preview.weights - denoise.weights == pytest.approx(decoder, abs=64)
        assert preview.activations >= 3 * 52 * 36 * 4
        residents = pipe.model.residents
        for spare, stays in ((10 * decoder, True), (decoder // 2, False)):
            monkeypatch.setattr(FitCheck, "spare", spare)
            *steps, _ = pipe.stream("a circle", **ASKED)
            residents.free()
            steps[-1].preview()
            assert ("preview decoder" in residents.opened) is stays
    least = max(stage.peak for stage in before.stages if stage.name != "preview")
    with qwenimg.load(model, preview_with=path, max_memory=limit_for(least), **given) as pipe:
        pipe.fit_preview()
        assert pipe("a circle", **ASKED).pixels.shape == (36, 52, 3)
        assert plan_memory(pipe.model, request).largest.peak <= least


def _full(what: str, needed: int) -> None:
    from qwenimg.common.base.errors import DoesNotFit

    raise DoesNotFit("memory is full")


@pytest.mark.sample(0)
def test_previews_of_the_command_and_of_a_server(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command writes a file; a server's worker sends the same bytes to its page, `/api/jobs` and A1111's progress.
    Both have pixels of the tiny VAE, in place of one for each latent."""
    path, *_ = tiny_vaes.write_for(tmp_path, "taesd", tiny["sd15"])
    monkeypatch.setattr(preview, "file", lambda: tmp_path / "preview.png")
    given = ["-m", str(tiny["sd15"]), "--backend", "cpu", "--precision", "fp32", "--size", "52x36", "--steps", "4"]
    ran = cli("a circle", *given, "-s", "7", "--preview-with", str(path), "-o", str(tmp_path / "a.png"))
    assert ran.code == 0 and "there is no preview" not in ran.err, ran.err
    with qwenimg.load(tiny["sd15"], backend="cpu", precision="fp32", preview_with=path) as pipe:
        pipe.fit_preview()
        seen = [step.preview() for step in pipe.stream("a circle", **ASKED) if isinstance(step, Step)]
    written_one = np.asarray(Image.open(tmp_path / "preview.png"))
    assert any(np.array_equal(written_one, one) for one in seen[:-1]) and min(written_one.shape[:2]) >= 36
    process, sent = drawing(tiny["sd15"], precision="fp32", preview_with=path)
    options: Any = {"prompt": "a circle", **{name: value for name, value in ASKED.items() if name != "seed"}}
    process.draw(Draw(id="j", model="tiny", job=Job(options=options, seeds=(7,)), preview_suffix=".png"))
    served = [one.preview for one in sent if isinstance(one, Stepped) and one.preview]
    assert served and not next(one.error for one in sent if isinstance(one, Finished))
    for one in served:
        assert any(np.array_equal(np.asarray(Image.open(io.BytesIO(one))), other) for other in seen[:-1])


def test_large_previews_are_halved() -> None:
    from qwenimg.common.pipeline.preview import _smaller

    picture = np.random.default_rng(0).integers(0, 256, (1032, 600, 3), np.uint8)
    small = _smaller(picture)
    assert small.shape == (258, 150, 3)
    assert small[3, 5, 1] == np.rint(picture[12:16, 20:24, 1].mean())


def cached(cache: Path, name: str, source: Path) -> None:
    """Put the files of `source` where `qwenimg pull NAME` puts the published ones."""
    one = next(one for one in TINY_VAES if one.name == name)
    snapshot = storage_folder(one.repo) / "snapshots" / ("0" * 40)
    assert snapshot.is_relative_to(cache)
    snapshot.mkdir(parents=True)
    for file in one.files:
        if file.endswith("config.json"):
            continue
        target = [source] if len(one.files) == 1 else sorted(source.parent.glob(f"{name}_*coder.safetensors"))
        for path in target:
            shutil.copy(path, snapshot / (file if len(target) == 1 else path.name))


@pytest.mark.parametrize(
    ("kind", "given", "again"),
    [("sd15", "taesd", ""), ("flux2-klein", "taef2", ""), ("qwen", "taew2_1", ""), ("flux-dev", "file", "--vae"),
     ("sd3", "folder", "--models-dir"), ("sd15", "pth", "--models-dir")],
)  # fmt: skip
@pytest.mark.sample(0)
def test_a_picture_is_drawn_again(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, given: str, again: str
) -> None:
    """From its recipe: a name of the cache finds the file, one of a folder needs the folder, and a plain file is given
    again; another file is told."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    name = NAMES[kind]
    path, *_ = tiny_vaes.write_for(tmp_path / "models" / "vae_approx", name, tiny[kind])
    if given == "pth":
        for half in ("encoder", "decoder"):
            file = path.with_name(f"{name}_{half}.safetensors")
            torch.save(load_file(file), file.with_suffix(".pth"))
            file.unlink()
        path = path.with_suffix(".pth")
    if given == name:
        cached(tmp_path / "hub", name, path)
    where = ["--models-dir", str(tmp_path / "models")] if again == "--models-dir" else []
    vae = str(path) if given == "file" else name
    common = ["-m", str(tiny[kind]), "--backend", "cpu", "-q"]
    common[-1:] = ["--size", "52x36", "--steps", "4", "-s", "7", "--precision", "fp32"]
    first = cli("a circle", *common, *where, "--vae", vae, "-o", "a.png")
    assert first.code == 0, first.err
    recorded = recipe_from_png(tmp_path / "a.png")
    print(recorded["vae"])
    assert str(tmp_path) not in recorded["vae"] and recorded["fingerprints"]["vae"]
    repeat = ["--from", "a.png", "-m", str(tiny[kind]), "--backend", "cpu"]
    if again:
        without = cli(*repeat, "-o", "none.png")
        assert without.code == 2 and "--vae" in without.err and not Path("none.png").exists(), without.err
    more = {"": [], "--vae": ["--vae", str(path)], "--models-dir": where}[again]
    second = cli(*repeat, *more, "-o", "b.png")
    assert second.code == 0 and "differs" not in second.err, second.err
    a, b = (np.asarray(Image.open(f"{one}.png")) for one in "ab")
    assert np.array_equal(a, b) and recipe_from_png(tmp_path / "b.png")["vae"] == recorded["vae"]


# Refusals


def test_other_models_files_are_refused_in_one_line(tiny: dict[str, Path], tmp_path: Path) -> None:
    of = {kind: tiny_vaes.write_for(tmp_path / kind, name, tiny[kind])[0] for kind, name in NAMES.items()}
    cases = {
        ("sd15", "sd3"): "for latents of 16 channels, and those of the model have 4",
        ("flux-dev", "sd15"): "for latents of 4 channels, and those of the model have 16",
        ("flux-dev", "qwen"): "for FLUX.1 and Z-Image give taef1 (qwenimg pull taef1)",
        ("qwen", "flux-dev"): "give taew2_1 (qwenimg pull taew2_1)",
        ("flux2-klein", "sd15"): "and those of the model have 8",
        ("sd15", "sdxl"): "is by its name the tiny VAE of SDXL",
        ("sdxl", "sd15"): "give taesdxl (qwenimg pull taesdxl)",
        ("sd3", "flux-dev"): "is by its name the tiny VAE of FLUX.1 and Z-Image",
        ("z-image", "sd3"): "rename it if the name is wrong",
        ("qwen-layered", "qwen"): "pictures without alpha",
        ("qwen21", "qwen"): "none is known for Qwen-Image-2.1",
    }
    for (kind, other), text in cases.items():
        with pytest.raises((ModelError, UsageError)) as error:
            qwenimg.load(tiny[kind], backend="cpu", vae=of[other])
        print(kind, other, str(error.value).replace(str(tmp_path), ""))
        assert "\n" not in str(error.value) and len(str(error.value).replace(str(tmp_path), "")) <= 300
        assert text in str(error.value), (kind, other)


def test_a_name_that_says_nothing_is_taken_with_a_line(tiny: dict[str, Path], tmp_path: Path) -> None:
    path, *_ = tiny_vaes.write_for(tmp_path, "small", tiny["sd15"])
    notes: list[str] = []
    qwenimg.load(tiny["sd15"], backend="cpu", vae=path, notify=lambda kind, text: notes.append(text)).close()
    assert any("neither its name nor its tensors show whether this tiny VAE is for SDXL or Stable" in n for n in notes)


def test_half_of_one(tiny: dict[str, Path], tmp_path: Path) -> None:
    decoder, *_ = tiny_vaes.write_for(tmp_path / "d", "taesd", tiny["sd15"], ("decoder",))
    encoder, *_ = tiny_vaes.write_for(tmp_path / "e", "taesd", tiny["sd15"], ("encoder",))
    assert "is the encoder of a tiny VAE alone" in refused(qwenimg.load, tiny["sd15"], backend="cpu", vae=encoder)
    with qwenimg.load(tiny["sd15"], backend="cpu", precision="fp32", vae=decoder) as pipe:
        assert pipe("a circle", **ASKED).pixels.std() > 5
        with pytest.raises(UsageError, match="has a decoder alone, and a picture needs the encoder"):
            pipe.check("a circle", image=PICTURE, **ASKED)


def test_it_is_not_converted(tiny: dict[str, Path], tmp_path: Path) -> None:
    path, *_ = tiny_vaes.write_for(tmp_path / "v", "taesd", tiny["sd15"])
    ran = cli("convert", str(tiny["sd15"]), str(tmp_path / "out"), "--vae", str(path))
    print(ran.err)
    assert ran.code and not (tmp_path / "out").exists() and "Traceback" not in ran.err


# What is said


def test_info_and_models_say_what_it_is(tiny: dict[str, Path], tmp_path: Path) -> None:
    path, *_ = tiny_vaes.write_for(tmp_path / "vae_approx", "taesd", tiny["sd15"])
    torch.save({"a": torch.zeros(2)}, tmp_path / "vae_approx" / "model.pt")
    description = describe(path)
    print("\n".join(description.lines))
    assert not description.faults
    assert description.lines[:2] == [
        "layout: a tiny VAE (TAESD) for latents of 4 channels",
        "for: Stable Diffusion 1 and 2, by its name",
    ]
    assert any(line.startswith("use it: qwenimg PROMPT -m MODEL --vae ") for line in description.lines)
    plain = path.rename(path.with_name("plain.safetensors"))
    lines = describe(plain).lines
    assert "its tensors do not show of which" in lines[1] and "decoder alone" in lines[2]
    plain.rename(plain.with_name("taesana_decoder.safetensors"))
    assert "Sana" in describe(plain.with_name("taesana_decoder.safetensors")).faults[0]
    plain.with_name("taesana_decoder.safetensors").rename(path)
    ran = cli("models", "--models-dir", str(tmp_path))
    assert ran.code == 0 and b"tiny VAE" in ran.out and b"taesd_decoder.safetensors" in ran.out


@pytest.mark.sample(0)
def test_known_names_have_size_and_licence() -> None:
    assert {one.name for one in TINY_VAES} == set(NAMES.values())
    ran = cli("models", "--json")
    assert ran.code == 0
    for one in TINY_VAES:
        assert one.license == "MIT" and 5e6 < one.bytes < 5e7 and f'"{one.name}"'.encode() in ran.out


# Broken files


@pytest.mark.sample(0)
def test_no_mutant_raises_another_error(tmp_path: Path) -> None:
    """Wrong kinds, sizes, dtypes and names, cut and changed bytes, links and pipes: a ModelError of one line, or a
    component."""
    good = tiny_vaes.weights(tiny_vaes.config(4))
    video = tiny_vaes.weights(tiny_vaes.video_config(16))
    halves = tiny_vaes.write_authors(tmp_path / "good", "taesd", good)
    save_file(video, tmp_path / "good" / "taew2_1.safetensors")
    torch.save({k: torch.from_numpy(v) for k, v in tiny_vaes.authors(good, "decoder").items()}, tmp_path / "t.pth")
    rng, opened, refusals = random.Random(0), 0, 0
    folder = tmp_path / "bad"
    folder.mkdir()
    mutants: list[bytes] = []
    for source in (halves, tmp_path / "good" / "taew2_1.safetensors", tmp_path / "t.pth"):
        raw = source.read_bytes()
        mutants += [raw[: rng.randrange(len(raw))] for _ in range(25)]
        for _ in range(75):
            changed = bytearray(raw)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(min(len(raw), 6000))] = rng.randrange(256)
            mutants.append(bytes(changed))
    places = []
    for number, raw in enumerate(mutants):
        places.append(folder / f"taesd_{number}_decoder.safetensors")
        places[-1].write_bytes(raw)
    for number in range(120):
        tensors = dict(
            rng.choice([tiny_vaes.authors(good, "decoder"), tiny_vaes.authors(good, "encoder"), good, video])
        )
        for _ in range(rng.randrange(1, 4)):
            name = rng.choice(sorted(tensors))
            value = tensors.pop(name)
            what = rng.randrange(6)
            if what == 0:
                tensors[name] = value.astype(rng.choice([np.float16, np.int32, np.uint8]))
            elif what == 1:
                tensors[name] = np.zeros(rng.choice([(1,), (3, 3), (0,), (9, 4, 3, 3), (1, 1, 1, 1, 1)]), np.float32)
            elif what == 2:
                tensors[rng.choice(["999.weight", "layers.1", f"x.{name}", "0.weight", "7.conv.weight"])] = value
            elif what == 3:
                tensors[name] = np.ascontiguousarray(value.T)
        places.append(folder / f"mixed_{number}.safetensors")
        save_file(tensors, places[-1])
    os.mkfifo(folder / "pipe_decoder.safetensors")
    (folder / "loop_decoder.safetensors").symlink_to(folder / "loop_decoder.safetensors")
    (folder / "empty").mkdir()
    places += [folder / "pipe_decoder.safetensors", folder / "loop_decoder.safetensors", folder / "empty", folder]
    places += [folder / "none.safetensors"]
    for place in places:
        assert isinstance(tiny_vae.is_tiny_at(place), bool)
        try:
            component = tiny_vae.open_tiny(place)
            component.plan.close()
            opened += 1
        except ModelError as error:
            assert "\n" not in str(error) and len(str(error).replace(str(folder), "")) <= 300
            refusals += 1
    print(f"{len(places)} mutants: {refusals} refused, {opened} opened")
    assert refusals > 200
