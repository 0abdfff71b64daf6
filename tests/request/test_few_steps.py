"""--few-steps: what it asks for, what comes before them, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli_runner import cli
from support.family_cases import BACKENDS
from support.lora_cases import write_lora
from support.recipe_cases import recipe_from_png

import qwenimg
from qwenimg import ModelError, UsageError
from qwenimg.common.jobs.image_options import merged
from qwenimg.common.request.few_steps import FewSteps, parse, resolve
from qwenimg.common.request.lora_text import Lora

ROW = FewSteps(
    steps=(8, 4), sampler="euler", schedule="trailing", loras={8: ("o/r/8.safetensors",), 4: ("o/r/4", "o/r/4b")}
)
KNOWN = {"fast": ROW, "whole": FewSteps(steps=(1,), sampler="lcm")}
SMALL: dict[str, Any] = {"width": 52, "height": 36, "seed": 7}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], None]:
    """Puts a file into a cache of its own, by owner/name/file."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(name: str, file: Path) -> None:
        owner, repo, inside = name.split("/")
        snapshot = tmp_path / "hub" / f"models--{owner}--{repo}" / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, snapshot / inside)

    return put


def test_one_word_asks_for_all_that_goes_with_it() -> None:
    asked = resolve({"few_steps": "fast", "seed": 3, "steps": None}, KNOWN)
    lora = (Lora("o/r/8.safetensors"),)
    assert asked == {"steps": 8, "sampler": "euler", "schedule": "trailing", "guidance": 1.0, "lora": lora, "seed": 3}
    more = resolve({"few_steps": "fast:4", "steps": 5, "sampler": "heun", "lora": (Lora("a", 0.5), Lora("b"))}, KNOWN)
    assert more["steps"] == 5 and more["sampler"] == "heun" and ", ".join(map(str, more["lora"])) == "o/r/4, a:0.5, b"
    assert resolve({"few_steps": "whole"}, KNOWN)["lora"] == ()
    assert resolve({"seed": 1, "few_steps": ""}, KNOWN) == {"seed": 1}
    for text, says in (
        ("slow", "there is fast or whole"), ("fast:5", "for 4, 8 steps"), ("fast:", "NAME:STEPS"), ("4", "NAME:STEPS"),
        ("fast:-4", "NAME:STEPS"), ("fast:4:4", "NAME:STEPS"), ("", ""),
    ):  # fmt: skip
        if text:
            with pytest.raises(UsageError, match=says):
                resolve({"few_steps": text}, KNOWN)
    assert parse(" Lightning:4 ") == ("lightning", 4)


def test_it_takes_the_place_of_what_was_said_before_in_a_weaker_place() -> None:
    base = {"prompt": "x", "steps": 50, "guidance": 4.0, "sampler": "heun", "seed": "1"}
    assert merged(base, {"few_steps": "lcm"}) == {"prompt": "x", "seed": "1", "few_steps": "lcm"}
    assert merged(base, {"few_steps": "lcm", "steps": 3})["steps"] == 3
    assert merged({"few_steps": "lcm"}, {"steps": 3}) == {"few_steps": "lcm", "steps": 3}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_qwen_image_with_lightning(
    backend: str, tiny_folder: Path, tmp_path: Path, cache: Callable[[str, Path], None]
) -> None:
    """As with its LoRA, schedule, steps and guidance by hand; from what of its files the cache has."""
    lora = write_lora(tiny_folder, "qwen", tmp_path / "a.safetensors")
    pipe = qwenimg.load(tiny_folder, backend=backend, precision="fp32")
    best = "lightx2v/Qwen-Image-Lightning/Qwen-Image-Lightning-4steps-V2.0-bf16.safetensors"
    with pytest.raises(ModelError, match=f"qwenimg pull {best}"):
        pipe.check("a dog", few_steps="lightning:4")
    name = best.replace("V2.0-bf16", "V1.0")
    cache(name, lora)
    made = pipe("a dog", few_steps="lightning:4", **SMALL)
    by_hand = pipe("a dog", lora=str(lora), steps=4, schedule="lightning", sampler="euler", guidance=1, **SMALL)
    assert np.array_equal(made.latents, by_hand.latents)
    recipe = dict(made.recipe)
    assert recipe["lora"] == f"{name}:1" and recipe["schedule"] == "lightning" and recipe["steps"] == 4
    again = pipe("a dog", few_steps="lightning:4", guidance=3, **SMALL).recipe
    assert again["guidance"] == 3 and again["steps"] == 4
    with pytest.raises(UsageError, match="there is lightning"):
        pipe.check("a dog", few_steps="lcm")


@pytest.mark.parametrize("way", ["lightning:4", "lcm:4", "hyper:4", "hyper-cfg:8", "hyper-unified:1"])
@pytest.mark.sample(1)
def test_sdxl_with_a_lora(
    way: str, folders: dict[str, Path], tmp_path: Path, cache: Callable[[str, Path], None]
) -> None:
    pipe = qwenimg.load(folders["sdxl"], backend="cpu", precision="fp32")
    row = pipe.model.few_steps[way.partition(":")[0]]
    lora = write_lora(folders["sdxl"], "sdxl", tmp_path / "a.safetensors", components=("unet",))
    [few] = row.settings(int(way.partition(":")[2]))["lora"]
    cache(few.source, lora)
    recipe = pipe("a dog", few_steps=way, **SMALL).recipe
    found = {name: recipe[name] for name in ("steps", "sampler", "schedule", "guidance")}  # type: ignore[literal-required]
    print(way, found)
    own = {"lcm:4": "model", "hyper-unified:1": "model"}.get(way, "trailing")
    assert found["schedule"] == own and found["guidance"] == (5 if "cfg" in way else 1)
    assert way.endswith(f":{found['steps']}")


def test_the_command_line(
    tiny_folder: Path, tmp_path: Path, cache: Callable[[str, Path], None], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    lora = write_lora(tiny_folder, "qwen", tmp_path / "a.safetensors")
    cache("lightx2v/Qwen-Image-Lightning/Qwen-Image-Lightning-8steps-V2.0.safetensors", lora)
    config = tmp_path / "config" / "qwenimg"
    config.mkdir(parents=True)
    (config / "config.toml").write_text("steps = 30\nguidance = 5.0\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config.parent))
    fixed = ["-m", str(tiny_folder), "--backend", "cpu", "--size", "52x36", "--quiet", "-s", "3"]
    assert cli("a dog", *fixed, "--few-steps", "lightning:8", "-o", "x.png").code == 0
    recipe = dict(recipe_from_png(Path("x.png")))
    assert (recipe["steps"], recipe["guidance"], recipe["schedule"]) == (8, 1, "lightning")
    again = cli(
        "--from", "x.png", "-m", str(tiny_folder), "--backend", "cpu", "--quiet", "-o", "y.png"
    )  # from the cache
    assert (again.code, again.err) == (0, "")
    assert dict(recipe_from_png(Path("y.png")))["lora_fingerprints"] == recipe["lora_fingerprints"]
    cli("a dog", *fixed, "--few-steps", "lightning:5").refused(2, "for 4, 8 steps")
    cli("a dog", *fixed, "--few-steps", "lightning:4").refused(5, "qwenimg pull lightx2v/Qwen-Image-Lightning")
    cli("a dog", *fixed, "--lightning", "4").refused(2, "--few-steps lightning")
    cli("a dog", *fixed, "--lcm", "4").refused(2, "--few-steps lcm")


def test_the_built_in_model_sends_to_a_real_one_and_not_to_a_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not fit the built-in model, whose LoRA was named and is 1.7 GB."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    for option in (["--few-steps", "lightning:4"], ["--few-steps", "lcm"]):
        cli("a red circle", *option).refused(5, "qwenimg pull qwen-image (57.7 GB)", "few steps")
        cli("a red circle", "-m", "shapes", *option).refused(2, "nothing is made that draws this model in a few steps")
    with pytest.raises(UsageError, match="nothing is made"):
        qwenimg.load("shapes", "cpu").check("a red circle", few_steps="lightning:4")
