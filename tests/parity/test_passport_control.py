"""Passports of runs with control networks, LoRAs for control and masks, and with true guidance beside FLUX.1's."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import mutants_qwen_control as faults
from support.cli_runner import Ran, cli
from support.mutant import Patch, side
from support.passport_mutants import Original, cut
from support.refusals import refused
from support.tiny_control import write_control_lora, write_controlnet, write_patches
from support.tiny_model import tiny_dit

import qwenimg
from qwenimg import ModelError, Pipeline
from qwenimg.common.hub.network_search import named_control
from qwenimg.common.parity import check, record, recorded_inputs, summary
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.request.control_text import Control

BACKENDS = ("cpu", "mlx")
WIDTH, HEIGHT = 48, 32
RNG = np.random.default_rng(5)
PICTURES = tuple(RNG.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8) for _ in range(2))
ASKED: dict[str, Any] = {
    "prompt": "a ring", "width": WIDTH, "height": HEIGHT, "steps": 3, "seed": 0, "guidance": 3.0,
    "negative_prompt": " ",
}  # fmt: skip


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("nets")
    return {
        "union": write_controlnet(folder / "union"),
        "painting": write_controlnet(folder / "painting", 12, extra=4),
        "patches": write_patches(folder / "patches.safetensors"),
        "context": write_control_lora(folder / "context.safetensors", tiny_dit(1)),
    }


def load(folder: Path, backend: str, precision: str = "fp32") -> Pipeline:
    return qwenimg.load(folder, backend, precision)


@pytest.fixture(scope="module")
def passport(tiny_folder: Path, nets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Passport:
    """Recorded on torch with a ControlNet in a part of the steps and with patches, written and read."""
    path = tmp_path_factory.mktemp("passport") / "control.safetensors"
    union, patches = names(nets)
    control = [
        Control(union, "a", scale=1.3, start=0.3, picture=PICTURES[0]),
        Control(patches, "b", "canny", 0.7, picture=PICTURES[1]),
    ]
    with closing(load(tiny_folder, "cpu")) as pipe:
        asked = ASKED | {"control": control}
        made = record.record(pipe, asked, exact=pipe.engine, sampled=True, notify=lambda text: None)
    passport_file.write(path, made, overwrite=False)
    return passport_file.read(path)


def names(nets: dict[str, Path]) -> tuple[str, str]:
    return str(nets["union"]), str(nets["patches"])


def controls(*networks: object) -> list[str]:
    """Return the options of `parity check` that give these networks."""
    return [word for network in networks for word in ("--control", str(network))]


# Each kind of control


@pytest.mark.sample(0)
def test_it_holds_on_mlx(passport: Passport, tiny_folder: Path, nets: dict[str, Path], tmp_path: Path) -> None:
    """Of a network in a folder of another name."""
    moved = shutil.copytree(nets["union"], tmp_path / "moved")
    networks = (str(moved), str(nets["patches"]))
    with closing(load(tiny_folder, "mlx")) as pipe:
        check.check_run(passport, pipe, (), networks)
        judged = list(check.blocks(passport, pipe, (), networks))
        drawn = check.picture(passport, pipe, (), networks)
    print(*summary.lines(judged, drawn), sep="\n")
    assert summary.verdict(judged, drawn) == ""
    kinds = Counter(block.component for block in passport.blocks)
    assert kinds["controlnet 1"] > 8 and kinds["controlnet 2"] == 4
    steps = {one.name: one for one in drawn.stations if one.name.startswith("control ")}
    assert list(steps) == ["control 1", "control 2", "control 3"]
    assert all(one.output_error is not None and 0 < one.output_error < 1e-5 for one in steps.values())
    assert passport.picture is not None
    assert [one.name for one in passport.picture.controls] == ["union", "patches.safetensors"]
    assert all(np.array_equal(one.picture, PICTURES[i]) for i, one in enumerate(passport.picture.controls))


FAULTS = {
    faults.one_block_late: "control 1: differs",
    faults.scale_ignored: "control 1: differs",
    faults.text_not_normed: "control 2: differs",
    faults.residuals_without_their_layers: "controlnet 2.controlnet_blocks.0: error",
    faults.window_ignored: "control 1: differs",
    faults.last_control_alone: "control 2: differs",
    faults.picture_turned: "vae.encode 1: differs",
    faults.patch_norms_exchanged: "controlnet 2.controlnet_blocks.0: error",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.sample(0)
def test_a_fault_is_named_where_it_is_made(
    passport: Passport,
    tiny_folder: Path,
    nets: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
    backend: str,
) -> None:
    blocks = tuple(block.name for block in passport.blocks if block.component.startswith("controlnet"))
    fault(Patch(monkeypatch, side(backend)))
    with closing(load(tiny_folder, backend)) as pipe:
        judged = list(check.blocks(cut(passport, blocks), pipe, (), names(nets)))
        drawn = check.picture(passport, pipe, (), names(nets))
    failures = [f"{one.name}: {why}" for one in judged for why in one.failures] + list(drawn.failures)
    print(*failures[:3], sep="\n")
    assert failures[0].startswith(FAULTS[fault])


@pytest.fixture
def files(nets: dict[str, Path], tmp_path: Path) -> dict[str, str]:
    """The networks, a control picture and a mask as arguments of the command line."""
    Image.fromarray(PICTURES[0]).save(tmp_path / "a.png")
    hole = np.zeros((HEIGHT, WIDTH), np.uint8)
    hole[4:20, 10:40] = 255
    Image.fromarray(hole).save(tmp_path / "hole.png")
    return {name: str(path) for name, path in nets.items()} | {
        "picture": str(tmp_path / "a.png"),
        "mask": str(tmp_path / "hole.png"),
    }


RUNS = {
    "a LoRA for control": ("cpu,mlx", "bf16", ("--control", "{context}={picture}:0.8")),
    "an inpainting network": ("cpu,mlx", "fp32", ("--control", "{painting}={picture}", "--mask", "{mask}")),
    "a mask of the drawn picture": ("mlx,cpu", "fp32", ("--mask", "{mask}", "--true-cfg", "2")),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.sample(0)
def test_both_in_one_process(tiny_folder: Path, files: dict[str, str], tmp_path: Path, run: str) -> None:
    backends, precision, options = RUNS[run]
    asked = [option.format(**files) for option in options]
    size = ("--steps", "2", "--size", f"{WIDTH}x{HEIGHT}", "--sampled", "--precision", precision)
    path = tmp_path / "a.safetensors"
    ran = cli("parity", "run", str(tiny_folder), "--backends", backends, *size, *asked, "-o", str(path), "--json")
    assert ran.code == 0, ran.err
    (found,) = ran.events
    stations = [one["name"] for one in found["picture"]["stations"]]
    assert found["ok"] and "vae.encode 1" in stations and ("control 1" in stations) == (run == "an inpainting network")
    kept = passport_file.read(path)
    assert kept.picture is not None and (kept.picture.mask is not None) == ("--mask" in options)
    assert kept.picture.asked["guidance"] == (2.0 if "--true-cfg" in options else 4.0)


@pytest.mark.sample(0)
def test_true_guidance_beside_flux_1s_own(tiny: dict[str, Path], tmp_path: Path) -> None:
    path, folder = tmp_path / "a.safetensors", str(tiny["flux-dev"])
    size = ("--steps", "2", "--size", "32x32", "--sampled", "--true-cfg", "2")
    assert cli("parity", "record", folder, "--backend", "cpu", *size, "-o", str(path)).code == 0
    ran = cli("parity", "check", str(path), folder, "--backend", "mlx", "--json")
    assert ran.code == 0, ran.err
    stations = [one["name"] for one in ran.events[0]["picture"]["stations"]]
    assert "text_encoder 2" in stations, "the negative prompt"
    recorded = passport_file.read(path).picture
    assert recorded is not None and recorded.asked["true_cfg"] == 2.0 and recorded.asked["negative_prompt"] == ""


# What is given to a check


@pytest.mark.sample(0)
def test_what_is_missing_or_another_is_refused(
    passport: Passport, tiny_folder: Path, nets: dict[str, Path], tmp_path: Path
) -> None:
    path, other = tmp_path / "a.safetensors", write_controlnet(tmp_path / "other", 99)
    passport_file.write(path, passport, overwrite=False)

    def checked(*networks: object) -> Ran:
        asked = ("parity", "check", str(path), str(tiny_folder), "--backend", "cpu", "--blocks")
        return cli(*asked, *controls(*networks))

    checked().refused(2, "recorded with --control union; give the same")
    checked(nets["union"]).refused(2, "recorded with --control patches.safetensors; give the same")
    checked(*names(nets), other).refused(5, "other: another network than was recorded, union, patches.safetensors")
    checked(f"{nets['union']}=a.png", nets["patches"]).refused(2, "give the network alone")
    checked(tmp_path / "nothing").refused(5, "no such file or folder")
    plain = ("parity", "record", "--backend", "cpu", "--steps", "1", "--size", "32x32", "--sampled")
    assert cli(*plain, "-o", str(tmp_path / "b.safetensors")).code == 0
    ran = cli("parity", "check", str(tmp_path / "b.safetensors"), "--backend", "cpu", "--control", "a")
    ran.refused(2, "recorded without --control; leave it out")


@pytest.mark.sample(0)
def test_networks_in_the_cache_are_found(
    passport: Passport, tiny_folder: Path, nets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a path of that name is not opened."""
    cached = {"union": nets["union"], "patches.safetensors": nets["patches"]}
    assert passport.picture is not None
    with closing(load(tiny_folder, "cpu")) as pipe:
        assert recorded_inputs.networks(passport.picture.controls, (), pipe.controls, cached.get) == names(nets)
        mixed = recorded_inputs.networks(passport.picture.controls, [str(nets["patches"])], pipe.controls, cached.get)
        assert mixed == names(nets)
    shutil.copytree(nets["union"], tmp_path / "owner" / "union")
    monkeypatch.chdir(tmp_path)
    assert named_control("owner/union") is None and named_control("~/union") is None


# Hostile files


BLOCKS = ("controlnet 1.controlnet_blocks.0", "controlnet 2.img_in")


@pytest.fixture(scope="module")
def original(passport: Passport, tmp_path_factory: pytest.TempPathFactory) -> Original:
    path = tmp_path_factory.mktemp("mutants") / "whole.safetensors"
    passport_file.write(path, cut(passport, BLOCKS), overwrite=False)
    return Original(path)


Change = Callable[[dict[str, Any]], object]


def first(document: dict[str, Any]) -> dict[str, Any]:
    control: dict[str, Any] = document["picture"]["controls"][0]
    return control


WRONG: dict[str, tuple[Change, str]] = {
    "another image's size": (lambda d: d["picture"]["asked"].update(width=64), "the size that was asked for"),
    "a picture of another size": (lambda d: first(d).update(picture="small"), "is [16, 24, 3], expected [32, 48, 3]"),
    "a huge picture": (lambda d: first(d).update(picture="huge"), "is [3000, 4000, 3], expected [32, 48, 3]"),
    "a picture without colours": (lambda d: first(d).update(picture="grey"), "is [32, 48], expected [32, 48, 3]"),
    "a picture of floats": (lambda d: first(d).update(picture=d["picture"]["latents"]), "is F32, expected U8"),
    "a picture that is not there": (lambda d: first(d).update(picture="x"), "'x' is not in the file"),
    "no picture": (lambda d: first(d).pop("picture"), "picture.controls[0].picture is missing"),
    "a path": (lambda d: first(d).update(path="/etc/hostname"), "'picture.controls[0].path' is a key that"),
    "no name": (lambda d: first(d).update(name=""), "a control called ''"),
    "no fingerprint": (lambda d: first(d).update(fingerprint=""), "has the fingerprint ''"),
    "a preprocessor that is none": (lambda d: first(d).update(preprocessor="sh"), "the preprocessor 'sh'"),
    "a scale that is large": (lambda d: first(d).update(scale=1e9), "picture.controls[0].scale"),
    "a scale of nothing": (lambda d: first(d).update(scale=None), "picture.controls[0].scale"),
    "an end before its start": (lambda d: first(d).update(end=0.1), "starts at 0.3, behind its end"),
    "nine controls": (lambda d: d["picture"].update(controls=[first(d)] * 9), "9 controls; at most 8"),
    "a mask of another size": (lambda d: d["picture"].update(mask="small"), "mask is uint8 [16, 24, 3]; expected"),
    "a mask of nothing": (lambda d: d["picture"].update(mask="grey", controls=[]), "a mask needs the image"),
    "guidance that is none": (lambda d: d["picture"]["asked"].update(true_cfg=-1), "true-cfg"),
    "a strength that is none": (lambda d: d["picture"]["asked"].update(strength=2), "strength"),
}


def written(original: Original, document: dict[str, Any], path: Path) -> Path:
    """A file of `document` with further tensors, and a right sum."""
    more = {"small": (16, 24, 3), "huge": (3000, 4000, 3), "grey": (HEIGHT, WIDTH)}
    table, body = dict(original.table), original.body
    for name, shape in more.items():
        if f'"{name}"' in json.dumps(document):
            size = int(np.prod(shape))
            table[name] = {"dtype": "U8", "shape": list(shape), "data_offsets": [len(body), len(body) + size]}
            body += bytes(size)
    wider = copy.copy(original)
    wider.table, wider.body = table, body
    return wider.write(path, json.dumps(document))


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.sample(0)
def test_a_wrong_file_is_refused(original: Original, nets: dict[str, Path], tmp_path: Path, fault: str) -> None:
    change, words = WRONG[fault]
    document = json.loads(json.dumps(original.document))
    change(document)
    path = written(original, document, tmp_path / "wrong.safetensors")
    assert words in refused(passport_file.read, path)
    cli("parity", "check", str(path), "--backend", "cpu", *controls(*names(nets))).refused(5, "record it again")


@pytest.mark.sample(0)
def test_another_controls_hash_and_a_missing_control(
    original: Original, nets: dict[str, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    """Files that are right by themselves: the networks given do not fit, or the run is not the recorded one."""
    path = tmp_path / "mutant.safetensors"

    def checked(change: Change) -> Ran:
        document = json.loads(json.dumps(original.document))
        change(document)
        written(original, document, path)
        return cli("parity", "check", str(path), str(tiny_folder), "--backend", "cpu", *controls(*names(nets)))

    checked(lambda d: first(d).update(fingerprint="0" * 64)).refused(5, "union: another network than was recorded")
    exchanged = checked(lambda d: first(d).update(fingerprint=d["picture"]["controls"][1]["fingerprint"]))
    exchanged.refused(5, "union: another network than was recorded")
    checked(lambda d: d["picture"].update(controls=[])).refused(2, "recorded without --control")
    checked(lambda d: d["picture"]["controls"].pop(0)).refused(5, "another network than was recorded")
    ran = checked(lambda d: first(d).update(scale=0.5))
    assert ran.code == 6 and "control 2: differs by" in ran.err, ran.err
    ran = checked(lambda d: d["picture"]["controls"].reverse())
    assert ran.code in (5, 6) and len(ran.err.splitlines()) == 1, ran.err


@pytest.mark.sample(0)
def test_every_mutant_of_the_controls_is_refused_or_judged(
    original: Original, nets: dict[str, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    path, codes = tmp_path / "mutant.safetensors", Counter[str]()
    asked = controls(*names(nets))
    for mutant in original.mutants():
        if not mutant.place.startswith("picture.controls.0"):
            continue
        original.write(path, mutant.text)
        try:
            passport_file.read(path)
        except ModelError as error:
            codes["refused"] += 1
            assert str(error).isprintable() and len(str(error)) <= 300, (mutant.place, error)
            continue
        ran = cli("parity", "check", str(path), str(tiny_folder), "--backend", "cpu", "--blocks", *asked)
        codes[f"exit {ran.code}"] += 1
        assert ran.code in (0, 2, 5, 6) and len(ran.err.splitlines()) <= 1 and "Traceback" not in ran.err, ran
        assert ran.code != 2 or "--control" in ran.err, ran.err
    print(dict(codes))
    assert codes["refused"] > 100 and codes["exit 0"]
