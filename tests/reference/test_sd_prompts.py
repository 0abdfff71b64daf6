"""Prompts that change during a run, sums of prompts and BREAK, against a loop of our own over diffusers' parts.

Expected texts are written out here for each call of the model, as the web UI counts them: `call` 0 and 1 have the first
text of an alternation, and `[a:b:2]` is `a` in the calls 0, 1 and 2.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support import oracle_sd
from support.tiny_sd import LEADING, TRAINED

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.pipeline.pipeline import Pipeline

BACKENDS = ("cpu", "mlx")
PIXELS = 1  # of 255
LATENTS = 1e-4  # relative L2 in float32
RED, BLUE, DOG = "a photo of a red circle", "a blue square", "a small dog"
CIRCLES = {"r": "a red circle", "b": "a blue circle", "-": "a  circle", "g": "a green circle"}
PICTURE = np.random.default_rng(3).integers(0, 256, (64, 64, 3), np.uint8)
SIDE, STEPS, GUIDANCE = 64, 6, 4.0
EULER = "EulerDiscreteScheduler"


@dataclass(frozen=True)
class Call:
    """The texts of one call of the model: what is drawn, each with its weight, and what is not."""

    parts: tuple[tuple[str, float], ...]
    negative: str = ""


def calls(*texts: str, negative: Sequence[str] = ()) -> list[Call]:
    return [Call(((text, 1.0),), negative[i] if negative else BLUE) for i, text in enumerate(texts)]


# The reference


def encoded(pipe: Any, text: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states [1 77n C] of a text, its chunks parted by BREAK, and SDXL's pooled vector: the first chunk's."""
    asked = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    made = [pipe.encode_prompt(part.strip(), **asked) for part in text.split("BREAK")]
    return torch.cat([one[0] for one in made], dim=1), made[0][2] if len(made[0]) > 2 else None


def expected(folder: Path, texts: Sequence[Call], *, seed: int = 5, strength: float = 0.0) -> tuple[np.ndarray, Any]:
    """diffusers' networks and scheduler in a plain loop: final latents, and pixels in 0..255."""
    xl = (folder / "text_encoder_2").is_dir()
    kind = f"StableDiffusion{'XL' if xl else ''}{'Img2Img' if strength else ''}Pipeline"
    pipe = oracle_sd.pipeline(folder, kind)
    pipe.scheduler.set_timesteps(STEPS)
    times, generator = pipe.scheduler.timesteps, torch.Generator().manual_seed(seed)
    if strength:
        times, _ = pipe.get_timesteps(STEPS, strength, "cpu")
        pixels = pipe.image_processor.preprocess(Image.fromarray(PICTURE))
        x = pipe.prepare_latents(pixels, times[:1], 1, 1, torch.float32, "cpu", generator)
    else:
        x = torch.randn(1, 4, SIDE // 8, SIDE // 8, generator=generator) * pipe.scheduler.init_noise_sigma
    assert len(times) == len(texts), f"{len(times)} calls"
    zeros = pipe.config.get("force_zeros_for_empty_prompt", False)
    sizes = torch.tensor([[SIDE, SIDE, 0, 0, SIDE, SIDE]], dtype=torch.float32)
    filler = encoded(pipe, "")[0]

    with torch.no_grad():
        for call, time in zip(texts, times, strict=True):
            rows = [encoded(pipe, text) for text in (call.negative, *(text for text, _ in call.parts))]
            length = max(states.shape[1] for states, _ in rows)
            scaled = pipe.scheduler.scale_model_input(x, time)
            noises = []
            for i, (states, pooled) in enumerate(rows):
                padded = torch.cat([states] + [filler] * ((length - states.shape[1]) // 77), dim=1)
                dark = zeros and i == 0 and not call.negative
                added = {"text_embeds": pooled * (not dark), "time_ids": sizes} if xl else None
                noises.append(pipe.unet(scaled, time, padded * (not dark), added_cond_kwargs=added).sample)
            unguided, *guided = noises
            weights = [weight for _, weight in call.parts]
            noise = unguided + sum(w * GUIDANCE * (g - unguided) for w, g in zip(weights, guided, strict=True))
            x = pipe.scheduler.step(noise, time, x, return_dict=False)[0]
        decoded = pipe.vae.decode(x / pipe.vae.config.scaling_factor, return_dict=False)[0]
    image = pipe.image_processor.postprocess(decoded, output_type="np")[0]
    return x.numpy(), (image * 255).round().astype(np.float64)


def load(folder: Path, backend: str) -> Pipeline:
    return qwenimg.load(folder, backend=backend, precision="fp32")


def compare(name: str, made: qwenimg.Result, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    latents, pixels = wanted
    error = np.linalg.norm(made.latents - latents) / np.linalg.norm(latents)
    worst = np.abs(made.pixels.astype(float) - pixels).max()
    print(f"{name}: latents {error:.2e}, pixels {worst:.0f}, deviation of the picture {pixels.std():.0f}")
    assert pixels.std() > 10 and error <= LATENTS and worst <= PIXELS


@pytest.fixture(scope="module")
def with_sampler(folders, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Copies of the tiny folders with another scheduler."""
    made: dict[tuple[str, str], Path] = {}

    def folder(name: str, scheduler: str) -> Path:
        if (name, scheduler) not in made:
            place = tmp_path_factory.mktemp(name) / scheduler
            shutil.copytree(folders[name], place)
            shutil.rmtree(place / "scheduler")
            config = LEADING if scheduler == EULER else TRAINED
            getattr(diffusers, scheduler)(**config).save_pretrained(place / "scheduler")
            index = json.loads((place / "model_index.json").read_text())
            index["scheduler"] = ["diffusers", scheduler]
            (place / "model_index.json").write_text(json.dumps(index))
            made[name, scheduler] = place
        return made[name, scheduler]

    return folder


def circles(colours: str) -> list[str]:
    """A text for each letter."""
    return [CIRCLES[letter] for letter in colours]


PROMPTS: dict[str, tuple[str, list[Call]]] = {
    "schedule by a call": ("a [red:blue:2] circle", calls(*circles("rrrbbb"))),
    "schedule by a share": ("a [red:blue:0.5] circle", calls(*circles("rrrrbb"))),
    "added": ("a [red:3] circle", calls(*circles("----rr"))),
    "removed": ("a [red::3] circle", calls(*circles("rrrr--"))),
    "alternation": ("a [red|blue] circle", calls(*circles("rrbrbr"))),
    "nested": ("a [[red|blue]:green:3] circle", calls(*circles("rrbrgg"))),
    "AND": (f"{RED} AND {DOG} :0.6 AND {BLUE}:-0.2", [Call(((RED, 1.0), (DOG, 0.6), (BLUE, -0.2)), BLUE)] * 6),
    "AND with schedules": (
        f"{RED} :0.7 AND a [red:green:2] circle :0.4",
        [Call(((RED, 0.7), (text, 0.4)), BLUE) for text in circles("rrrggg")],
    ),
    "BREAK": (f"{RED} BREAK {DOG}", calls(*[f"{RED} BREAK {DOG}"] * 6)),
    "BREAK in a schedule": (f"{RED}[ BREAK {DOG}:2]", calls(*[RED] * 3, *[f"{RED} BREAK {DOG}"] * 3)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.sample(1)
def test_equal_to_a_loop_over_diffusers(with_sampler, name: str, prompt: str, backend: str) -> None:
    folder, (text, texts) = with_sampler(name, EULER), PROMPTS[prompt]
    made = load(folder, backend)(
        text, negative_prompt=BLUE, steps=STEPS, guidance=GUIDANCE, seed=5, width=SIDE, height=SIDE
    )
    compare(f"{name} {backend} {prompt}", made, expected(folder, texts))
    assert made.recipe["prompt"] == text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.sample(1)
def test_a_negative_prompt_with_a_schedule(with_sampler, name: str, backend: str) -> None:
    """AND is a word in it, as in the web UI."""
    folder = with_sampler(name, EULER)
    negative = [DOG] * 2 + [f"{DOG} AND {BLUE}"] * 4
    made = load(folder, backend)(
        RED, negative_prompt=f"{DOG}[ AND {BLUE}:1]", steps=STEPS, guidance=GUIDANCE, seed=5, width=SIDE, height=SIDE
    )
    compare(f"{name} {backend} negative", made, expected(folder, calls(*[RED] * 6, negative=negative)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.sample(0)
def test_from_a_picture_calls_count_from_0_of_all_steps(with_sampler, name: str, backend: str) -> None:
    """Half the strength leaves 3 of 6 steps: a share of 0.5 is call 3, which is not reached; 0.2 is call 1."""
    folder = with_sampler(name, EULER)
    late, early = "a [red:blue:0.5] circle", "a [red:[blue|green]:0.2] circle AND a small dog:0.5"
    texts = [Call(((text, 1.0), (DOG, 0.5)), BLUE) for text in circles("rrg")]
    for prompt, wanted in ((late, calls(*circles("rrr"))), (early, texts)):
        made = load(folder, backend)(
            prompt, negative_prompt=BLUE, image=PICTURE, strength=0.5, steps=STEPS, guidance=GUIDANCE, seed=5
        )
        compare(f"{name} {backend} {prompt}", made, expected(folder, wanted, strength=0.5))


# Of 6 steps: Heun calls the model 11 times and counts up to 12, PNDM 7 times and counts up to 6
SCHEDULERS = {
    "DPMSolverMultistepScheduler": ("a [red:blue:0.5] circle", "rrrrbb"),
    "HeunDiscreteScheduler": ("a [[red|blue]:green:0.5] circle", "rrbrbrbgggg"),
    "PNDMScheduler": ("a [red:blue:0.5] circle", "rrrrbbb"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.sample(0)
def test_samplers_count_calls_of_the_model(folders, with_sampler, scheduler: str, backend: str) -> None:
    folder = folders["sd15"] if scheduler == "PNDMScheduler" else with_sampler("sd15", scheduler)
    prompt, colours = SCHEDULERS[scheduler]
    made = load(folder, backend)(
        prompt, negative_prompt=BLUE, steps=STEPS, guidance=GUIDANCE, seed=5, width=SIDE, height=SIDE
    )
    compare(f"{backend} {scheduler}", made, expected(folder, calls(*circles(colours))))


def test_the_calls_of_a_step_are_those_of_the_table() -> None:
    """PNDM has more in its first steps; adaptive samplers choose their steps, and count by those that are asked for."""
    from qwenimg.common.sampling.steps import unchanged
    from qwenimg.common.sampling.table import SAMPLERS
    from qwenimg.common.sampling.types import Schedule

    class Counter:
        count = 0

        def __call__(self, x: float, sigma: float) -> float:
            self.count += 1
            return 0.0

        def both(self, x: float, sigma: float) -> tuple[float, float]:
            return self(x, sigma), 0.0

    levels = tuple(10.0 * 0.7**i for i in range(12))
    schedule = Schedule(sigmas=(*levels, 0.0), timesteps=levels, between=(*levels[1:], 0.0))
    for name, sampler in SAMPLERS.items():
        if sampler.adaptive or name == "dpm_fast":
            assert sampler.calls == 1
            continue
        counter, counts = Counter(), [0]
        for _ in unchanged(sampler.function(1.0, schedule, counter, lambda: 0.0)):
            counts.append(counter.count)
        each = [after - before for before, after in pairwise(counts)]
        print(name, each)
        assert max(each[3:]) == sampler.calls


# What goes together


def drawn(pipe: Pipeline, prompt: str, **asked: Any) -> np.ndarray:
    options = {"steps": 4, "guidance": 3.0, "seed": 2, "width": SIDE, "height": SIDE} | asked
    return pipe(prompt, **options).latents


def near(first: np.ndarray, second: np.ndarray) -> bool:
    return bool(np.linalg.norm(first - second) <= 1e-5 * np.linalg.norm(second))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_the_sum_at_guidance_1_takes_the_negative_prompt(folders, backend: str) -> None:
    """u + (a - u) + (b - u) at scale 1; with weights that sum to 1 and equal parts it is the part itself."""
    pipe = load(folders["sd15"], backend)
    alone = drawn(pipe, RED, guidance=1.0)
    assert near(drawn(pipe, f"{RED}:0.25 AND {RED}:0.75", guidance=1.0), alone)
    assert not near(drawn(pipe, f"{RED} AND {RED}", guidance=1.0), alone)
    assert near(drawn(pipe, f"{RED} AND {RED}", guidance=1.5), drawn(pipe, RED, guidance=3.0))
    assert near(drawn(pipe, f"{RED} AND {DOG}:0"), drawn(pipe, RED))
    assert near(drawn(pipe, f"{RED} AND {DOG}:0", sampler="euler_cfgpp"), drawn(pipe, RED, sampler="euler_cfgpp"))
    rescaled = drawn(pipe, f"{RED} AND {DOG}:0", guidance_rescale=0.7)
    assert near(rescaled, drawn(pipe, RED, guidance_rescale=0.7))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_changes_that_change_nothing(folders, backend: str) -> None:
    """With clip-skip, cut guidance, the step cache, a refiner's steps and CFG++ the picture is that of the text."""
    pipe = load(folders["sdxl"], backend)
    same = f"[{RED}|{RED}]"
    for asked in ({}, {"clip_skip": 1}, {"cfg_end": 0.5}, {"cached_calls": "3"}, {"sampler": "dpmpp_2m_cfgpp"}):
        assert near(drawn(pipe, same, **asked), drawn(pipe, RED, **asked)), asked
    changed = pipe(f"[{RED}|{DOG}]", steps=6, seed=1, cached_calls="2-6", width=SIDE, height=SIDE).recipe
    print(changed["cached_calls"])
    assert changed["cached_calls"] == "2"  # each other call has another text than the one before


@pytest.mark.sample(0)
def test_a_refiner_goes_on_counting(folders) -> None:
    pipe = qwenimg.load(folders["sdxl"], backend="cpu", precision="fp32", refiner=folders["refiner"])
    asked = {"steps": 6, "refine_at": 0.5}
    kept, changed = (drawn(pipe, prompt, **asked) for prompt in (RED, f"[{RED}:{DOG}:5]"))
    assert near(changed, kept)  # no call has a number above 5
    assert not near(drawn(pipe, f"[{RED}:{DOG}:4]", **asked), kept)
    poor = drawn(pipe, f"{RED} AND {DOG}:0", **asked)  # three branches: the score of the second one is the poor one
    assert near(poor, kept)


def test_seeds_in_a_batch_and_a_replay(folders) -> None:
    """Texts are encoded once, and the recipe keeps the prompt as it was typed."""
    pipe = load(folders["sd15"], "cpu")
    prompt = f"a [red|blue] circle AND {DOG} :0.5"
    pipe.prepare([prompt, RED])
    first = pipe(prompt, steps=4, seed=1, guidance=3.0)
    texts = {key.prompt for key in pipe.model.base.texts._kept}
    assert texts >= {"a red circle", "a blue circle", f" {DOG}", ""} and prompt not in texts
    recipe = first.recipe
    again = pipe(
        recipe["prompt"], negative_prompt=recipe["negative_prompt"], steps=recipe["steps"], seed=recipe["seed"],
        guidance=recipe["guidance"], sampler=recipe["sampler"], schedule=recipe["schedule"],
    )  # fmt: skip
    assert recipe["prompt"] == prompt and np.array_equal(first.pixels, again.pixels)
    assert not np.array_equal(first.pixels, pipe(prompt, steps=4, seed=2, guidance=3.0).pixels)


def test_a_plan_has_all_branches_and_chunks(folders) -> None:
    pipe = load(folders["sd15"], "cpu")
    asked = {"steps": 4, "guidance": 3.0, "seed": 1, "width": 256, "height": 256}
    long = "[" + "|".join(f"{i} red " * 600 for i in range(4)) + "]"
    plain, summed, long = (pipe.estimate(text, **asked) for text in (RED, f"{RED} AND {DOG} AND {BLUE}", long))
    print(plain, summed, long)
    assert summed.step == pytest.approx(2 * plain.step, rel=0.01)  # four branches in place of two
    assert summed.memory >= plain.memory and long.memory >= plain.memory


REFUSED = {
    "[a|b]" * 501: "501 schedules and alternations, at most 500",
    "[" + "|".join(map(str, range(900))) + "]": "more than 256 different texts",
    " AND ".join("ab" * 9): "18 parts between AND, at most 16",
    "a AND b:1e9": "",
    "a AND b:1000": "weight 1000",
    "a BREAK " * 45: "45 chunks with its BREAKs, the limit is 40",
    "[" + "|".join(f"{i} " + "a " * 600 for i in range(80)) + "]": "more than 512 chunks",
    "[a:b:2]" + " red" * 4000: "tokens, the limit is 3000",
}


@pytest.mark.parametrize("prompt", REFUSED, ids=range(len(REFUSED)))
@pytest.mark.sample(4)
def test_prompts_out_of_bounds_are_refused_in_a_line(folders, prompt: str) -> None:
    pipe = load(folders["sd15"], "cpu")
    if not REFUSED[prompt]:
        pipe.check(prompt, steps=900)
        return
    with pytest.raises(UsageError) as caught:
        pipe.estimate(prompt, steps=900, seed=1)
    print(caught.value)
    assert REFUSED[prompt] in str(caught.value) and len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


def test_cut_guidance_and_a_sum_are_refused(folders) -> None:
    with pytest.raises(UsageError, match="--cfg-end does not go with AND"):
        load(folders["sd15"], "cpu").check(f"{RED} AND {DOG}", cfg_end=0.5)
