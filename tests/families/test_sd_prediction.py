"""What a UNet predicts, as other programs state it: the picture is that of the folder that states it as diffusers does,
and each run says what it read and where."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli_runner import cli

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.load_options import LoadOptions, Prediction
from qwenimg.common.families.registry import open_model
from qwenimg.common.families.stable_diffusion import prediction
from qwenimg.common.formats.headers import peek

ASKED = {"width": 40, "height": 24, "steps": 2, "seed": 4, "guidance": 3.0, "sampler": "euler"}
YAML = "model:\n  target: ldm.models.diffusion.ddpm.LatentDiffusion\n  params:\n    parameterization: {}\n"
SGM = """model:
  params:
    denoiser_config:
      target: sgm.modules.diffusionmodules.denoiser.DiscreteDenoiser
      params:
        scaling_config:
          target: sgm.modules.diffusionmodules.denoiser_scaling.{}
"""
ONE_TRAINER = "rescale_noise_scheduler_to_zero_terminal_snr"


def decided(
    folder: Path, notes: dict[str, str] | None = None, beside: str | bytes | None = None, marks: tuple[str, ...] = ()
) -> prediction.Decided:
    """Of a file with this metadata and these marks, and a YAML beside it; one that says nothing is noise."""
    file = folder / "some model.safetensors"
    save_file({name: torch.empty(0) for name in marks} | {"x": torch.ones(1)}, file, metadata=notes)
    if beside is not None:
        file.with_suffix(".yaml").write_bytes(beside.encode() if isinstance(beside, str) else beside)
    found = prediction.decide(peek(file), None, "eps", "usual")
    print(found)
    assert all(len(line) <= 260 and line.isprintable() for line in found.warnings)
    return found


# One file of each way, drawn on both backends


@pytest.fixture(scope="module")
def pair(both, tmp_path_factory) -> tuple[Path, Path]:
    """A folder of SD 1.x whose scheduler has v_prediction, and the file of the same weights."""
    place = tmp_path_factory.mktemp("velocity")
    folder, file = both["sd1"]
    shutil.copytree(folder, place / "folder")
    path = place / "folder" / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prediction_type": "v_prediction"}))
    return place / "folder", file


def stated(file: Path, folder: Path, notes: dict[str, str], yaml: str | None = None) -> Path:
    """Copy `file` to `folder` with this metadata, or a YAML beside it."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(file.parent / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    save_file(load_file(file), folder / "my model.safetensors", metadata=notes)
    if yaml is not None:
        (folder / "my model.yaml").write_text(yaml)
    return folder / "my model.safetensors"


@pytest.mark.parametrize(
    ("backend", "notes", "yaml", "where"),
    [
        ("cpu", {"modelspec.predict_key": "v"}, None, "modelspec.predict_key 'v' in the metadata"),
        ("mlx", {}, YAML.format('"v"'), "parameterization 'v' in my model.yaml"),
        pytest.param("mlx", {"modelspec.predict_key": "v"}, None, "modelspec.predict_key 'v'", marks=pytest.mark.slow),
        pytest.param("cpu", {}, YAML.format('"v"'), "parameterization 'v' in my model.yaml", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sample(1)
def test_the_picture_is_that_of_the_folder_that_states_it(
    pair: tuple[Path, Path], tmp_path: Path, backend: str, notes: dict[str, str], yaml: str | None, where: str
) -> None:
    folder, file = pair
    told: list[tuple[str, str]] = []
    path = stated(file, tmp_path / "model", notes, yaml)
    right = qwenimg.load(folder, backend, "fp32")("a red circle", **ASKED)
    ours = qwenimg.load(path, backend, "fp32", notify=lambda kind, text: told.append((kind, text)))(
        "a red circle", **ASKED
    )
    plain = qwenimg.load(file, backend, "fp32")("a red circle", **ASKED)
    off = np.abs(plain.pixels.astype(int) - right.pixels).max()
    print(f"{backend} {where}: latents {np.abs(right.latents - ours.latents).max():.1e}; as noise {off} of 255")
    assert np.array_equal(right.latents, ours.latents) and off > 20
    assert [text for kind, text in told if kind == "notice" and "prediction: v" in text and where in text]


@pytest.mark.sample(0)
def test_info_and_convert_say_the_same(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = stated(pair[1], tmp_path / "model", {"modelspec.predict_key": "v"})
    shown = cli("info", str(path))
    assert "prediction: v (modelspec.predict_key 'v' in the metadata)" in shown.out.decode()
    converted = cli("convert", str(path), str(tmp_path / "made"))
    assert converted.code == 0 and "modelspec.predict_key 'v'" in converted.err
    made = json.loads((tmp_path / "made" / "scheduler" / "scheduler_config.json").read_text())
    assert made["prediction_type"] == "v_prediction"
    odd = cli("info", str(stated(pair[1], tmp_path / "odd", {"modelspec.prediction_type": "flow_prediction"})))
    assert "prediction: eps" in odd.out.decode() and "warning: my model.safetensors" in odd.out.decode()
    assert "--prediction" in odd.out.decode()


@pytest.mark.sample(0)
def test_a_run_prints_it(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """What was read and where, on standard error; a warning for a word that is none."""
    asked = ("-W", "16", "-H", "16", "--steps", "1", "--backend", "cpu", "--precision", "fp32", "-o")
    for name, notes, yaml, lines in (
        ("a", {"modelspec.predict_key": "v"}, None, ["prediction: v (modelspec.predict_key 'v' in the metadata)"]),
        ("b", {}, YAML.format("banana"), ["warning: ", "parameterization 'banana' in my model.yaml", "--prediction"]),
        ("f", {"ss_v_parameterization": "maybe"}, None, ["warning: ", "ss_v_parameterization 'maybe'", "--prediction"]),
    ):
        path = stated(pair[1], tmp_path / name, notes, yaml)
        ran = cli("a red circle", "-m", str(path), *asked, str(tmp_path / f"{name}.png"))
        print(ran.err)
        assert ran.code == 0 and all(line in ran.err for line in lines)
    given = cli("a red circle", "-m", str(path), "--prediction", "v", *asked, str(tmp_path / "c.png"))
    assert given.code == 0 and "banana" not in given.err


def test_another_unet_states_its_own(pair: tuple[Path, Path], both, tmp_path: Path) -> None:
    """Of `--unet FILE` the file counts, and where it states nothing the model."""
    tensors = load_file(pair[1])
    unet = {name: value for name, value in tensors.items() if name.startswith("model.diffusion_model.")}
    save_file(unet | {"v_pred": torch.empty(0), "ztsnr": torch.empty(0)}, tmp_path / "v.safetensors")
    save_file(unet, tmp_path / "plain.safetensors")
    for model, name, expected in (
        (both["sd1"][0], "v", ("v_prediction", True)),
        (both["sd1"][1], "v", ("v_prediction", True)),
        (both["sd1"][0], "plain", ("epsilon", False)),
        (pair[0], "plain", ("v_prediction", False)),
    ):
        opened = open_model(model, LoadOptions(parts={"transformer": tmp_path / f"{name}.safetensors"}))
        opened.checkpoint.close()
        scheduler = opened.checkpoint.scheduler
        assert (scheduler.prediction_type, scheduler.rescale_betas_zero_snr) == expected
    given = LoadOptions(prediction="eps", parts={"transformer": tmp_path / "v.safetensors"})
    opened = open_model(both["sd1"][0], given)
    opened.checkpoint.close()
    assert opened.checkpoint.scheduler.prediction_type == "epsilon"


@pytest.mark.parametrize("text", ["v", "V-Prediction", "velocity", "sample"])
def test_words_in_a_folder(both, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(both["sd1"][0], tmp_path / "model")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prediction_type": text}))
    opened = open_model(folder)
    opened.checkpoint.close()
    assert opened.checkpoint.scheduler.prediction_type == ("sample" if text == "sample" else "v_prediction")


@pytest.mark.parametrize("text", ["flow_prediction", "", 1, ["v"]])
def test_a_word_in_a_folder_that_is_none(both, tmp_path: Path, text: Any) -> None:
    folder = shutil.copytree(both["sd1"][0], tmp_path / "model")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prediction_type": text}))
    with pytest.raises(ModelError, match="say it with --prediction"):
        open_model(folder)
    opened = open_model(folder, LoadOptions(prediction="v"))
    opened.checkpoint.close()
    assert opened.checkpoint.scheduler.prediction_type == "v_prediction"


# Words and places


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ({"modelspec.predict_key": "v"}, "v"),  # ComfyUI
        ({"modelspec.predict_key": "epsilon"}, "eps"),
        ({"modelspec.prediction_type": "v"}, "v"),  # sd-scripts
        ({"modelspec.prediction_type": "epsilon"}, "eps"),
        *(({"modelspec.prediction_type": word}, "v") for word in ("v_prediction", "V-PREDICTION", "v-pred", "vpred")),
        *(({"prediction_type": word}, "v") for word in ("velocity", " v ", "v_parameterization")),
        *(({"modelspec.prediction_type": word}, "x0") for word in ("sample", "x0", "x_start")),
        ({"ss_v_parameterization": "True"}, "v"),
        ({"ss_v_parameterization": "False"}, "eps"),
        ({"ss_v_prediction": "1"}, "v"),
        ({"ss_v_parameterization": "None"}, None),
        ({"ot_config": json.dumps({"force_v_prediction": True, "epochs": 3, "concepts": [{"x": None}]})}, "v"),
        ({"ot_config": json.dumps({"force_epsilon_prediction": True})}, "eps"),
        ({"ot_config": json.dumps({"force_v_prediction": False})}, None),
        ({"modelspec.architecture": "stable-diffusion-v2-768-v"}, "v"),
        ({"modelspec.architecture": "stable-diffusion-xl-v1-base"}, None),
        ({"modelspec.prediction_type": "None"}, None),
        ({"modelspec.prediction_type": ""}, None),
    ],
)
def test_metadata(tmp_path: Path, notes: dict[str, str], expected: Prediction | None) -> None:
    found = decided(tmp_path, notes)
    assert (found.prediction, found.stated) == (expected or "eps", expected is not None)
    assert not found.warnings and (found.reason == "usual") == (expected is None)


@pytest.mark.parametrize("text", ["flow_prediction", "rectified flow", "edm", "banana", "v" * 400, "\x1b[2J"])
def test_a_word_that_is_none_warns(tmp_path: Path, text: str) -> None:
    [warning] = decided(tmp_path, {"modelspec.prediction_type": text}).warnings
    assert "--prediction" in warning and "eps is taken" in warning


@pytest.mark.parametrize("text", ["{" * 5000, '{"a": NaN}', "v"])
def test_settings_of_a_trainer_that_are_not_read_warn(tmp_path: Path, text: str) -> None:
    [warning] = decided(tmp_path, {"ot_config": text}).warnings
    assert "ot_config" in warning and "--prediction" in warning


@pytest.mark.parametrize(
    "text", ["[v]", "true", "1", "!!python/name:os.system v", '!!python/object/apply:os.system ["touch x"]']
)
def test_a_parameterization_that_is_no_text_warns(tmp_path: Path, text: str) -> None:
    found = decided(tmp_path, beside=YAML.format(text))
    [warning] = found.warnings
    assert not found.stated and "parameterization in some model.yaml" in warning and "--prediction" in warning


def test_the_velocity_of_a_flow_is_another(tmp_path: Path) -> None:
    notes = {"modelspec.prediction_type": "velocity", "modelspec.noise_process": "flow"}
    found = decided(tmp_path, notes)
    assert not found.stated and len(found.warnings) == 1
    assert decided(tmp_path, notes | {"modelspec.noise_process": "ddpm"}).prediction == "v"


def test_zero_snr(tmp_path: Path) -> None:
    """Of a velocity, where metadata states it; the mark `ztsnr` counts always."""
    assert decided(tmp_path, {"modelspec.prediction_type": "v-zsnr"}).zero_snr
    assert decided(tmp_path, {"ot_config": json.dumps({ONE_TRAINER: True})}).zero_snr
    assert decided(tmp_path, {"modelspec.prediction_type": "v", "ss_zero_terminal_snr": "True"}).zero_snr
    assert not decided(tmp_path, {"modelspec.prediction_type": "epsilon", "ss_zero_terminal_snr": "True"}).zero_snr
    assert decided(tmp_path, {}, marks=("ztsnr",)).zero_snr == "tensor ztsnr"


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        (YAML.format('"v"'), "v"),
        (YAML.format("v"), "v"),
        (YAML.format("eps"), "eps"),
        (YAML.format("x0"), "x0"),
        (SGM.format("VScaling"), "v"),
        (SGM.format("EpsScaling"), "eps"),
        ("\ufeff" + YAML.format("v").replace("\n", "\r\n"), "v"),
        ("model: {params: {parameterization: v}}", "v"),
        ("parameterization: v", "v"),
        ("", None),
        ("model:\n", None),
        ("model: 3", None),
        ("- a\n- b", None),
        (YAML.format("null"), None),
        ("a: &a [1]\nmodel: *a", None),
    ],
)
def test_a_yaml_beside_the_file(tmp_path: Path, yaml: str, expected: Prediction | None) -> None:
    found = decided(tmp_path, beside=yaml)
    assert (found.prediction, found.stated, found.warnings) == (expected or "eps", expected is not None, ())
    if expected:
        assert "some model.yaml" in found.reason


@pytest.mark.parametrize(
    ("notes", "beside", "marks", "expected", "counts"),
    [
        ({"modelspec.prediction_type": "epsilon"}, YAML.format("v"), (), "v", "some model.yaml"),
        ({}, YAML.format("eps"), ("v_pred",), "eps", "some model.yaml"),
        ({"modelspec.prediction_type": "epsilon"}, None, ("v_pred",), "v", "tensor v_pred"),
        ({"modelspec.predict_key": "epsilon", "modelspec.prediction_type": "v"}, None, (), "v", "prediction_type"),
        ({"modelspec.predict_key": "v", "ss_v_parameterization": "False"}, None, (), "v", "predict_key"),
    ],
)
def test_the_first_statement_counts_and_the_other_is_told(
    tmp_path: Path, notes: dict[str, str], beside: str | None, marks: tuple[str, ...], expected: str, counts: str
) -> None:
    found = decided(tmp_path, notes, beside, marks)
    assert found.prediction == expected and counts in found.reason
    [warning] = found.warnings
    assert "the first counts" in warning and f"--prediction {'v' if expected == 'eps' else 'eps'}" in warning
    given = prediction.decide(peek(tmp_path / "some model.safetensors"), "x0", "eps", "usual")
    assert (given.prediction, given.reason, given.warnings) == ("x0", "as given", ())


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)


def test_an_alias_bomb_is_not_made(tmp_path: Path) -> None:
    assert decided(tmp_path, beside=BOMB + YAML.format("v")).prediction == "v"
    assert not decided(tmp_path, beside="model: &m\n  params: *m\n").stated


@pytest.mark.parametrize(
    "content",
    [
        b"model: [" * 3000,
        b"model:\n\tparams: v",
        b"\xff\xfe\x00v",
        b"a: \x00",
        b"a: 'x",
        b"a: *b",
        b"parameterization: v\nparameterization: eps",
        b"#" * (prediction.MAX_YAML + 1),
    ],
)
def test_a_yaml_that_cannot_be_read_is_told(tmp_path: Path, content: bytes) -> None:
    found = decided(tmp_path, {"modelspec.predict_key": "v"}, content)
    [warning] = found.warnings
    assert found.prediction == "v" and "some model.yaml beside the model is not read" in warning


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("gone"), os.mkdir, lambda p: p.symlink_to(p)])
def test_what_is_no_file_is_told(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "some model.yaml")
    [warning] = decided(tmp_path).warnings
    assert "is not read" in warning and "--prediction" in warning


def test_cosxl_is_refused_by_name(both, tmp_path: Path) -> None:
    """Its levels of noise are another schedule's, so that no word for its prediction makes it right."""
    tensors = load_file(both["sdxl"][1]) | {"edm_vpred.sigma_max": torch.ones(1), "edm_vpred.sigma_min": torch.ones(1)}
    save_file(tensors, tmp_path / "cos.safetensors")
    with pytest.raises(ModelError, match="CosXL"):
        open_model(tmp_path / "cos.safetensors")
