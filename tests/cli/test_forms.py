"""A value of a wrong form is told before any file is opened: exit 2, where a missing file is 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

import qwenimg
from qwenimg import UsageError
from qwenimg.cli.commands.generate import generate
from qwenimg.cli.main import run

# Of each option one value that no model takes.
WRONG = {
    "max_memory": "lots", "quantize": "7", "precision": "fp33", "preset": "nice", "size": "big", "aspect": "wide",
    "seed": "x", "steps": "0", "guidance": "-1", "sampler": "nope", "schedule": "nope", "cfg_end": "2",
    "true_cfg": "0.5", "devices": "0", "upscale": "0",
    "step_cache": "3", "cached_calls": "x", "guidance_rescale": "7", "cfg_normalization": "-1", "cfg_truncation": "2",
    "skip_layers": "9-7", "skip_layer_scale": "-1", "decoder_steps": "0", "decoder_guidance": "-1",
    "strength": "9", "refine_at": "4", "layers": "100", "caption": "la",
    "clip_skip": "99", "lora": "a:0.5:c:", "lora_mode": "no", "few_steps": "lcm:x", "num_images": "0", "width": "-3",
    "height": "0", "prediction": "x", "variant": "x", "backend": "x", "compile": "x", "debug": "x", "output": "a.gif",
    "save_latents": "x.txt", "latents": "x.txt", "control": "net=a.png:nan", "control_mode": "no",
    "ip_adapter": "a:0.5:c:", "ip_image": "a.png", "ip_mask": "a.png",
    "only_masked": "20000", "mask_blur": "-1", "mask_fill": "no", "mask_mode": "no", "variation": "7:2",
    "hires": "9", "hires_strength": "nan", "hires_steps": "0", "hires_with": "latent-antialiased", "outpaint": "left=x",
    "embedding": "a=", "rewrite": "99999999999999999999",
}  # fmt: skip
# Any text may be one of these: a prompt, or the name of a file, a folder or a model.
NAMES = {
    "prompt",
    "prompt_file",
    "replay",
    "model",
    "models_dir",
    "wildcards",
    "refiner",
    "upscale_with",
    "transformer",
    "text_encoder",
    "vae",
    "effnet",
    "preview_with",
    "rewrite_with",
}
NAMES |= {"ip_encoder", "wildcards", "negative_prompt", "tokenizer", "image", "mask"}
MISSING = (["--from", "missing.png"], ["x", "-i", "missing.png", "-m", "/missing"], ["--prompt-file", "missing.txt"])


def test_every_option_with_a_value_is_here() -> None:
    options = {one.name for one in generate.params if isinstance(one, click.Option) and not one.is_flag}
    hidden = {one.name for one in generate.params if isinstance(one, click.Option) and one.hidden}
    assert options - hidden == set(WRONG) | NAMES, "give a wrong value of each option in WRONG"


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.sample(13)
def test_a_wrong_form_is_told_before_a_file_is_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for missing in MISSING:
        code = run([*missing, f"--{name.replace('_', '-')}={WRONG[name]}"])
        told = capfd.readouterr().err
        assert code == 2 and "missing" not in told, told
    print(told)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_memory": "lots"}, "--max-memory 'lots': give an amount"),
        ({"max_memory": -1}, "max_memory is -1"),
        ({"compile": "maybe"}, "--compile 'maybe' is not one of"),
        ({"compile": True}, "compile is True; expected a text"),
        ({"precision": "fp33"}, "fp33"),
        ({"preset": "nice"}, "--preset 'nice'"),
        ({"quantize": "7"}, "--quantize '7'"),
    ],
)
def test_the_same_from_python(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        qwenimg.load("/missing", **given)


@pytest.mark.parametrize(("mode", "compiles"), [("auto", None), ("on", True), ("off", False)])
def test_compile_from_python(mode: str, compiles: bool | None) -> None:
    with_mode = qwenimg.load("shapes", backend="mlx", compile=mode)
    assert with_mode.runtime.compiles is compiles
    with_mode.close()
