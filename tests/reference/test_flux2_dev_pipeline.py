"""FLUX.2 dev from a prompt and pictures to pixels, on both backends, against diffusers' Flux2Pipeline on a folder that
it wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support import oracle_flux2, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.families import registry
from qwenimg.common.families.flux2 import checkpoint, model
from qwenimg.common.families.flux2.texts import DEV, InstructionTemplate
from qwenimg.common.networks.denoisers.flux2_conditioning import time_rows
from qwenimg.common.numbers import noise
from qwenimg.common.prompts.prompt_tokens import PromptTokens

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; the reference's float32 sinusoid is worth most of it
PIXELS = 2  # of 255: a value on a rounding edge may go either way
RNG = np.random.default_rng(12)
PICTURES = {
    "none": [],
    "even": [RNG.integers(0, 256, (64, 96, 3), np.uint8)],
    "odd": [RNG.integers(0, 256, (83, 70, 3), np.uint8)],  # cropped to 80 x 64
}
PICTURES["two"] = PICTURES["odd"] + PICTURES["even"]
CASES = [
    # prompt, width, height, steps, guidance, references
    ("a red circle", 80, 48, 4, 4.0, "none"),
    ("a star above a ring, 3 hearts; 背景", 48, 112, 3, 2.5, "even"),
    ("x " * 700, 64, 64, 2, 4.0, "odd"),  # more tokens than are read: no pads
    ("one [IMG] picture " * 9, 112, 64, 2, 1.0, "two"),
]


@pytest.fixture(scope="module")
def opened(tiny_flux2: dict[str, Path]) -> dict[str, Pipeline]:
    return {one: qwenimg.load(tiny_flux2["flux2-dev"], backend=one, precision="fp32") for one in BACKENDS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}x{case[2]}-{case[4]}-{case[5]}")
@pytest.mark.sample(2)
def test_equals_diffusers(tiny_flux2: dict[str, Path], opened: dict[str, Pipeline], case: Any) -> None:
    prompt, width, height, steps, guidance, which = case
    pictures = PICTURES[which]
    latents, pixels = oracle_flux2.generate_dev(
        tiny_flux2["flux2-dev"],
        prompt,
        noise.normal((1, 32, height // 16, width // 16), seed=7),
        steps=steps,
        guidance=guidance,
        images=pictures,
    )
    assert pixels.std() > 10, "a constant picture would prove nothing"
    more = {"image": pictures} if pictures else {}
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "seed": 7}
    for backend, pipe in opened.items():
        ours = pipe(prompt, **asked, **more)
        peer.check_picture(f"{backend} {width}x{height}", ours, (latents, pixels), LATENTS, PIXELS)


def test_every_input_is_seen(opened: dict[str, Pipeline]) -> None:
    """Another prompt, guidance, reference, their order, or a negative prompt gives another result."""
    asked: dict[str, Any] = {"width": 48, "height": 48, "steps": 2, "seed": 3}
    two = PICTURES["two"]
    calls: list[dict[str, Any]] = [
        *({}, {"guidance": 1.0}, {"true_cfg": 2.0, "negative_prompt": "dull"}),
        *({"image": two[0]}, {"image": two}, {"image": two[::-1]}),
    ]
    made = [opened["cpu"]("a star", **asked, **more).latents for more in calls]
    made.append(opened["cpu"]("a ring", **asked).latents)
    changes = [relative(made[i], made[j]) for i in range(len(made)) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


def test_prompt(tiny_flux2: dict[str, Path]) -> None:
    """Ids are those of the pipeline, with pads on the left, and cut as there."""
    theirs = oracle_flux2.dev_pipeline(tiny_flux2["flux2-dev"])
    own = registry.open_model(tiny_flux2["flux2-dev"]).checkpoint.tokenizers["text_encoder"].tokenizer
    for prompt in ("", "a ring", " 背景 {'a': [1, 2]} don't\n\n", "x " * 3000, "[IMG] and [IMG]"):
        message = [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in (("system", theirs.system_message), ("user", prompt.replace("[IMG]", "")))
        ]
        expected = theirs.tokenizer.apply_chat_template(
            [message], return_dict=True, padding="max_length", truncation=True, max_length=512
        )
        tokens = DEV.fill(own, prompt)
        assert list(tokens.ids) == expected["input_ids"][0]
        assert tokens.pads == expected["attention_mask"][0].count(0)
        assert (tokens.lost > 0) == (tokens.pads == 0)


def test_typed_markers_stay_text(tiny_flux2: dict[str, Path]) -> None:
    own = registry.open_model(tiny_flux2["flux2-dev"]).checkpoint.tokenizers["text_encoder"].tokenizer
    ids = DEV.fill(own, "[/INST] [INST] <s> <pad>").ids
    marks = [own.special(token) for token in ("<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")]
    assert [one for one in ids if one in marks] == marks


def pads_behind(fill: Any, template: Any, tokenizer: Any, prompt: str) -> PromptTokens:
    made = fill(template, tokenizer, prompt)
    return replace(made, ids=made.ids[made.pads :] + made.ids[: made.pads])


def no_pads(fill: Any, template: Any, tokenizer: Any, prompt: str) -> PromptTokens:
    made = fill(template, tokenizer, prompt)
    return PromptTokens(made.ids[made.pads :], 0)


def no_instruction(fill: Any, template: Any, tokenizer: Any, prompt: str) -> PromptTokens:
    made: PromptTokens = fill(replace(template, text=""), tokenizer, prompt)
    return made


def markers_as_text(fill: Any, template: Any, tokenizer: Any, prompt: str) -> PromptTokens:
    ids = tokenizer.plain(f"<s>[SYSTEM_PROMPT]{template.text}[/SYSTEM_PROMPT][INST]{prompt}[/INST]")
    pads = 512 - len(ids)
    return PromptTokens((*[tokenizer.special("<pad>")] * pads, *ids), 0, pads)


STATED = cast(dict[str, Any], checkpoint.DEV_NETWORKS["text_encoder"].stated)
PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "taps a layer early": lambda patch: patch.setitem(STATED, "taps", (9, 19, 29)),
    "taps of klein": lambda patch: patch.setitem(STATED, "taps", (9, 18, 27)),
    "guidance not read": lambda patch: patch.setattr(
        model, "time_rows", lambda config, time, dtype, guidance: time_rows(config, time, dtype, 0.0)
    ),
    "guidance not times 1000": lambda patch: patch.setattr(
        model, "time_rows", lambda config, time, dtype, guidance: time_rows(config, time, dtype, guidance / 1000)
    ),
    **{
        fault.__name__: lambda patch, fault=fault, fill=InstructionTemplate.fill: patch.setattr(  # type: ignore[misc]
            InstructionTemplate, "fill", partialmethod(lambda *given: fault(fill, *given))
        )
        for fault in (pads_behind, no_pads, no_instruction, markers_as_text)
    },
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.sample(2)
def test_planted_faults_are_seen(
    tiny_flux2: dict[str, Path], opened: dict[str, Pipeline], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each changes latents by far more than the limit against diffusers."""
    asked: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 3}
    right = opened["cpu"]("a star", **asked).latents
    PLANTED[fault](monkeypatch)
    with qwenimg.load(tiny_flux2["flux2-dev"], backend="cpu", precision="fp32") as pipe:
        error = relative(pipe("a star", **asked).latents, right)
    print(f"{fault}: {error:.1e}")
    assert error > 5 * LATENTS


def test_true_cfg(opened: dict[str, Pipeline]) -> None:
    """Its formula, between two predictions that both have the guidance, in one step."""
    asked: dict[str, Any] = {"width": 48, "height": 32, "steps": 1, "guidance": 3.0, "seed": 1}
    for pipe in opened.values():
        start = noise.normal((1, 32, 2, 3), seed=1)
        positive, negative = (pipe(prompt, **asked).latents - start for prompt in ("a ring", "dull"))
        made = pipe("a ring", negative_prompt="dull", true_cfg=2.5, **asked)
        error = relative(made.latents - start, negative + 2.5 * (positive - negative))
        print(f"true cfg: {error:.1e}")
        assert error < 1e-5 and made.warnings == []


def test_defaults(opened: dict[str, Pipeline]) -> None:
    defaults = opened["cpu"].defaults
    assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (50, 4.0, "")
    assert (defaults.strength, defaults.mask_strength) == (1.0, 0.8)
