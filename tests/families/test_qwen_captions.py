"""Runs of Qwen-Image-Layered without a prompt: what is loaded when, the recipe, replays, the command line and the
server; and text encoders that cannot describe a picture."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file
from support.cli_runner import cli
from support.drawing_here import drawing
from support.folder_tensors import tensors
from support.processes import start as started
from support.silent_conversion import Silent
from support.tiny_layered import with_generation

import qwenimg
from qwenimg import Pipeline
from qwenimg.cli.serve.apis import body
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.signals import STOPPED
from qwenimg.cli.workers import messages
from qwenimg.cli.workers.drawing_process import DrawingProcess
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.conversion.convert import convert
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.qwen_image import captions
from qwenimg.common.jobs.job import InputFiles
from qwenimg.common.networks.encoders import decoder
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig
from qwenimg.common.parts.texts import writing
from qwenimg.common.pipeline import fit_options, start
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime, limit_for
from qwenimg.common.runtime.stages import Stage

LIMIT = 12
PICTURE = np.random.default_rng(3).integers(0, 256, (70, 96, 4), np.uint8)
ASKED: dict[str, Any] = {
    "image": PICTURE, "width": 96, "height": 64, "layers": 1, "steps": 1, "guidance": 3.0, "seed": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captions, "LIMIT", LIMIT)


def opened(folder: Path, backend: str = "cpu", **more: Any) -> Pipeline:
    return qwenimg.load(folder, backend=backend, **({"precision": "fp32"} | more))


def plan_of(pipe: Pipeline, prompt: str) -> tuple[list[Stage], Any]:
    request = pipe.check(prompt, **ASKED)
    stages = pipe.model.stages(request, pipe.model.plan(request), start.latent_shape(pipe.model, request))
    return stages, fit_options.plan_memory(pipe.model, request)


# A run


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_the_caption_is_the_prompt(tiny_layered: Path, backend: str) -> None:
    with opened(tiny_layered, backend) as pipe:
        result = pipe("", **ASKED)
        prompt = result.recipe["prompt"]
        assert prompt == pipe.model.texts.known(*pipe.model._to_describe(pipe.check("", **ASKED)))  # type: ignore[attr-defined]
        assert np.array_equal(pipe(prompt, **ASKED).latents, result.latents)
        assert pipe("", caption="zh", **ASKED).recipe["prompt"] != prompt
    with opened(tiny_layered, backend) as pipe:  # whose encoder has neither head nor vision tower
        assert np.array_equal(pipe(prompt, **ASKED).latents, result.latents)


@pytest.mark.sample(0)
def test_the_head_is_loaded_for_a_caption_alone(tiny_layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, loaded = list[str](), list[tuple[str, bool]]()
    enter, open_ = Residents.acquire, Runtime.open

    def opens(self: Runtime, component: Any, title: str, more: int = 0) -> Any:
        loaded.append((title, decoder.HEAD in component.plan.entries))
        return open_(self, component, title, more)

    monkeypatch.setattr(Residents, "acquire", lambda self, stage: (entered.append(stage.name), enter(self, stage))[1])
    monkeypatch.setattr(Runtime, "open", opens)
    pipe = opened(tiny_layered)
    planned, memory = plan_of(pipe, "")
    plain, without = plan_of(pipe, "a ring")
    assert [stage.name for stage in planned] == ["encode", "writing", "text", "modulation", "denoise", "decode"]
    assert [stage.name for stage in plain] == ["encode", "text", "modulation", "denoise", "decode"]
    weights = {stage.name: stage.weights for stage in memory.stages}
    alone = {stage.name: stage.weights for stage in without.stages}
    config = pipe.checkpoint["text_encoder"].config  # type: ignore[index]
    head = 4 * config.vocab_size * config.hidden_size
    tower = 4 * sum(np.prod(entry.shape) for name, entry in pipe.checkpoint["text_encoder"].plan.entries.items()  # type: ignore[index]
                    if name.startswith("visual."))  # fmt: skip
    print(f"caption {weights['writing']:,} bytes of weights, text {alone['text']:,}, head {head:,}, tower {tower:,}")
    assert weights["writing"] - alone["text"] == head + tower
    pipe("", **ASKED)
    assert entered == [stage.name for stage in planned]
    assert [one for one in loaded if one[0] == "text encoder"] == [("text encoder", True)], "once, for both"
    assert "text encoder" not in pipe.model.residents._networks
    entered.clear()
    pipe("", **(ASKED | {"seed": 4}))
    assert "writing" not in entered and "text" not in entered, "it is known"
    other = opened(tiny_layered)
    loaded.clear()
    other("a ring", **ASKED)
    assert [one for one in loaded if one[0] == "text encoder"] == [("text encoder", False)]


@pytest.mark.sample(0)
def test_streamed_and_converted_and_in_16_bits(tiny_layered: Path, tmp_path: Path) -> None:
    whole = opened(tiny_layered)
    prompt = whole("", **ASKED).recipe["prompt"]
    weights = 4 * whole.checkpoint["text_encoder"].plan.parameters  # type: ignore[index]
    [needs] = [stage for stage in plan_of(opened(tiny_layered), "")[1].stages if stage.name == "writing"]
    streamed = opened(tiny_layered, max_memory=limit_for(needs.activations + int(0.9 * weights)))
    [fewer] = [stage for stage in plan_of(streamed, "")[1].stages if stage.name == "writing"]
    assert fewer.weights < weights and streamed("", **ASKED).recipe["prompt"] == prompt
    convert(tiny_layered, tmp_path / "same", LoadOptions(), Silent())
    assert opened(tmp_path / "same")("", **ASKED).recipe["prompt"] == prompt
    assert opened(tiny_layered, precision="bf16")("", **ASKED).recipe["prompt"]
    assert opened(tiny_layered, quantize="8")("", **ASKED).recipe["prompt"]


@pytest.mark.sample(0)
def test_a_lora_of_the_text_encoder_has_a_caption_of_its_own(tiny_layered: Path, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(1)
    path, file = "text_encoder.layers.1.mlp.up_proj", tmp_path / "a.safetensors"
    save_file({f"{path}.lora_A.weight": torch.randn(4, 60), f"{path}.lora_B.weight": torch.randn(88, 4)}, file)
    pipe = opened(tiny_layered)
    prompt = pipe("", **ASKED).recipe["prompt"]
    assert pipe("", lora=f"{file}:1", **ASKED).recipe["prompt"] != prompt
    assert pipe("", **ASKED).recipe["prompt"] == prompt


# Text encoders that cannot


def without(folder: Path, part: str, to: Path) -> Path:
    """A copy of `folder` whose text encoder has no tensor with `part` in its name."""
    encoder = shutil.copytree(folder, to) / "text_encoder"
    kept = {name: value for name, value in tensors(encoder).items() if part not in name}
    for file in (*encoder.glob("*.safetensors"), encoder / "model.safetensors.index.json"):
        file.unlink()
    save_file(kept, encoder / "model.safetensors")
    return to


@pytest.mark.parametrize(("part", "said"), [("lm_head", "no head (lm_head.weight)"), ("visual", "no vision tower")])
@pytest.mark.sample(1)
def test_a_part_is_missing(tiny_layered: Path, tmp_path: Path, part: str, said: str) -> None:
    pipe = opened(without(tiny_layered, part, tmp_path / "part"))
    with pytest.raises(ModelError, match="the text encoder has") as caught:
        pipe.check("", **ASKED)
    assert said in str(caught.value) and "give a prompt" in str(caught.value)
    assert np.array_equal(pipe("a ring", **ASKED).latents, opened(tiny_layered)("a ring", **ASKED).latents)


def test_a_caption_of_no_words(tiny_layered: Path, tmp_path: Path) -> None:
    every = list(range(opened(tiny_layered).checkpoint["text_encoder"].config.vocab_size))  # type: ignore[index]
    with pytest.raises(UsageError, match="the model's description of the picture is empty: give a prompt"):
        opened(with_generation(tiny_layered, tmp_path / "empty", eos_token_id=every))("", **ASKED)


def test_a_caption_that_is_no_prompt(tiny_layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = opened(tiny_layered)
    tokenizer = pipe.checkpoint.tokenizers["text_encoder"].tokenizer  # type: ignore[union-attr]
    monkeypatch.setattr(tokenizer, "text", lambda ids: "a sign that says <lora:cat:1>")
    with pytest.raises(UsageError, match="the model's description of the picture is refused: the prompt has the tag"):
        pipe("", **ASKED)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"repetition_penalty": "much"}, "repetition_penalty is 'much'; expected a number"),
        ({"repetition_penalty": 0}, "repetition_penalty 0.0 is out of range"),
        ({"eos_token_id": ["end"]}, "eos_token_id is ['end']; expected one id or a list of ids"),
    ],
)
def test_wrong_settings(tiny_layered: Path, tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        opened(with_generation(tiny_layered, tmp_path / "wrong", **values))
    assert "generation_config.json" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_run_is_interrupted_between_two_tokens(tiny_layered: Path, backend: str) -> None:
    class Ended(Exception):
        pass

    checks = list[int]()

    def check() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise Ended

    with opened(tiny_layered, backend) as pipe:
        expected = pipe("", **ASKED)
        pipe.model.forget()
        pipe.runtime.interrupt = check
        with pytest.raises(Ended):
            pipe("", **ASKED)
        assert len(checks) == 3
        again = pipe("", **ASKED)  # whole, from its first token on
        assert len(checks) > 4 and np.array_equal(again.latents, expected.latents)


def test_other_names_of_the_head() -> None:
    rename = captions.NETWORK.rename_for(QwenVLVisionConfig(writes=True))
    for name in ("lm_head.weight", "output.weight", "language_model.lm_head.weight"):
        assert rename(name) == decoder.HEAD
    assert rename("output_norm.weight") == "norm.weight"


# The command line


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.fromarray(PICTURE).save(tmp_path / "in.png")
    return str(tmp_path / "in.png")


SHORT = ("--size", "96x64", "--steps", "1", "--layers", "1", "--backend", "cpu")


@pytest.mark.sample(0)
def test_without_a_prompt_and_again(tiny_layered: Path, picture: str, tmp_path: Path) -> None:
    asked = ("-m", str(tiny_layered), "-i", picture, *SHORT)
    ran = cli(*asked, "-s", "3-4", "-o", f"{tmp_path}/a.png", "--json")
    assert ran.code == 0, ran.err
    recipes = [event["recipe"] for event in ran.events if event["event"] == "image"]
    prompt = recipes[0]["prompt"]
    assert prompt and recipes[1]["prompt"] == prompt
    ran = cli(*asked, "-s", "3", "-o", f"{tmp_path}/b.png")
    [line] = [line for line in ran.err.splitlines() if "the prompt is the model's own: " in line]
    print(line)
    assert ran.err.count("describing the picture") == 1 and ran.err.count("loading text encoder") == 1
    again = ("--from", f"{tmp_path}/a-1-0.png", "-m", str(tiny_layered), "--backend", "cpu", "-i", picture)
    ran = cli(*again, "-o", f"{tmp_path}/c.png")
    assert ran.code == 0 and "describing" not in ran.err and "warning: the picture given" not in ran.err, ran.err
    first = [np.asarray(Image.open(tmp_path / name)) for name in ("a-1-0.png", "b-0.png", "c-0.png")]
    assert np.array_equal(first[0], first[1]) and np.array_equal(first[0], first[2])


def test_refused(tiny_layered: Path, tiny_folder: Path, picture: str) -> None:
    cli("-m", str(tiny_folder), "-i", picture, *SHORT[:4]).refused(
        2, "the prompt is empty; say what to draw: only qwen-image-layered describes a picture itself"
    )
    cli("-m", str(tiny_layered)).refused(2, "no prompt; give one")
    cli("", "-m", str(tiny_layered)).refused(2, "the prompt is empty")
    cli("-m", str(tiny_layered), "-i", picture, "--caption", "la").refused(2, "caption", "choose en or zh")
    ran = cli("a ring", "-m", str(tiny_folder), "--caption", "zh", *SHORT[:4], "--backend", "cpu", "-o", "-")
    assert "caption has no effect: this model describes no picture" in ran.err


def test_plan_counts_the_caption(tiny_layered: Path, picture: str) -> None:
    asked = ("plan", str(tiny_layered), "--backend", "cpu", "-i", picture, "--size", "96x64", "--json")
    plain, described = (json.loads(cli(*asked, *more).out) for more in (("-p", "a ring"), ()))
    names = [[stage["name"] for stage in one["stages"]] for one in (plain, described)]
    print(names)
    assert names[1].count("writing") == 1 and "writing" not in names[0]


# The server


def drawn(folder: Path, picture: str) -> list[Any]:
    """What is said of a job without a prompt."""
    worker, sent = drawing(folder)
    options = {"width": 96, "height": 64, "steps": 1, "seed": "3-4"}
    options |= {"layers": 1} if "layered" in str(folder) else {}
    files = InputFiles(images=(Path(picture).read_bytes(),))
    job = body.job_of(options, Settings(models={}), files, most=2)
    worker.draw(messages.Draw(id="a", model="tiny", job=job))
    return sent


def test_a_job_is_halted_between_two_tokens(tiny_layered: Path, picture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a client that cancels, or at its deadline."""
    tokens, chosen = list[DrawingProcess](), writing.next_token
    check = DrawingProcess._is_halted
    monkeypatch.setattr(DrawingProcess, "_is_halted", lambda self, job: (tokens.append(self), check(self, job))[1])

    def halted(*given: Any) -> int:
        tokens[-1]._halts.add("a")
        return chosen(*given)

    monkeypatch.setattr(writing, "next_token", halted)
    [opened, finished] = drawn(tiny_layered, picture)
    assert isinstance(opened, messages.ModelOpened) and isinstance(finished, messages.Finished)
    assert len(tokens) == 2 and not finished.error and not tokens[0]._halts


INTERRUPTED = """
import signal, sys, time
from qwenimg.cli.main import run
from qwenimg.cli.signals import Stop
from qwenimg.common.parts.texts import writing

stops, chosen, check = [], writing.next_token, Stop.check

def interrupted(*given):
    print("a token", file=sys.stderr, flush=True)
    signal.raise_signal(signal.SIGINT)
    while stops[-1].number is None:  # until the thread that watches has seen it
        time.sleep(0.001)
    return chosen(*given)

Stop.check = lambda self: (stops.append(self), check(self))[1]
Stop.patience = lambda self: 600.0  # else that thread may end the process before the next check
writing.next_token = interrupted
sys.exit(run())
"""


@pytest.mark.sample(0)
def test_ctrl_c_between_two_tokens(tiny_layered: Path, picture: str, tmp_path: Path) -> None:
    """In a process of its own: signals are watched in one that the command line has to itself."""
    asked = ("-m", tiny_layered, "-i", picture, *SHORT, "-o", "out.png")
    process = started(*asked, cwd=tmp_path, program=(sys.executable, "-c", INTERRUPTED))
    _, errors = process.communicate()
    print(errors)
    assert (process.returncode, errors.count("a token")) == (130, 1) and not (tmp_path / "out.png").exists()
    assert errors.splitlines()[-1] == f"qwenimg: error: {STOPPED}"


@pytest.mark.sample(0)
def test_a_job_without_a_prompt(tiny_layered: Path, tiny_folder: Path, picture: str) -> None:
    with pytest.raises(HttpError, match="a prompt is missing"):
        body.job_of({"prompt": " "}, Settings(models={}), most=1)
    pictures = [one for one in drawn(tiny_layered, picture) if isinstance(one, messages.PictureDrawn)]
    assert len(pictures) == 2 and pictures[0].recipe["prompt"] == pictures[1].recipe["prompt"] != ""
    refused = drawn(tiny_folder, picture)[-1]
    assert refused.exit_code == 2 and "the prompt is empty" in refused.error
