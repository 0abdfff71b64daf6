"""`tools/bench_against.py mflux`: what is refused, what the peer's arm is given, and that both make the same latents.

mflux itself is no tool of this project: `fake_mflux` stands in for it, on diffusers.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import bench_against
import numpy as np
import pytest
import random_model
from against import peers
from random_model import write_random_model
from support.cli_runner import Ran, captured
from support.fake_mflux import Fake
from support.sparse_files import sparse

import qwenimg
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.numbers import noise, packing

SMALL = ("-W", "64", "-H", "48", "--steps", "3", "--rounds", "1", "--precision", "fp32", "--json")
ROUNDINGS = 1e-5  # of states of about 1, which another process made, perhaps with another BLAS; 16 bits would be 4e-3


def against(peer: str, *arguments: str) -> Ran:
    return captured(bench_against.main, [peer, *arguments])


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that mflux's one width would refuse."""
    folder = tmp_path_factory.mktemp("thin") / "qwen"
    write_random_model(folder)
    return folder


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A folder that mflux takes, of which no weight can be used."""
    write_random_model(folder := tmp_path / "wide", text=random_model.NARROW_TEXT)
    described = {"_class_name": qwen_dit.CLASS_NAME, "num_layers": 1}
    (folder / "transformer" / "config.json").write_text(json.dumps(described))
    hole(folder, ("BF16", 2))
    return folder


def hole(folder: Path, products: tuple[str, int]) -> None:
    """A transformer of full width, one layer, without values; `products`: dtype and bytes of weights with two axes."""
    manifest = qwen_dit.manifest(QwenDiTConfig(num_layers=1))
    kept = {name: products if len(shape) == 2 else ("BF16", 2) for name, shape in manifest.items()}
    entries = {name: (kept[name][0], shape, kept[name][1]) for name, shape in manifest.items()}
    sparse(folder / "transformer" / "diffusion_pytorch_model.safetensors", entries)


def script(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_what_mflux_does_not_run_is_refused(thin: Path, folders: dict[str, Path]) -> None:
    against("mflux", str(thin)).refused(2, "24 heads x 128", "num_attention_heads 3", "joint_attention_dim 72")
    against("mflux", str(folders["sd15"])).refused(2, "takes folders of QwenImagePipeline", "StableDiffusionPip")
    against("mflux", str(thin), "--backend", "cpu").refused(2, "--backend mlx, not cpu")
    against("mflux", str(thin), "--steps", "2").refused(2, "--steps", "2")
    against("comfy", str(thin)).refused(2, "comfy")


@pytest.mark.sample(0)
def test_a_transformer_in_codes_is_refused(wide: Path) -> None:
    hole(wide, ("F8_E4M3", 1))
    against("mflux", str(wide)).refused(2, "not quantized")


@pytest.mark.sample(0)
def test_a_peer_that_is_not_there_is_told(wide: Path, tmp_path: Path) -> None:
    bare = script(tmp_path / "bare", f'exec "{sys.executable}" -I -S "$@"')
    told = ("has no numpy, mlx, mflux", "pip install mflux==0.24.0", "--peer-python")
    against("mflux", str(wide), "--peer-python", bare).refused(3, *told)
    for wrong in (script(tmp_path / "other", "echo hello"), script(tmp_path / "broken", "exit 1")):
        against("mflux", str(wide), "--peer-python", wrong).refused(2, "that is no Python")
    against("mflux", str(wide), "--peer-python", str(tmp_path / "nowhere")).refused(2, "nowhere")
    against("diffusers", "shapes", "--peer-python", bare).refused(3, "has no qwenimg, torch, diff")


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.sample(0)
def test_the_peer_is_given_what_ours_takes(
    guidance: float, thin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both prompts' states, the noise and the noise levels; a peer that does something else is INVALID."""
    monkeypatch.setattr(peers, "_check_width", lambda part: None)
    (seen := tmp_path / "seen").mkdir()
    Fake(folder=str(thin), seen=str(seen), computes=False).install(tmp_path / "site", monkeypatch)
    its = script(tmp_path / "python", f'echo "$@" >> "{tmp_path}/ran"; exec "{sys.executable}" "$@"')
    ran = against("mflux", str(thin), "--peer-python", its, *SMALL, "--guidance", str(guidance))
    made = json.loads(ran.out)
    assert len(re.findall(r"mflux_arm\.py", (tmp_path / "ran").read_text())) == 1
    assert ran.code == 0 and made["ratio"] == made["processor_ratio"] == "INVALID" and made["difference"] > 0.1
    ours, theirs = made["arms"]
    assert (ours["arm"], theirs["arm"]) == ("qwenimg, mlx", "mflux 0.24.0") and theirs["peak"] > 0
    assert set(theirs["stages"]) == {"import", "load", "first step", "steady step", "decode"}

    calls = [np.load(file) for file in sorted(seen.iterdir())]
    assert [int(call["t"]) for call in calls] == [t for steps in (2, 2, 3) for t in range(steps) for _ in range(2)]
    pipe = qwenimg.load(thin, "mlx", "fp32")
    asked = {n: pipe.check("a red circle", width=64, height=48, guidance=guidance, steps=n) for n in (2, 3)}
    texts = [pipe.engine.numpy(x) for x in pipe.model.texts.states([asked[2].prompt, asked[2].negative_prompt])]  # type: ignore[attr-defined]
    assert texts[0].shape != texts[1].shape
    for i, call in enumerate(calls):
        sigmas = pipe.model.plan(asked[len(call["sigmas"]) - 1]).sigmas
        assert tuple(call["sigmas"]) == sigmas
        np.testing.assert_allclose(call["text"], texts[i % 2], rtol=0, atol=ROUNDINGS)
    begun = [call for call in calls if call["t"] == 0]
    start = packing.pack(noise.normal((1, 16, 6, 8), seed=0))
    assert len(begun) == 6 and all(np.array_equal(call["hidden"], start) for call in begun)
    pipe.close()


@pytest.mark.slow
def test_the_same_latents_as_another_implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of full width, diffusers' in the place of mflux's, and then a velocity that is 1 % too large."""
    random_model.write_folder(folder := tmp_path / "wide", layers=1)
    Fake(folder=str(folder)).install(tmp_path / "site", monkeypatch)
    for guidance in ("1", "4"):
        ran = against("mflux", str(folder), *SMALL, "--guidance", guidance)
        made = json.loads(ran.out)
        print(guidance, made["difference"], made["ratio"], made["processor_ratio"])
        assert ran.code == 0 and made["difference"] < 1e-5 and made["ratio"] != "INVALID"
    Fake(folder=str(folder), gain=1.01).install(tmp_path / "faulty", monkeypatch)
    ran = against("mflux", str(folder), *SMALL[:-1])
    print(ran.out.decode())
    assert ran.code == 0 and [line.split()[-1] for line in ran.out.decode().splitlines()[-2:]] == ["INVALID"] * 2
