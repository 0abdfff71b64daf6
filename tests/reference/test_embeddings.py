"""Textual inversion against diffusers' `load_textual_inversion`: text states, latents and pixels on both backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import embedding_files, oracle_sd
from support.crossed import crossed

import qwenimg
from qwenimg.common.families.stable_diffusion.expert import schedules
from qwenimg.common.numbers import noise
from qwenimg.common.parts.texts import clip_texts
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.prompts.weighted import Chunk

BACKENDS = ("cpu", "mlx")
KINDS = ("sd15", "sd21", "sdxl")
CLASSES = {"sd15": "StableDiffusionPipeline", "sd21": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}
TEXTS = LATENTS = 1e-4  # relative L2, float32
PIXELS = 2  # of 255
ONE, MANY = "<cat>", "style-1"
COUNTS = {ONE: 1, MANY: 4}
NEGATIVE = f"a blue square, {MANY}"
INITIAL = noise.normal((1, 4, 8, 8), 7)
# What is drawn: a prompt of ours and of diffusers, and the negative prompt of both
CASES: dict[str, tuple[str, str, str]] = {
    "one vector": (f"a photo of {ONE}, a dog", f"a photo of {ONE}, a dog", "a blue square"),
    "several vectors": (f"a {MANY} dog", f"a {MANY} dog", "a blue square"),
    "two": (f"{ONE} and {MANY}, red", f"{ONE} and {MANY}, red", "a blue square"),
    "negative": ("a red circle", "a red circle", NEGATIVE),
    "ComfyUI's": (f"a embedding:{ONE} (embedding:{MANY}:1.0)", f"a {ONE} {MANY}", "a blue square"),
    "upper case, inside a word": (f"red{ONE.upper()}dog {MANY.upper()}", f"red{ONE}dog {MANY}", "a blue square"),
    "cut at 77": ("red " * 70 + ONE, "red " * 70 + ONE, "a blue square"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """The files of each kind, by their names in prompts."""
    root = tmp_path_factory.mktemp("embeddings")
    return {
        kind: {
            name: embedding_files.write(root / f"{kind}{seed}.safetensors", kind, COUNTS[name], seed)
            for seed, name in enumerate((ONE, MANY))
        }
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def reference(folders) -> Callable[[str], Any]:
    """diffusers' pipeline of a kind with both embeddings. With the eos_token_id of published configurations it would
    take the pooled state at an added token, whose id is the largest: the true one is set."""
    made: dict[str, Any] = {}

    def loaded(kind: str) -> Any:
        if kind not in made:
            pipe = oracle_sd.pipeline.__wrapped__(folders[kind], CLASSES[kind])
            for number, name in enumerate(("", "_2") if kind == "sdxl" else ("",)):
                encoder, tokenizer = getattr(pipe, f"text_encoder{name}"), getattr(pipe, f"tokenizer{name}")
                for seed, (token, count) in enumerate(COUNTS.items()):
                    values = [*embedding_files.parts(kind, count, seed).values()][number]
                    pipe.load_textual_inversion({token: values}, token=token, text_encoder=encoder, tokenizer=tokenizer)
                encoder.config.eos_token_id = tokenizer.eos_token_id
                inner = getattr(encoder, "text_model", encoder)
                inner.eos_token_id = tokenizer.eos_token_id
            made[kind] = pipe
        return made[kind]

    return loaded


def load(folder: Path, backend: str) -> Pipeline:
    return qwenimg.load(folder, backend=backend, precision="fp32")


def given(files: dict[str, Path]) -> list[str]:
    return [f"{name}={path}" for name, path in files.items()]


def relative(ours: np.ndarray, theirs: torch.Tensor | np.ndarray) -> float:
    expected = np.asarray(theirs, np.float64)
    assert ours.shape == expected.shape and expected.std() > 0.1
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


def states(pipe: Pipeline, prompt: str, files: dict[str, Path], **asked: Any) -> tuple[np.ndarray, np.ndarray]:
    """The text states and the pooled vector of a prompt."""
    request = pipe.check(prompt, embedding=given(files), guidance=1.0, **asked)
    expert = pipe.model.base
    [[timed]] = schedules(request, pipe.model.plan(request))
    return expert.texts.states([timed.text], request.family_options.clip_skip, request.inversions)


def encoded(pipe: Any, prompt: str, clip_skip: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    with torch.no_grad():
        made = pipe.encode_prompt(
            prompt,
            device="cpu",
            num_images_per_prompt=1,
            do_classifier_free_guidance=False,
            clip_skip=clip_skip or None,
        )
    return made[0], made[2] if len(made) > 2 else None


@pytest.mark.parametrize(("kind", "backend"), crossed(KINDS, BACKENDS))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(1)
def test_text_states(folders, files, reference, kind: str, backend: str, case: str) -> None:
    ours, theirs, _ = CASES[case]
    pipe = load(folders[kind], backend)
    for clip_skip in (0, 1):
        made, pooled = states(pipe, ours, files[kind], clip_skip=clip_skip)
        wanted, wanted_pooled = encoded(reference(kind), theirs, clip_skip)
        error = relative(made, wanted)
        errors = [error, *([relative(pooled, wanted_pooled)] if wanted_pooled is not None else [])]
        print(f"{kind} {backend} {case}, clip skip {clip_skip}: {max(errors):.1e}")
        assert max(errors) <= TEXTS


@pytest.mark.parametrize(("kind", "backend"), crossed(KINDS, BACKENDS))
@pytest.mark.parametrize("case", ["several vectors", "two", "negative"])
@pytest.mark.sample(0)
def test_pictures(folders, files, reference, kind: str, backend: str, case: str) -> None:
    ours, theirs, negative = CASES[case]
    latents, pixels = drawn(reference(kind), prompt=theirs, negative_prompt=negative)
    pipe = load(folders[kind], backend)
    made = draw(pipe, files[kind], ours, negative)
    compare(f"{kind} {backend} {case}", made, latents, pixels)
    if case != "negative":
        words = pipe(
            ours.replace("embedding:", ""), negative_prompt="a blue square", steps=3, guidance=4.0, latents=INITIAL
        )
        assert np.abs(words.latents - made.latents).max() > 0.01  # it is not drawn as words


def draw(pipe: Pipeline, files: dict[str, Path], prompt: str, negative: str) -> qwenimg.Result:
    return pipe(prompt, negative_prompt=negative, embedding=given(files), steps=3, guidance=4.0, latents=INITIAL)


def drawn(pipe: Any, **asked: Any) -> tuple[np.ndarray, np.ndarray]:
    asked |= {"guidance_scale": 4.0, "num_inference_steps": 3, "latents": torch.from_numpy(INITIAL)}
    final = pipe(output_type="latent", **asked).images
    with torch.no_grad():
        pixels = pipe.vae.decode(final / pipe.vae.config.scaling_factor, return_dict=False)[0]
    image = pipe.image_processor.postprocess(pixels, output_type="np")[0]
    return final.numpy(), (image * 255).round().astype(np.float64)


def compare(name: str, made: qwenimg.Result, latents: np.ndarray, pixels: np.ndarray) -> None:
    error, worst = relative(made.latents, latents), np.abs(made.pixels.astype(float) - pixels).max()
    print(f"{name}: latents {error:.1e}, pixels {worst:.0f}, deviation of the picture {pixels.std():.0f}")
    assert pixels.std() > 10 and error <= LATENTS and worst <= PIXELS


# Weights and long prompts, which diffusers' pipelines do not have


def weighted(states: torch.Tensor, weights: np.ndarray, kind: str) -> np.ndarray:
    """The web UI's formula in float64: of each text encoder each token's state times its weight, and the chunk's mean
    as before."""
    made = []
    for wide in np.split(states.double().numpy(), np.cumsum(embedding_files.WIDTHS[kind])[:-1], axis=-1):
        changed = wide * weights[None, :, None]
        made.append(changed * (wide.mean() / changed.mean()))
    return np.concatenate(made, axis=-1)


@pytest.mark.parametrize(("kind", "backend"), crossed(KINDS, BACKENDS))
@pytest.mark.sample(1)
def test_weights(folders, files, reference, kind: str, backend: str) -> None:
    """Of all vectors of an embedding, also in brackets and beside others."""
    pipe, weights = load(folders[kind], backend), np.ones(77)
    weights[2:6], weights[7] = 1.3, 1 / 1.1  # start, a, four vectors, and, <cat>
    for prompt in (f"a (embedding:{MANY}:1.3) and [{ONE}]", f"a ({MANY}:1.3) and [embedding:{ONE}]"):
        made, _ = states(pipe, prompt, files[kind])
        plain, _ = encoded(reference(kind), f"a {MANY} and {ONE}")
        error = relative(made, weighted(plain, weights, kind))
        print(f"{kind} {backend} weights: {error:.1e}")
        assert error <= TEXTS and relative(made, plain) > 0.01


@pytest.mark.parametrize(("kind", "backend"), crossed(KINDS, BACKENDS))
@pytest.mark.parametrize("before", [71, 72, 75, 146])
@pytest.mark.sample(2)
def test_long_prompts(folders, files, reference, kind: str, backend: str, before: int) -> None:
    """Four vectors after 71 tokens fill the first chunk; after 72 they begin the second one whole, as in the web UI."""
    words = {71: ["red " * 71 + MANY, "blue"], 72: ["red " * 72, f"{MANY} blue"], 75: ["red " * 75, f"{MANY} blue"]}
    windows = words.get(before, ["red " * 75, "red " * 71 + MANY, "blue"])
    made, pooled = states(load(folders[kind], backend), "red " * before + f"{MANY} blue", files[kind])
    wanted = [encoded(reference(kind), window) for window in windows]
    error = relative(made, torch.cat([one for one, _ in wanted], dim=1))
    print(f"{kind} {backend} after {before} tokens: {error:.1e} in {len(windows)} chunks")
    assert error <= TEXTS
    if kind == "sdxl":
        assert relative(pooled, wanted[0][1]) <= TEXTS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_schedules_and_sums(folders, files, backend: str) -> None:
    """An embedding in a schedule, an alternation or a part of AND is drawn as where it stands alone."""
    pipe, name = load(folders["sd15"], backend), f"embedding:{MANY}"
    asked: dict[str, Any] = {"embedding": given(files["sd15"]), "steps": 3, "guidance": 3.0, "seed": 1}
    plain = pipe(f"a {name} dog", **asked)
    for text in (f"a [{name}:red:20] dog", f"a [{name}|embedding:{MANY}] dog", f"a [red:{name}:-1] dog"):
        assert np.abs(pipe(text, **asked).latents - plain.latents).max() < 1e-5, text
    summed = pipe(f"a {name} dog AND a {name} dog :0.0", **asked)
    assert np.abs(summed.latents - plain.latents).max() < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_refiner_reads_clip_g(folders, files, backend: str) -> None:
    """Beside a base and alone, from the one file for SDXL."""
    prompt, mine = f"a {MANY} dog", files["sdxl"]
    both = qwenimg.load(folders["sdxl"], refiner=folders["refiner"], backend=backend, precision="fp32")
    alone = load(folders["refiner"], backend)
    request = both.check(prompt, embedding=given(mine), guidance=1.0)
    expert = both.model.refiner
    made = expert.texts.states([schedules(request, both.model.plan(request))[0][0].text], 0, request.inversions)
    wanted, pooled = states(alone, prompt, mine)
    assert relative(made[0], wanted) == 0 and relative(made[1], pooled) == 0
    words = alone.model.base.texts.states([prompt], 0)
    assert relative(words[0], wanted) > 0.1


# Planted faults


def reversed_vectors(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The vectors of each embedding in reverse order."""
    return lambda chunks, vectors: plain(chunks, [rows[::-1] for rows in vectors])


def one_late(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Each vector one token late."""

    def faulty(chunks: list[Chunk], vectors: list[np.ndarray]) -> Any:
        placed = plain(chunks, vectors)
        return ([(chunk, at + 1) for chunk, at in placed[0]], placed[1]) if placed else placed

    return faulty


VECTORS = {"order": reversed_vectors, "one late": one_late}


def at_the_embedding(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """The pooled state at the last vector, as with the largest id of an extended vocabulary."""
    import importlib

    name = "torch" if backend == "cpu" else "mlx"
    module = importlib.import_module(f"qwenimg.backends.{name}.networks.encoders.clip")
    encode = module.Runner.encode

    def faulty(self: Any, ids: Any, skipped: int, normed: bool, places: Any = (), vectors: Any = None) -> Any:
        last = max((at for _, at in places), default=None)
        if last is not None:
            monkeypatch.setattr(module, "eos_position", lambda config, chunk: last)
        return encode(self, ids, skipped, normed, places, vectors)

    monkeypatch.setattr(module.Runner, "encode", faulty)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", [*VECTORS, "pooled"])
@pytest.mark.sample(1)
def test_planted_faults(folders, files, reference, monkeypatch, backend: str, fault: str) -> None:
    ours, theirs, _ = CASES["several vectors"]
    wanted, wanted_pooled = encoded(reference("sdxl"), theirs)
    if fault in VECTORS:
        monkeypatch.setattr(clip_texts, "_vectors", VECTORS[fault](clip_texts._vectors))
    else:
        at_the_embedding(monkeypatch, backend)
    made, pooled = states(load(folders["sdxl"], backend), ours, files["sdxl"])
    errors = relative(made, wanted), relative(pooled, wanted_pooled)
    print(f"{fault} on {backend}: states {errors[0]:.1e}, pooled {errors[1]:.1e}")
    assert max(errors) > 100 * TEXTS
