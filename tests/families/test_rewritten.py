"""Pictures of rewritten prompts: what is loaded when, recipes, replays, prompt files, edits, and what is refused."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import cli

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.parts.texts import rewriting
from qwenimg.common.parts.texts.rewriting import Draft
from qwenimg.common.parts.texts.writing import Written
from qwenimg.common.pipeline import fit_options
from qwenimg.common.prompts.rewriting import INSTRUCTIONS
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime

LIMIT = 16
ASKED: dict[str, Any] = {"width": 64, "height": 64, "steps": 1, "seed": 3}
PICTURE = np.random.default_rng(3).integers(0, 256, (70, 96, 3), np.uint8)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    how = rewriting.PromptWriter.how
    monkeypatch.setattr(rewriting.PromptWriter, "how", lambda self, seed: replace(how(self, seed), limit=LIMIT))


def opened(folder: Path, backend: str = "cpu", **more: Any) -> Pipeline:
    return qwenimg.load(folder, backend=backend, **({"precision": "fp32"} | more))


@pytest.fixture
def acquired(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that are entered, and `open NAME` for each network that is opened."""
    entered, enter, open_ = list[str](), Residents.acquire, Runtime.open

    def opens(self: Runtime, component: Any, title: str, more: int = 0) -> Any:
        entered.append(f"open {title}")
        return open_(self, component, title, more)

    monkeypatch.setattr(Residents, "acquire", lambda self, stage: (entered.append(stage.name), enter(self, stage))[1])
    monkeypatch.setattr(Runtime, "open", opens)
    return entered


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_the_text_is_the_prompt_and_the_text_encoder_is_loaded_once(
    tiny_folder: Path, backend: str, acquired: list[str]
) -> None:
    with opened(tiny_folder, backend) as pipe:
        request = pipe.check("a red circle", rewrite=0, **ASKED)
        planned = [stage.name for stage in fit_options.plan_memory(pipe.model, request).stages]
        result = pipe("a red circle", rewrite=0, **ASKED)
        entered = [one for one in acquired if not one.startswith("open ")]
        assert planned == entered and entered[:2] == ["writing", "text"]
        assert acquired.count("open text encoder") == 1
        recipe: dict[str, Any] = dict(result.recipe)
        assert recipe["original_prompt"] == "a red circle" != recipe["prompt"] and "rewrite" not in recipe
        about = recipe["rewriting"]
        assert {
            "instruction": "1",
            "task": "draw",
            "language": "en",
            "seed": "0",
            "limit": str(LIMIT),
        }.items() <= about.items()
        acquired.clear()
        again = pipe("a red circle", rewrite=0, **(ASKED | {"seed": 4}))
        assert again.recipe["prompt"] == recipe["prompt"] and "writing" not in acquired, "it is written once"
        known = pipe.check("a red circle", rewrite=0, **ASKED)
        assert "writing" not in [stage.name for stage in fit_options.plan_memory(pipe.model, known).stages]
        other = pipe("a red circle", rewrite=1, **ASKED)
        assert other.recipe["prompt"] != recipe["prompt"]
        plain = pipe(recipe["prompt"], **ASKED)
        assert np.array_equal(plain.latents, result.latents) and "original_prompt" not in plain.recipe
    with opened(tiny_folder, backend) as pipe:  # whose encoder never had a head
        assert np.array_equal(pipe(recipe["prompt"], **ASKED).latents, result.latents)


@pytest.mark.sample(0)
def test_a_lora_of_the_text_encoder_changes_the_text_too(tiny_folder: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    path, file = "text_encoder.layers.1.mlp.up_proj", tmp_path / "a.safetensors"
    save_file({f"{path}.lora_A.weight": torch.randn(4, 60), f"{path}.lora_B.weight": torch.randn(88, 4)}, file)
    pipe = opened(tiny_folder)
    plain = pipe("a ring", rewrite=0, **ASKED).recipe["prompt"]
    made = pipe("a ring", rewrite=0, lora=f"{file}:1", **ASKED)
    assert made.recipe["prompt"] != plain == pipe("a ring", rewrite=0, **ASKED).recipe["prompt"]
    assert np.array_equal(made.latents, pipe(made.recipe["prompt"], lora=f"{file}:1", **ASKED).latents)


@pytest.mark.sample(1)
def test_a_stopped_text_is_written_anew(tiny_folder: Path) -> None:
    class Ended(BaseException):
        pass

    left = [5]

    def check() -> None:
        left[0] -= 1
        if not left[0]:
            raise Ended

    pipe = opened(tiny_folder)
    pipe.runtime.interrupt = check
    with pytest.raises(Ended):
        pipe("a ring", rewrite=0, **ASKED)
    assert (
        pipe("a ring", rewrite=0, **ASKED).recipe["prompt"]
        == opened(tiny_folder)("a ring", rewrite=0, **ASKED).recipe["prompt"]
    )


def test_quoted_text_that_is_lost_keeps_the_prompt(tiny_folder: Path) -> None:
    told = list[tuple[str, str]]()
    pipe = opened(tiny_folder, notify=lambda *line: told.append(line))
    result = pipe('a sign "24 h"', rewrite=0, **ASKED)
    assert result.recipe["prompt"] == 'a sign "24 h"' == dict(result.recipe)["original_prompt"]
    assert any("did not keep the quoted text" in line and kind == "warning" for kind, line in told)
    assert any("quoted text" in line for line in result.recipe["warnings"])


@pytest.mark.sample(0)
def test_an_edit_is_rewritten_with_its_pictures(tiny_edit: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, write = list[Draft](), rewriting.rewrite

    def noted(writer: Any, drafts: list[Draft], *more: Any, **named: Any) -> Any:
        asked.extend(drafts)
        return write(writer, drafts, *more, **named)

    monkeypatch.setattr(rewriting, "rewrite", noted)
    pipe = opened(tiny_edit["qwen-edit"])
    result = pipe("make it red", rewrite=0, image=PICTURE, **ASKED)
    [draft] = asked
    assert dict(result.recipe)["rewriting"]["task"] == "edit" and len(draft.pictures) == 1
    assert draft.conversation.system == INSTRUCTIONS["edit", "en"]
    assert np.array_equal(result.latents, pipe(result.recipe["prompt"], image=PICTURE, **ASKED).latents)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": " ", "rewrite": 0}, "the prompt is empty"),
        ({"rewrite": -1}, "rewrite is -1"),
        ({"rewrite": 2**64}, "rewrite is"),
        ({"rewrite": True}, "whole number"),
        ({"rewrite": "yes"}, "whole number"),
        ({"rewrite": 0, "prompt": "0 1 2 " * 1000}, "at most 1,024"),
    ],
)
def test_refused(tiny_folder: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught, opened(tiny_folder) as pipe:
        pipe(**({"prompt": "a ring"} | values | ASKED))
    print(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["sd15", "flux-dev"])
@pytest.mark.sample(1)
def test_any_family_is_rewritten_by_another_model(
    tiny: dict[str, Path], kind: str, acquired: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="cannot write a text"):
        opened(tiny[kind])("a ring", rewrite=0, **ASKED)
    told = "A ring (gold:1.5), [big] AND round."
    monkeypatch.setattr(
        rewriting.Writer,
        "write",
        lambda self, asked, *more, **named: [Written(text=told, whole=told, tokens=9, cut=False) for _ in asked],
    )
    with opened(tiny[kind], rewrite_with=tiny["qwen"]) as pipe:
        result = pipe("a ring", rewrite=0, **ASKED)
        prompt = result.recipe["prompt"]
        assert prompt == (r"A ring \(gold:1.5\), \[big\] and round." if kind == "sd15" else told)
        assert np.array_equal(pipe(prompt, **ASKED).latents, result.latents)
        assert "open language model" not in acquired, "it was a stand-in"
        about = dict(result.recipe)["rewriting"]
        with closing(registry.open_model(tiny["qwen"])) as other:
            expected = fingerprint(other.checkpoint["text_encoder"].plan.files)
        assert about["with"] == tiny["qwen"].name and about["fingerprint"] == expected


@pytest.mark.parametrize("other", ["qwen", "flux3-klein"])
@pytest.mark.sample(0)
def test_another_model_is_freed_before_the_encoding(tiny: dict[str, Path], acquired: list[str], other: str) -> None:
    with opened(tiny["sd15"], rewrite_with=tiny[other]) as pipe:
        planned = [
            one.name for one in fit_options.plan_memory(pipe.model, pipe.check("a ring", rewrite=0, **ASKED)).stages
        ]
        pipe("a ring", rewrite=0, **ASKED)
        assert planned[0] == "writing" and acquired[:2] == ["writing", "open language model"]
        assert "language model" not in pipe.model.residents.opened


WRITERS = (
    "z-image", "flux2-klein", "flux2-dev", "flux3-klein", "qwen21", "qwen-2511", "longcat", "ernie", "krea2", "anima",
    "ovis",
)  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.sample(0)
def test_every_language_model_writes(tiny: dict[str, Path], kind: str) -> None:
    asked = ASKED | ({"image": PICTURE} if kind == "qwen-2511" else {})
    for backend in ("cpu", "mlx"):
        with opened(tiny[kind], backend) as pipe:
            result = pipe("a ring", rewrite=0, **asked)
            print(f"{kind} {backend}: {result.recipe['prompt'][:60]!r}")
            assert np.array_equal(pipe(result.recipe["prompt"], **asked).latents, result.latents)


# The command line


SHORT = ("--size", "64x64", "--steps", "1", "--backend", "cpu", "--precision", "fp32")


@pytest.mark.sample(0)
def test_lines_of_a_prompt_file_are_rewritten_together_and_drawn_again(tiny_folder: Path, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text('a ring\n{"prompt": "a star", "rewrite": 1}\n# none\na cross\n')
    asked = ("-m", str(tiny_folder), *SHORT, "--rewrite", "--prompt-file", str(lines), "-s", "1-2")
    ran = cli(*asked, "-o", f"{tmp_path}/{{index}}.png", "--json")
    assert ran.code == 0, ran.err
    recipes = [event["recipe"] for event in ran.events if event["event"] == "image"]
    assert [one["original_prompt"] for one in recipes] == [
        name for name in ("a ring", "a star", "a cross") for _ in "12"
    ]
    assert len({one["prompt"] for one in recipes}) > 1 and recipes[2]["rewriting"]["seed"] == "1"
    assert ran.err.count("loading text encoder") <= 2, ran.err
    ran = cli("--from", f"{tmp_path}/1.png", "-m", str(tiny_folder), "--backend", "cpu", "-o", f"{tmp_path}/again.png")
    assert ran.code == 0 and "rewriting" not in ran.err, ran.err
    first, again = (np.asarray(Image.open(tmp_path / name)) for name in ("1.png", "again.png"))
    assert np.array_equal(first, again)


@pytest.mark.sample(0)
def test_rewrite_prints_texts(tiny_folder: Path, tmp_path: Path) -> None:
    model = ("-m", str(tiny_folder), "--backend", "cpu", "--limit", "4")
    ran = cli("rewrite", "a ring", *model)
    [line] = ran.out.decode().splitlines()
    assert ran.code == 0 and line and "loading" in ran.err and "cut after 4 tokens" in ran.err
    assert cli("rewrite", "a ring", *model, "--quiet").out == ran.out
    assert cli("rewrite", "a ring", *model, "-s", "2").out != ran.out
    (tmp_path / "lines").write_text('a star\n{"prompt": "a ring"}\n')
    both = cli("rewrite", "--prompt-file", str(tmp_path / "lines"), *model)
    assert both.out.decode().splitlines()[1] == line
    events = cli("rewrite", "a ring", *model, "--json").events
    assert [one["event"] for one in events] == ["text", "done"] and events[0]["text"] == line
    assert events[0]["prompt"] == "a ring" and events[0]["instruction"] == "1"
    Image.fromarray(PICTURE).save(tmp_path / "in.png")
    edit = cli("rewrite", "make it red", "-i", str(tmp_path / "in.png"), *model, "--json")
    assert edit.code == 0 and edit.events[0]["task"] == "edit", edit.err


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ((), 2, "give a prompt"),
        (("a", "cat"), 2, 'quote the prompt: "a cat"'),
        (("a cat", "--prompt-file", "x"), 2, "not both"),
        (("a cat", "--temperature", "2.5"), 2, "2.5"),
        (("a cat", "--temperature", "nan"), 2, "nan"),
        (("a cat", "--limit", "0"), 2, "0"),
        (("a cat", "--limit", "2049"), 2, "2049"),
        (("a cat", "--size", "64x"), 2, "64x"),
        (("a cat", "-s", "-1"), 2, "-1"),
        ((" ",), 2, "the prompt is empty"),
        (("x" * 1_000_001,), 2, "the limit is 100000"),
        (("a cat", "-m", "/missing"), 5, "/missing"),
        (("a cat", "--with", "/missing"), 5, "/missing"),
        (("a cat", "-i", "missing.png"), 5, "missing.png"),
    ],
)
def test_rewrite_refuses(tiny_folder: Path, args: tuple[str, ...], code: int, said: str) -> None:
    ran = cli("rewrite", *args, *(() if {"-m", "--with"} & set(args) else ("-m", str(tiny_folder))))
    print(ran.err)
    assert ran.code == code and said in ran.err and ran.err.count("\n") == 1


# Recipes


def test_a_recipe_with_wrong_texts_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    from qwenimg.common.request.recipe import check_recipe

    recipe: dict[str, Any] = dict(opened(tiny_folder)("a ring", rewrite=0, **ASKED).recipe)
    recipe = json.loads(json.dumps(recipe | {"format": 1, "version": "1"}))
    assert check_recipe(recipe, tmp_path)
    for key, value in (
        ("original_prompt", 3), ("original_prompt", "x" * 200_000), ("rewriting", []), ("rewriting", {"seed": 1}),
        ("rewriting", {"a": "x" * 3000}),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=f"a bad {key}"):
            check_recipe(recipe | {key: value}, tmp_path)
