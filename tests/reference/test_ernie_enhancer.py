"""The prompt enhancer of ERNIE-Image against diffusers': its ids and texts; and where it is found."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import tiny_language
from support.cli_runner import cli
from support.tiny_ernie import tiny_tokenizer
from support.tiny_language import KINDS

import qwenimg
from qwenimg import backends
from qwenimg.common.families import prompt_writer
from qwenimg.common.families.ernie.enhancer import ENHANCER, INSTRUCTION, PROTOCOL
from qwenimg.common.parts.language_models import open_language_model
from qwenimg.common.parts.texts import rewriting
from qwenimg.common.parts.texts.rewriting import Draft

TOKENS, DISTINCT = 48, 8
TEMPLATE = (
    "{{ bos_token }}[SYSTEM_PROMPT]" + INSTRUCTION + "[/SYSTEM_PROMPT]"
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST]{{ message['content'] }}[/INST]"
    "{% endif %}{% endfor %}"
)
"""The published chat template, as other programs describe it: the file itself could not be seen."""
PROMPTS = ('a cat with a sign "OPEN"', "海边的女孩", "two\nlines \\ and {braces}")
ASKED: dict[str, Any] = {"width": 64, "height": 96, "steps": 1, "seed": 3}


@cache
def enhancer() -> Any:
    """transformers' model, flat and tied, as the published one."""
    import transformers

    kind = KINDS["ministral 3"]
    config = transformers.Ministral3Config(
        **tiny_language.SIZES | kind.changes | {"tie_word_embeddings": True, "attn_implementation": "eager"}
    )
    model = transformers.Ministral3ForCausalLM(config)
    tiny_language.randomise(model, 11)
    model.get_input_embeddings().weight.data *= 0.02
    return model.eval()


@cache
def tokenizer() -> Any:
    made = tiny_tokenizer(before=False)
    made.chat_template, made.model_max_length, made.pad_token = TEMPLATE, TOKENS, "<unk>"
    return made


@pytest.fixture
def folder(tiny_ernie: dict[str, Path], tmp_path: Path) -> Path:
    """An ERNIE-Image with its prompt enhancer, as it is published."""
    whole = tmp_path / "ernie"
    shutil.copytree(tiny_ernie["ernie"], whole)
    enhancer().save_pretrained(whole / "pe")
    tokenizer().save_pretrained(whole / "pe_tokenizer")
    return whole


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    how = rewriting.PromptWriter.how
    monkeypatch.setattr(rewriting.PromptWriter, "how", lambda self, seed: replace(how(self, seed), limit=16))


def theirs(prompt: str, width: int, height: int) -> tuple[list[int], list[int]]:
    """The ids that diffusers asks, and those of its greedy text."""
    from diffusers import ErnieImagePipeline

    seen = dict[str, list[int]]()

    class Noted:
        def generate(self, **asked: Any) -> torch.Tensor:
            made: torch.Tensor = enhancer().generate(**asked | {"eos_token_id": None})
            seen["ids"], seen["made"] = asked["input_ids"][0].tolist(), made[0].tolist()
            return made

    pipeline = SimpleNamespace(pe=Noted(), pe_tokenizer=tokenizer())
    with torch.inference_mode():
        ErnieImagePipeline._enhance_prompt_with_pe(
            pipeline, prompt, torch.device("cpu"), width, height, temperature=1.0, top_p=1.0
        )
    return seen["ids"], seen["made"][len(seen["ids"]) :]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_ids_and_tokens_are_those_of_diffusers(folder: Path, backend: str) -> None:
    from support.policies import FP32

    model = open_language_model(folder / "pe")
    engine, part = backends.load(backend), model.component
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    for prompt in PROMPTS:
        asked = Draft(prompt, protocol=PROTOCOL, size=(96, 64)).conversation
        ids = model.chat.ids(model.tokenizer.tokenizer, asked.system, asked.user)[0]
        right, expected = theirs(prompt, 96, 64)
        assert ids == right
        tokens = [int(engine.numpy(ours.begin(ids, (), (), [])).argmax())]
        while len(tokens) < TOKENS:
            tokens.append(int(engine.numpy(ours.follow(tokens[-1:]))[0].argmax()))
        ours.forget()
        count = len(set(expected))
        print(f"{backend}: {len(ids)} ids, {TOKENS} tokens, {count} distinct, equal: {tokens == expected}")
        assert tokens == expected and count >= DISTINCT
    model.close()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_picture_is_drawn_of_its_text_which_the_recipe_has(folder: Path, backend: str) -> None:
    with qwenimg.load(folder, backend=backend, precision="fp32") as pipe:
        result = pipe("a ring", rewrite=0, **ASKED)
        about = dict(result.recipe)["rewriting"]
        expected = {"instruction": "ernie", "with": "pe", "temperature": "0.6", "top_p": "0.8", "top_k": "0"}
        assert expected.items() <= about.items() and result.recipe["prompt"] != "a ring"
        assert np.array_equal(pipe(result.recipe["prompt"], **ASKED).latents, result.latents)
        wide = pipe("a ring", rewrite=0, **ASKED | {"width": 96}).recipe["prompt"]
        assert wide != result.recipe["prompt"], "the size is a part of what it is asked"


def test_the_command_takes_it_and_a_file_alone_in_the_folder_of_comfyui(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("--limit", "12", "--backend", "cpu", "--json")
    own = cli("rewrite", PROMPTS[1], "-m", str(folder), *short, "--size", "96x64")
    assert own.code == 0 and own.events[0]["instruction"] == "ernie", own.err
    assert "pe" in own.err
    alone = tmp_path / "text_encoders" / "ernie-image-prompt-enhancer.safetensors"
    alone.parent.mkdir()
    weights = {key: value for key, value in enhancer().state_dict().items() if key != "lm_head.weight"}
    save_file({key: value.contiguous() for key, value in weights.items()}, alone)
    ran = cli("rewrite", PROMPTS[1], "--with", str(alone), "--tokenizer", str(folder / "pe_tokenizer"), *short)
    print(ran.err)
    assert ran.code == 5 and ran.err.count("\n") == 1, "its sizes are not the published ones"
    shutil.copytree(folder / "pe", tmp_path / "config" / "text_encoder")
    monkeypatch.setattr(prompt_writer, "data_folder", lambda name: tmp_path / "config")  # where the tiny sizes are
    ran = cli("rewrite", PROMPTS[1], "--with", str(alone), "--tokenizer", str(folder / "pe_tokenizer"), *short,
              "--size", "96x64")  # fmt: skip
    assert ran.code == 0 and ran.events[0]["text"] == own.events[0]["text"], ran.err
    ran = cli("rewrite", PROMPTS[1], "--with", str(alone), *short)
    print(ran.err)
    assert ran.code == 5 and "qwenimg pull ernie-files" in ran.err and ran.err.count("\n") == 1


def test_names() -> None:
    named = ("pe", "ernie-image-prompt-enhancer.safetensors", "ernie_image_pe", "ERNIE-Image-PE-Q4_K_M.gguf")
    others = ("ernie-image-turbo.safetensors", "speech", "pegasus", "prompt-enhancer", "ernie-image")
    assert [name for name in (*named, *others) if ENHANCER.is_named(Path("a") / name)] == [*named]


@pytest.mark.parametrize("wrong", ["file", "empty", "no weights", "no tokenizer", "another kind", "short", "link"])
def test_a_damaged_one_is_told_in_one_line(folder: Path, wrong: str) -> None:
    part = folder / "pe"
    if wrong in ("file", "link", "empty"):
        shutil.rmtree(part)
    if wrong == "file":
        part.write_text("{}")
    if wrong == "empty":
        part.mkdir()
    if wrong == "link":
        part.symlink_to(folder / "nowhere")
    if wrong == "no weights":
        (part / "model.safetensors").unlink()
    if wrong == "no tokenizer":
        shutil.rmtree(folder / "pe_tokenizer")
        shutil.rmtree(folder / "tokenizer")
        shutil.copytree(folder.parent / "ernie" / "vae", folder / "tokenizer")
    if wrong == "another kind":
        (part / "config.json").write_text(json.dumps({"model_type": "bert"}))
    if wrong == "short":
        whole = (part / "model.safetensors").read_bytes()
        (part / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    ran = cli("rewrite", "a ring", "-m", str(folder), "--limit", "4", "--backend", "cpu")
    print(wrong, ran.code, ran.err)
    if wrong in ("file", "link"):  # there is none, and the text encoder writes
        assert ran.code == 0
        return
    assert ran.code == 5 and ran.err.count("\n") == 1 and len(ran.err) < 400
