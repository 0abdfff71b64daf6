"""FLUX.1 Redux from pictures to pixels, on both backends: SigLIP against transformers, Redux and the whole way against
diffusers, and the tokens against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image
from safetensors.torch import save_file
from support import lora_cases, oracle_flux, peer
from support.policies import FP32
from support.relative import relative
from support.tiny_redux import PATCH, SIDE, STATES, TEXT, encoder_file, processor, tiny_redux, tiny_siglip, write_redux

import qwenimg
from qwenimg import backends
from qwenimg.common.families.flux import redux, references
from qwenimg.common.pictures import patches

BACKENDS = ("cpu", "mlx")
STATE = 1e-5  # relative L2 of states and tokens, float32
LATENTS = 1e-4  # relative L2 after all steps, float32
PIXELS = 2  # of 255: a value on a rounding edge may go either way
MOVES = 8  # levels of 255 by which a picture must move some pixel: a fault in it would show

RNG = np.random.default_rng(6)
ONE, TWO, START = (RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((50, 31), (40, 90), (48, 80)))
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 32:] = 255
SIZE = {"width": 80, "height": 48}
PROMPT, NEGATIVE, SEED = "a red circle", "blurry, low", 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_redux(tmp_path_factory.mktemp("redux") / "FLUX.1-Redux-dev")


@pytest.fixture(autouse=True)
def small_references(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kontext sees its picture small."""
    sizes = ((48, 96), (64, 80), (64, 64), (80, 64), (96, 48))
    monkeypatch.setattr(references, "SIZES", sizes)
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    yield


# The picture, its states and its tokens


@pytest.mark.parametrize("size", [(384, 384), (31, 50), (500, 333), (7, 900), (1024, 768), (1, 1)])
def test_the_processor_is_exact(size: tuple[int, int]) -> None:
    picture = np.random.default_rng(size[0]).integers(0, 256, (*size, 3), np.uint8)
    expected = processor(384)(Image.fromarray(picture), return_tensors="np").pixel_values[0]
    made = patches.stretched_square(picture, 384).transpose(2, 0, 1)
    print(f"{size}: differs by {np.abs(made - expected).max()}")
    assert made.dtype == expected.dtype and (made == expected).all()


def encoded(file: Path, backend: str, *pictures: np.ndarray) -> np.ndarray:
    """The states of pictures by the encoder in a file or folder."""
    part, engine = redux.open_encoder(file), backends.load(backend)
    network = engine.open(part.network, part.config, part.stored(FP32), FP32)
    squares = [patches.stretched_square(one, part.config.image_size) for one in pictures]
    states = network.encode(np.concatenate([patches.in_patches(one, part.config.patch_size) for one in squares]))
    part.plan.close()
    return np.asarray(engine.numpy(states))


def embedded(file: Path, backend: str, states: np.ndarray) -> np.ndarray:
    """The tokens of states by the Redux in a file or folder."""
    part, engine = redux.open_file(file), backends.load(backend)
    tokens = engine.open(part.network, part.config, part.stored(FP32), FP32).tokens(states)
    part.plan.close()
    return np.asarray(engine.numpy(tokens))


def seen(*pictures: np.ndarray) -> torch.Tensor:
    return processor()([Image.fromarray(one) for one in pictures], return_tensors="pt").pixel_values


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_equal_transformers(folder: Path, backend: str) -> None:
    with torch.no_grad():
        outputs = tiny_siglip()(seen(ONE, TWO), output_hidden_states=True)
    made = encoded(folder / "image_encoder", backend, ONE, TWO)
    assert made.shape == (2, (SIDE // PATCH) ** 2, STATES) and made.dtype == np.float32
    error = relative(made, outputs.last_hidden_state.numpy())
    # Planted: the states without the norm, those before the last layer, and the vector of the head in place of all
    faults = {
        "no norm": outputs.hidden_states[-1], "before the last layer": outputs.hidden_states[-2],
        "pooled": outputs.pooler_output[:, None].expand_as(outputs.last_hidden_state),
    }  # fmt: skip
    told = {name: relative(made, fault.numpy()) for name, fault in faults.items()}
    print(f"{backend}: {error:.1e} ({STATE}); planted {told}")
    assert error <= STATE and min(told.values()) > 100 * STATE


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_equal_diffusers(folder: Path, backend: str) -> None:
    states = np.random.default_rng(1).standard_normal((2, 16, STATES)).astype(np.float32)
    with torch.no_grad():
        expected = tiny_redux()(torch.from_numpy(states)).image_embeds.numpy()
    for place in (folder, folder / "image_embedder", folder / "flux1-redux-dev.safetensors"):
        made = embedded(place, backend, states)
        assert made.shape == (2, 16, TEXT) and made.dtype == np.float32
        error = relative(made, expected)
        print(f"{backend}, {place.name}: {error:.1e} ({STATE})")
        assert error <= STATE


def drawn_weights() -> dict[str, np.ndarray]:
    """Weights of both networks from numpy's legacy generator, whose numbers never change."""
    state, shapes = np.random.RandomState(44), dict[str, tuple[int, ...]]()
    for model in (tiny_siglip(), tiny_redux()):
        named = encoder_file(model) if model.__class__.__name__ == "SiglipVisionModel" else model.state_dict()
        shapes |= {name: tuple(tensor.shape) for name, tensor in named.items() if ".head." not in name}
    made = {}
    for name in sorted(shapes):
        noise = state.standard_normal(shapes[name])
        is_norm = "norm" in name and name.endswith("weight")
        scale = 0.3 if len(shapes[name]) == 1 else 1 / math.sqrt(np.prod(shapes[name][1:]))
        made[name] = (1 + 0.3 * noise if is_norm else scale * noise).astype(np.float32)
    return made


def in_float64(weights: dict[str, np.ndarray], picture: np.ndarray) -> np.ndarray:
    """The tokens [L, S] of a picture by the published formulas, in float64."""
    w = {name.removeprefix("vision_model."): value.astype(np.float64) for name, value in weights.items()}
    resized = np.asarray(Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) / 127.5 - 1
    side, heads = SIDE // PATCH, 16

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"] + w[f"{name}.bias"]

    kernel = w["embeddings.patch_embedding.weight"]
    rows = [
        [np.einsum("ocyx,yxc->o", kernel, resized[r * PATCH : r * PATCH + PATCH, c * PATCH : c * PATCH + PATCH])
         for c in range(side)] for r in range(side)
    ]  # fmt: skip
    x = np.array(rows).reshape(side**2, -1) + w["embeddings.patch_embedding.bias"]
    x = x + w["embeddings.position_embedding.weight"]
    for i in range(3):
        layer = f"encoder.layers.{i}"
        h = norm(x, f"{layer}.layer_norm1")
        q, k, v = (linear(h, f"{layer}.self_attn.{n}_proj").reshape(len(x), heads, -1) for n in "qkv")
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v).reshape(len(x), -1)
        x = x + linear(mixed, f"{layer}.self_attn.out_proj")
        h = linear(norm(x, f"{layer}.layer_norm2"), f"{layer}.mlp.fc1")
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{layer}.mlp.fc2")
    h = linear(norm(x, "post_layernorm"), "redux_up")
    return linear(h / (1 + np.exp(-h)), "redux_down")


GOLDEN = {"mean": -0.10904354, "rms": 0.53069885, "first": -0.9307294, "last": -0.51688253}  # of the tokens


def test_the_golden_tokens(tmp_path: Path) -> None:
    weights = drawn_weights()
    picture = np.random.RandomState(45).randint(0, 256, (44, 61, 3)).astype(np.uint8)
    exact = in_float64(weights, picture)
    told = {"mean": exact.mean(), "rms": np.sqrt((exact**2).mean()), "first": exact[0, 0], "last": exact[-1, -1]}
    print({name: float(f"{value:.8f}") for name, value in told.items()})
    tiny_siglip().config.save_pretrained(tmp_path / "encoder")
    halves = {True: tmp_path / "encoder" / "model.safetensors", False: tmp_path / "redux.safetensors"}
    for is_encoder, file in halves.items():
        own = {k: torch.from_numpy(v) for k, v in weights.items() if k.startswith("vision_model.") == is_encoder}
        save_file(own, file)
    for backend in BACKENDS:
        states = encoded(tmp_path / "encoder", backend, picture)
        error = relative(embedded(tmp_path / "redux.safetensors", backend, states)[0], exact)
        print(f"{backend}: {error:.1e} ({STATE})")
        assert error <= STATE
    assert all(abs(told[name] - value) <= 1e-7 for name, value in GOLDEN.items())


# From pictures to pixels

CASES: dict[str, dict[str, Any]] = {
    "one-picture": {"pictures": [(ONE, 1.0, 1.0)]},
    "one-picture-with-a-scale": {"pictures": [(ONE, 0.6, 1.0)]},
    "with-a-prompt": {"pictures": [(ONE, 0.8, 1.0)], "prompt": PROMPT},
    "two-pictures": {"pictures": [(ONE, 0.7, 1.0), (TWO, 0.4, 1.0)], "prompt": PROMPT},
    "two-without-a-prompt": {"pictures": [(ONE, 0.7, 1.0), (TWO, 0.4, 1.0)]},
    "two-with-scales-of-the-pooled-text": {"pictures": [(ONE, 0.7, 0.5), (TWO, 0.4, 0.3)], "prompt": PROMPT},
    "with-a-negative-prompt": {
        "pictures": [(ONE, 0.8, 1.0)], "prompt": PROMPT, "negative_prompt": NEGATIVE, "true_cfg": 2.5,
    },
    "with-an-empty-negative-prompt": {
        "pictures": [(ONE, 0.8, 1.0)], "negative_prompt": "", "true_cfg": 2.5,
    },
    "schnell": {"variant": "schnell", "pictures": [(ONE, 0.8, 1.0)], "prompt": PROMPT},
    "from-a-picture": {"task": "image", "pictures": [(ONE, 0.8, 1.0)], "prompt": PROMPT, "strength": 0.7, "steps": 4},
    "within-a-mask": {"task": "mask", "pictures": [(ONE, 1.0, 1.0)], "strength": 0.8, "steps": 4},
    "fill": {"variant": "fill", "task": "fill", "pictures": [(ONE, 1.0, 1.0)], "prompt": PROMPT},
    "kontext": {"variant": "kontext", "task": "kontext", "pictures": [(ONE, 1.0, 1.0)], "prompt": PROMPT},
}  # fmt: skip


def prior(folder: Path, flux: Any, case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The text states and the pooled text of diffusers' prior. Without a prompt it has no text encoders."""
    from diffusers import FluxPriorReduxPipeline

    prompt, count = case.get("prompt"), len(case["pictures"])
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    texts = {name: getattr(flux, name) for name in names} if prompt else {}
    pipe = FluxPriorReduxPipeline(tiny_siglip(), processor(), tiny_redux(), **texts)
    asked: dict[str, Any] = {}
    if prompt:
        states, pooled, _ = flux.encode_prompt(prompt, None, max_sequence_length=length(case))
        asked = {"prompt_embeds": states.repeat(count, 1, 1), "pooled_prompt_embeds": pooled.repeat(count, 1)}
    else:  # the numbers of zeros are those of published models
        zeros, widths = torch.zeros, {4096: TEXT, 768: flux.transformer.config.pooled_projection_dim}

        def fewer(size: Any, **more: Any) -> torch.Tensor:
            return zeros((*size[:-1], widths[size[-1]]), **more)

        patch = pytest.MonkeyPatch()
        patch.setattr(torch, "zeros", fewer)
    try:
        made = pipe(
            [Image.fromarray(one) for one, _, _ in case["pictures"]],
            prompt_embeds_scale=[scale for _, scale, _ in case["pictures"]],
            pooled_prompt_embeds_scale=[scale for _, _, scale in case["pictures"]],
            **asked,
        )
    finally:
        if not prompt:
            patch.undo()
    return made.prompt_embeds, made.pooled_prompt_embeds


def length(case: dict[str, Any]) -> int:
    return 256 if case.get("variant") == "schnell" else 512


def theirs(folder: Path, model: Path, case: dict[str, Any], lora: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' latents and pixels of a case."""
    task = case.get("task", "text")
    flux = oracle_flux.pipeline(model, task)
    states, pooled = prior(folder, flux, case)
    names = {"true_cfg": "true_cfg_scale", "negative_prompt": "negative_prompt", "strength": "strength"}
    options = {theirs: case[ours] for ours, theirs in names.items() if ours in case}
    if task != "text":
        options["image"] = Image.fromarray(START)
    if task in ("mask", "fill"):
        options["mask_image"] = Image.fromarray(HOLE)
    if task == "kontext":
        options["max_area"] = SIZE["width"] * SIZE["height"]
    if lora is not None:
        flux.load_lora_weights(lora)
    try:
        return oracle_flux.generate(
            model, task, seed=SEED, length=length(case), num_inference_steps=case.get("steps", 3), guidance_scale=3.5,
            prompt_embeds=states, pooled_prompt_embeds=pooled, **SIZE, **options,
        )  # fmt: skip
    finally:
        if lora is not None:
            flux.unload_lora_weights()


def ours(pipe: qwenimg.Pipeline, folder: Path, case: dict[str, Any], **more: Any) -> qwenimg.Result:
    options = {name: case[name] for name in ("negative_prompt", "true_cfg", "strength") if name in case}
    task = case.get("task", "text")
    options |= {"image": START} if task != "text" else {}
    options |= {"mask": HOLE} if task in ("mask", "fill") else {}
    controls = [
        (folder, picture, scale if pooled == 1 else {"tokens": scale, "pooled": pooled})
        for picture, scale, pooled in case["pictures"]
    ]
    asked = {"seed": SEED, "guidance": 3.5, "steps": case.get("steps", 3), **SIZE, **options, **more}
    if case.get("variant") == "schnell":
        del asked["guidance"]
    return pipe(case.get("prompt", ""), **({"control": controls} if controls else {}), **asked)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(1)
def test_equals_diffusers(folder: Path, tiny_flux: dict[str, Path], name: str) -> None:
    case = CASES[name]
    model = tiny_flux[case.get("variant", "dev")]
    expected = theirs(folder, model, case)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        with qwenimg.load(model, backend=backend, precision="fp32") as pipe:
            made = ours(pipe, folder, case)
            peer.check_picture(f"{name}, {backend}", made, expected, LATENTS, PIXELS)
            plain = ours(pipe, folder, {"prompt": PROMPT} | case | {"pictures": []})
            assert np.abs(made.pixels.astype(int) - plain.pixels).max() >= MOVES


@pytest.mark.sample(0)
def test_with_a_lora(folder: Path, tiny_flux: dict[str, Path], tmp_path: Path) -> None:
    weights = {"transformer_blocks.0.attn.add_k_proj": (66, 66), "single_transformer_blocks.1.attn.to_q": (66, 66)}
    modules = {name: lora_cases.lora(shape, i, rank=2) for i, (name, shape) in enumerate(weights.items())}
    dialect = lora_cases.Dialect("transformer.", lora_cases.PEFT_HALVES)
    lora = lora_cases.written(tmp_path / "lora.safetensors", modules, dialect)
    case = CASES["with-a-prompt"]
    expected = theirs(folder, tiny_flux["dev"], case, lora)
    for backend in BACKENDS:
        with qwenimg.load(tiny_flux["dev"], backend=backend, precision="fp32") as pipe:
            made = ours(pipe, folder, case, lora=str(lora))
            peer.check_picture(f"with a LoRA, {backend}", made, expected, LATENTS, PIXELS)
            without = ours(pipe, folder, case)
            assert np.abs(made.pixels.astype(int) - without.pixels).max() >= MOVES


def text_of(pipe: qwenimg.Pipeline, folder: Path, case: dict[str, Any]) -> np.ndarray:
    """The text states of the prompt's branch."""
    controls = [(folder, picture, scale) for picture, scale, _ in case["pictures"]]
    request = pipe.check(case.get("prompt", ""), control=controls, **SIZE)
    pipe.controls.give(pipe.model, request)
    model: Any = pipe.model
    return np.asarray(pipe.engine.numpy(model._states(request)[0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_text_states_and_planted_faults(folder: Path, tiny_flux: dict[str, Path], backend: str) -> None:
    """All text stands at one place, so that a picture does not show the order of its tokens: the states do."""
    case = CASES["two-pictures"]
    flux = oracle_flux.pipeline(tiny_flux["dev"], "text")
    expected, plain = (prior(folder, flux, case | {"pictures": use})[0].detach().numpy()
                       for use in (case["pictures"], [(ONE, 0.7 * 0.7, 1.0), (TWO, 0.4 * 0.4, 1.0)]))  # fmt: skip
    one, two = (prior(folder, flux, case | {"pictures": [use]})[0].detach().numpy() for use in case["pictures"])
    faults = {
        "tokens before the text": np.concatenate([expected[:, 512:], expected[:, :512]], axis=1),
        "scale twice": plain,
        "scale of the tokens alone": np.concatenate([expected[:, :512] / 1.1, expected[:, 512:]], axis=1),
        "the second picture left out": one,
        "the first picture left out": two,
    }
    with qwenimg.load(tiny_flux["dev"], backend=backend, precision="fp32") as pipe:
        made = text_of(pipe, folder, case)
    error, told = relative(made, expected), {name: relative(made, fault) for name, fault in faults.items()}
    print(f"{backend}: {error:.1e} ({STATE}); planted {told}")
    assert error <= STATE and min(told.values()) > 100 * STATE
    followed = np.concatenate([one, two[:, 512:]], axis=1)  # as ComfyUI has several
    assert made.shape == expected.shape != followed.shape
