"""Control networks for Z-Image as files, as components of a model, and on the command line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from support import oracle_zimage
from support.cli_runner import cli
from support.controlled_runs import drawn, planned, with_nets
from support.file_mutants import assert_line, damaged
from support.refusals import refused
from support.relative import relative
from support.tiny_control import tiny_controlnet
from support.tiny_zimage import CONTROLS, control_file, tiny_control

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families.z_image.checkpoint import OPENING
from qwenimg.common.families.z_image.control import open_control
from qwenimg.common.families.z_image.known import CONTROLS as CONTROLS_THERE
from qwenimg.common.families.z_image.known import PUBLISHED
from qwenimg.common.numbers.noise import TorchCPUGenerator
from qwenimg.common.parity import check, record, summary
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.pipeline import control_pictures, fit_options
from qwenimg.common.request.control_text import Control
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Change, limit_for

BACKENDS = ("cpu", "mlx")
RNG = np.random.default_rng(2)
PICTURE, SECOND = (RNG.integers(0, 256, (48, 80, 3), np.uint8) for _ in range(2))
HOLE = np.zeros((48, 80), np.uint8)
HOLE[8:40, 28:] = 255
BANDS = 1e-5  # relative L2: sums of a convolution in float32, in blocks of other sizes
ASKED: dict[str, Any] = {"width": 80, "height": 48, "steps": 3, "guidance": 2.0, "negative_prompt": "blue", "seed": 3}


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each version."""
    folder = tmp_path_factory.mktemp("nets")
    for version in CONTROLS:
        tiny_control(version).save_pretrained(folder / version)
    return {version: folder / version for version in CONTROLS}


@pytest.fixture
def model(tiny_zimage: Path) -> Iterator[Checkpoint]:
    with closing(OPENING.open(tiny_zimage)) as checkpoint:
        yield checkpoint


# Files


@pytest.mark.parametrize("version", CONTROLS)
@pytest.mark.sample(1)
def test_a_file_is_what_its_tensors_show(
    tmp_path: Path, nets: dict[str, Path], tiny_zimage: Path, version: str
) -> None:
    """A file has no configuration: the version is that of its tensors, 2.0 the one whose refiner blocks are zeros."""
    alone = tmp_path / f"{version}.safetensors"
    places = {"1": [0, 2], "2.0": [0, 1, 2], "2.1": [0, 1, 2]}[version]  # spread over the transformer's three blocks
    net = tiny_control(version, control_layers_places=places)
    net.save_pretrained(tmp_path / "net")
    own = control_file("2.1") if version == "2.0" else {}
    zeros = {key: 0 * value for key, value in own.items() if key.startswith("control_noise_refiner.")}
    save_file({key: value.contiguous() for key, value in (net.state_dict() | zeros).items()}, alone)
    with closing(OPENING.open(tiny_zimage)) as checkpoint:
        nets_opened = [open_control(path, checkpoint) for path in (alone, tmp_path / "net")]
        configs = [one.component.config for one in nets_opened]
        for one in nets_opened:
            one.close()
    assert configs[0] == configs[1]
    with closing(qwenimg.load(tiny_zimage, backend="cpu", precision="fp32")) as pipe:
        first, second = (pipe("a circle", control=(path, PICTURE), **ASKED) for path in (alone, tmp_path / "net"))
    assert np.array_equal(first.latents, second.latents)


def broken_files() -> dict[str, tuple[Callable[[], dict[str, torch.Tensor]], str]]:
    whole = control_file("2.1")
    embedder = "control_all_x_embedder.2-1.weight"
    return {
        "a tensor is missing": (
            lambda: {k: v for k, v in whole.items() if k != "control_layers.1.after_proj.bias"}, "lacks tensor"),
        "a tensor too many": (lambda: whole | {"final_layer.linear.weight": torch.ones(3)}, "final_layer"),
        "another shape": (lambda: whole | {"control_layers.0.attention_norm1.weight": torch.ones(61)}, "no multiple"),
        "a picture of other channels": (lambda: whole | {embedder: torch.zeros(66, 80)}, "pictures of 20 channels"),
        "no channels": (lambda: whole | {embedder: torch.zeros(66, 3)}, "control_in_dim"),
        "more layers than blocks": (
            lambda: dict(tiny_control("2.1", control_layers_places=[0, 1, 2, 3]).state_dict()), ""),
        "infinite": (lambda: whole | {"control_layers.0.after_proj.bias": torch.full((66,), torch.inf)}, "values"),
        "of Qwen-Image": (lambda: dict(tiny_controlnet().state_dict()), "a ControlNet of Qwen-Image"),
        "of Stable Diffusion": (
            lambda: {"controlnet_mid_block.weight": torch.ones(3)}, "a ControlNet of Stable Diffusion"),
        "no control network": (lambda: {"a": torch.ones(3)}, "holds no control network of Z-Image"),
        "empty": (dict, "control network"),
    }  # fmt: skip


@pytest.mark.parametrize("fault", broken_files())
@pytest.mark.sample(4)
def test_broken_files_are_refused(tmp_path: Path, model: Checkpoint, fault: str) -> None:
    make, said = broken_files()[fault]
    path = tmp_path / "net.safetensors"
    save_file(make(), path)
    if said == "values":  # they are read later, and then refused
        with closing(qwenimg.load(model.source, backend="cpu", precision="fp32")) as pipe, pytest.raises(ModelError):
            pipe("x", control=(path, PICTURE), **ASKED)
        return
    text = refused(open_control, path, model)
    print(text)
    assert said in text and path.name in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_class_name": "ControlNetModel"}, "is a ControlNet of Stable Diffusion, and the model is Z-Image"),
        ({"_class_name": "QwenImageControlNetModel"}, "is a ControlNet of Qwen-Image"),
        ({"_class_name": "UNet2DConditionModel"}, "expected 'ZImageControlNetModel'"),
        ({"control_layers_places": []}, "control_layers_places"), ({"control_layers_places": [1, 2]}, "begin with 0"),
        ({"control_layers_places": [0, 0]}, "rising"), ({"control_layers_places": [0, 2000]}, "control_layers_places"),
        ({"control_layers_places": [0, 3]}, "more than 3 blocks; the model's has 3"),
        ({"control_layers_places": [0]}, "unknown tensor"), ({"control_layers_places": [0, -1]}, "control_layers"),
        ({"control_refiner_layers_places": [0, 7]}, "control_refiner_layers_places"),
        ({"control_in_dim": 17}, "shape"), ({"add_control_noise_refiner": "all"}, "add_control_noise_refiner"),
        ({"n_heads": 4}, "no multiple"), ({"dim": float("nan")}, "config.json"), ({"n_refiner_layers": 10**7}, "n_ref"),
        ({"something_new": 1}, "something_new"), ({"all_patch_size": [4]}, "all_patch_size"),
    ],
)  # fmt: skip
@pytest.mark.sample(4)
def test_broken_configurations_are_refused(
    tmp_path: Path, nets: dict[str, Path], model: Checkpoint, changes: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "net"
    shutil.copytree(nets["2.1"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    text = refused(open_control, folder, model)
    print(text)
    assert said in text


def test_mutants_are_refused_in_one_line_or_read(tmp_path: Path, model: Checkpoint) -> None:
    path, verdicts, chance = tmp_path / "net.safetensors", set[str](), random.Random(11)
    for version in CONTROLS:
        save_file(control_file(version), path)
        whole = path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        for _ in range(60):
            path.write_bytes(damaged(whole, header, chance))
            try:
                open_control(path, model).close()
                verdicts.add("read")
            except ModelError as error:
                assert_line(str(error), path.name)
                verdicts.add("refused")
    assert verdicts == {"read", "refused"}


def test_links_and_folders(tmp_path: Path, nets: dict[str, Path], model: Checkpoint) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    (tmp_path / "good").symlink_to(nets["2.1"])
    for name in ("loop", "nowhere", "empty", "gone"):
        refused(open_control, tmp_path / name, model)
    open_control(tmp_path / "good", model).close()


# A component of the model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_run_does_what_its_plan_says(tiny_zimage: Path, nets: dict[str, Path], backend: str) -> None:
    """At limits from the least on: networks, transformer and what is streamed of each are as planned."""
    controls = [(nets["2.1"], PICTURE), (nets["1"], PICTURE, 0.5), (nets["2.1"], SECOND, 0.3)]
    asked = ASKED | {"control": controls}

    def load(limit: int) -> Pipeline:
        return qwenimg.load(tiny_zimage, backend=backend, precision="fp32", max_memory=limit)

    with closing(load(10**12)) as pipe:
        with_nets(pipe, asked)
        tight = pipe.model.variant(Change(max_memory=1))
        least = limit_for(fit_options.plan_memory(tight, pipe.check("a circle", **asked)).largest.peak)
        usual = pipe("a circle", **asked).latents
    seen = set[tuple[str, int]]()
    for share in (1.0, 1.4, 3.0):
        with closing(load(int(share * least))) as pipe:
            for _ in range(2):
                plan = planned(pipe, asked)
                rows, latents = drawn(pipe, asked)
                assert rows == plan, share
                assert {name for name, _, _, _ in rows} >= {"control", "denoise"}
                assert relative(latents, usual) <= BANDS, "all but the bands in which a picture is encoded is exact"
                seen |= {(resident, held) for _, resident, _, held in rows}
    print(f"{backend}: from {least:,} bytes on, {sorted(seen)}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_step_cache_beside_control(tiny_zimage: Path, nets: dict[str, Path], backend: str) -> None:
    """A call whose deep blocks are skipped adds no change twice: with every call computed the bits are those without a
    cache, and a skipped one moves the picture a little."""
    asked = ASKED | {"control": (nets["2.1"], PICTURE, 0.3), "steps": 12}
    with closing(qwenimg.load(tiny_zimage, backend=backend, precision="fp32")) as pipe:
        plain = pipe("a circle", **asked).latents
        assert np.array_equal(pipe("a circle", **asked, step_cache=1e-9).latents, plain)
        cached = pipe("a circle", **asked, cached_calls="12").latents
    moved = relative(cached, plain)
    print(f"{backend}: the last call of 12 skipped moves the latents by {moved:.3f}")
    assert 0 < moved < 0.2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_windows_and_sums(tiny_zimage: Path, nets: dict[str, Path], backend: str) -> None:
    """A control in no step changes nothing, one in all steps is the same as two halves, and two of one network add."""
    with closing(qwenimg.load(tiny_zimage, backend=backend, precision="fp32")) as pipe:
        plain = pipe("a circle", **ASKED).latents
        halves = [(nets["2.1"], PICTURE, 0.6, (0, 1 / 3)), (nets["2.1"], PICTURE, 0.6, (1 / 3, 1))]
        whole = pipe("a circle", control=(nets["2.1"], PICTURE, 0.6), **ASKED).latents
        assert np.array_equal(pipe("a circle", control=(nets["2.1"], PICTURE, 0.0), **ASKED).latents, plain)
        assert np.array_equal(pipe("a circle", control=halves, **ASKED).latents, whole)
        last = pipe("a circle", control=[halves[1]], **ASKED).latents
        assert relative(last, plain) > 1e-3 and relative(last, whole) > 1e-3


def test_what_the_network_sees_beside_its_picture(tiny_zimage: Path, nets: dict[str, Path]) -> None:
    """A second picture with its hole in grey, and its mask at the size of latents, as diffusers' inpainting has them:
    the mask by torch's nearest, the picture by its VAE."""
    vae = oracle_zimage.pipeline(tiny_zimage).vae
    hole = np.zeros((48, 80), np.uint8)
    hole[5:30, 11:50] = 255

    def encoded(values: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            mean = vae.encode(torch.from_numpy(values).permute(2, 0, 1)[None]).latent_dist.mode()
        return ((mean - vae.config.shift_factor) * vae.config.scaling_factor).numpy()

    picture, second = (one.astype(np.float32) / 127.5 - 1 for one in (PICTURE, SECOND))
    inside = torch.from_numpy((hole > 127).astype(np.float32))[None, None]
    kept = F.interpolate(1 - inside, size=(6, 10), mode="nearest").numpy()
    theirs = np.concatenate((encoded(picture), kept, encoded(second * (hole < 128)[..., None])), axis=1)
    with closing(qwenimg.load(tiny_zimage, backend="cpu", precision="fp32")) as pipe:
        asked = ASKED | {"image": SECOND, "mask": hole}
        request = pipe.check("a circle", control=(nets["2.1"], PICTURE), **asked)
        pipe.controls.give(pipe.model, request)
        [ours] = control_pictures.seen(pipe.model, request, control_pictures.prepared(request), TorchCPUGenerator(0))
    error = relative(ours, theirs)
    print(f"picture, mask and second picture: {error:.1e} (limit 1e-5)")
    assert ours.shape == theirs.shape == (1, 33, 6, 10) and error <= 1e-5


def test_a_mask_needs_the_picture_that_it_belongs_to(tiny_zimage: Path, nets: dict[str, Path]) -> None:
    with closing(qwenimg.load(tiny_zimage, backend="cpu", precision="fp32")) as pipe:
        for version, said in (("2.1", "give it with -i too"), ("1", "a mask needs the image that it belongs to")):
            with pytest.raises(UsageError, match=said):
                pipe.check("x", control=(nets[version], PICTURE), mask=HOLE, **ASKED)
        both = pipe("x", control=(nets["2.1"], PICTURE), image=SECOND, mask=HOLE, strength=0.9, **ASKED)
        other = pipe("x", control=(nets["1"], PICTURE), image=SECOND, mask=HOLE, strength=0.9, **ASKED)
    outside = np.ones((6, 10), bool)
    outside[1:5, 3:] = False
    assert np.array_equal(both.latents[..., outside], other.latents[..., outside]), "what is kept is kept by the run"
    assert not np.array_equal(both.latents[..., ~outside], other.latents[..., ~outside])


# Compared between backends


@pytest.mark.sample(0)
def test_a_passport_holds_on_mlx_and_catches_faults(
    tiny_zimage: Path, nets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, network = tmp_path / "control.safetensors", str(nets["2.1"])
    asked = ASKED | {"prompt": "a ring", "control": [Control(network, "a", scale=0.7, picture=PICTURE)]}
    with closing(qwenimg.load(tiny_zimage, "cpu", "fp32")) as pipe:
        made = record.record(pipe, asked, exact=pipe.engine, sampled=True, notify=lambda text: None)
    passport_file.write(path, made, overwrite=False)
    passport = passport_file.read(path)

    def verdict(backend: str) -> str:
        with closing(qwenimg.load(tiny_zimage, backend, "fp32")) as pipe:
            check.check_run(passport, pipe, (), (network,))
            judged = list(check.blocks(passport, pipe, (), (network,)))
            drawn = check.picture(passport, pipe, (), (network,))
        print(*summary.lines(judged, drawn), sep="\n")
        return summary.verdict(judged, drawn)

    assert verdict("mlx") == ""
    assert {block.component for block in passport.blocks} >= {"controlnet 1", "transformer"}
    from qwenimg.backends.torch.networks.denoisers import zimage_control

    placed, refined = zimage_control.Controlled.placed, zimage_control.Controlled.refined

    def late(self: Any, changes: Any, places: Any, blocks: int) -> Any:
        return placed(self, changes, [min(place + 1, blocks - 1) for place in places], blocks)

    def twice(self: Any, changes: Any, places: Any, blocks: int) -> Any:
        return ((change[0] * self.scale,) if change else () for change in placed(self, changes, places, blocks))

    def unchanged(self: Any, *streams: Any) -> Any:
        own, changes = refined(self, *streams)
        return own, [() for _ in changes]

    for name, fault in (("placed", late), ("placed", twice), ("refined", unchanged)):
        with monkeypatch.context() as patch:
            patch.setattr(zimage_control.Controlled, name, fault)
            assert verdict("cpu"), fault.__name__


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.sample(0)
def test_a_published_one_is_planned_without_its_files(tmp_path: Path, name: str) -> None:
    """Beside the transformer; its download has the bytes of its parameters in 16 bits."""
    Image.fromarray(PICTURE).save(tmp_path / "picture.png")
    [known] = [one for one in CONTROLS_THERE if one.name == name]
    words = ["plan", "z-image-turbo", "--backend", "cpu", "--precision", "bf16", "--size", "1024x1024", "--json"]
    control = ["--control", f"{name}={tmp_path / 'picture.png'}"]
    ran, plain = cli(*words, *control), cli(*words)
    assert ran.code == 0, ran.err
    with_net, without = (
        {stage["name"]: stage["weights_bytes"] for stage in json.loads(one.out)["stages"]} for one in (ran, plain)
    )
    added = with_net["denoise"] - without["denoise"]
    print(f"{name}: {with_net}, without {without}")
    assert known.bytes <= with_net["control"] <= 1.1 * known.bytes and added >= known.bytes
    assert known.license == "Apache-2.0" and "control" not in without


@pytest.mark.sample(0)
def test_on_the_command_line(tiny_zimage: Path, nets: dict[str, Path], tmp_path: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "picture.png")
    control = f"{nets['2.1']}={tmp_path / 'picture.png'}:0.7:0-0.7"
    words = [
        "a circle",
        "-m",
        str(tiny_zimage),
        "--size",
        "80x48",
        "--steps",
        "3",
        "--seed",
        "3",
        "--precision",
        "fp32",
    ]
    pictures = []
    for backend in BACKENDS:
        out = tmp_path / f"{backend}.png"
        ran = cli(*words, "--backend", backend, "--control", control, "-o", str(out))
        assert ran.code == 0, ran.err
        pictures.append(np.asarray(Image.open(out)).astype(int))
    assert np.abs(pictures[0] - pictures[1]).max() <= 2
    again = tmp_path / "again.png"
    ran = cli(
        "--from",
        str(tmp_path / "cpu.png"),
        "-m",
        str(tiny_zimage),
        "--backend",
        "cpu",
        "--control",
        control,
        "-o",
        str(again),
    )
    assert ran.code == 0, ran.err
    assert np.array_equal(np.asarray(Image.open(again)), pictures[0])
