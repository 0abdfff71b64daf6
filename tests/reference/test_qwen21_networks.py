"""Qwen-Image-2.1's transformer on both backends against diffusers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_qwen21 import tiny_dit

from qwenimg import backends
from qwenimg.common.networks.denoisers import qwen21_conditioning, qwen21_dit
from qwenimg.common.networks.denoisers.qwen21_conditioning import TokenRun
from qwenimg.common.numbers.timesteps import timestep_features
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 3e-6  # relative L2 of a forward


class Case(NamedTuple):
    """Text states, places of references among them (in slots), rows and columns of latent tokens of the image."""

    length: int
    places: list[tuple[int, int, int]]
    grid: tuple[int, int]


CASES = {
    "text": Case(13, [], (4, 6)),
    "one reference": Case(20, [(3, 2, 4)], (6, 2)),
    "two references": Case(33, [(3, 2, 4), (14, 3, 2)], (4, 4)),
    "adjacent references": Case(27, [(2, 2, 3), (8, 4, 2), (17, 1, 1)], (2, 6)),
    "nothing before or behind": Case(8, [(0, 2, 4)], (4, 2)),
}


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_dit()
    # The reference's own is in float32, whose angles of up to 1000 radians are worth more than all else.
    model.time_text_embed.time_proj.forward = lambda t: torch.stack(
        [torch.from_numpy(timestep_features(1000 * float(one))).float() for one in t]
    )
    return model


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformer")
    model.save_pretrained(folder)
    return folder


def opened(folder: Path, backend: str) -> tuple[Any, Any]:
    network = qwen21_dit.NETWORK
    part = open_component(network, folder, read_config(network, folder), "it")
    engine = backends.load(backend)
    return engine, engine.open(part.network, part.config, part.stored(FP32), FP32)


class Inputs(NamedTuple):
    text: np.ndarray
    references: list[np.ndarray]
    latents: np.ndarray


def inputs(case: Case, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((1, *shape)).astype(np.float32)

    references = [normal(4 * rows * columns, 12) for _, rows, columns in case.places]
    return Inputs(normal(case.length, 60), references, normal(case.grid[0] * case.grid[1], 12))


def theirs(model: Any, case: Case, given: Inputs, sigma: float, **cache: Any) -> np.ndarray:
    slots = torch.zeros(1, case.length, dtype=torch.bool)
    for start, rows, columns in case.places:
        slots[:, start : start + rows * columns] = True
    target = case.grid[0] * case.grid[1]
    slots = torch.cat([slots, torch.ones(1, target // 4, dtype=torch.bool)], dim=1)
    with torch.inference_mode():
        result = model(
            hidden_states=torch.from_numpy(np.concatenate([*given.references, given.latents], axis=1)),
            encoder_hidden_states=torch.from_numpy(given.text),
            timestep=torch.tensor([sigma]),
            img_shapes=[[*((1, 2 * rows, 2 * columns) for _, rows, columns in case.places), (1, *case.grid)]],
            img_mask=slots,
            **cache,
        ).sample
    return result[:, -target:].numpy()


def condition(engine: Any, ours: Any, case: Case, given: Inputs, keeps: bool = True) -> Any:
    references = [engine.array(one) for one in given.references]
    return ours.condition(engine.array(given.text), (case.grid, case.places, references), keeps)


def predicted(engine: Any, ours: Any, given: Inputs, sigma: float, condition: Any) -> np.ndarray:
    features = qwen21_conditioning.time_row(1000 * sigma, "float32")
    return np.asarray(engine.numpy(ours.predict(engine.array(given.latents), features, condition)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_transformer(model: Any, folder: Path, backend: str, name: str) -> None:
    """Two noise levels with one condition, so that the second uses what the first has kept."""
    engine, ours = opened(folder, backend)
    case = CASES[name]
    given = inputs(case)
    prepared = condition(engine, ours, case, given)
    for sigma in (1.0, 0.625):
        result = predicted(engine, ours, given, sigma, prepared)
        error = relative_float32(result, theirs(model, case, given, sigma))
        print(f"{backend} {name}, sigma {sigma}: {error:.1e} (limit {FLOAT32})")
        assert error <= FLOAT32 and result.std() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["text", "adjacent references"])
def test_kept_keys_change_no_bit(folder: Path, backend: str, name: str) -> None:
    engine, ours = opened(folder, backend)
    case = CASES[name]
    given = inputs(case)
    kept, anew = (condition(engine, ours, case, given, keeps) for keeps in (True, False))
    for sigma in (0.9, 0.7, 0.02):
        first, second = (predicted(engine, ours, given, sigma, one) for one in (kept, anew))
        assert np.array_equal(first, second), sigma
    assert (len(kept.known), len(anew.known)) == (3, 0)


# Planted faults


def moved(case: Case, fault: str) -> Any:
    """The layout of `case` with a fault."""
    layout = qwen21_conditioning.layout(case.length, case.places, case.grid)
    runs = layout.runs
    if fault == "half a token":  # rows and columns of references
        context = layout.context.astype(np.float64)
        for run in runs:
            context[run.start : run.end, 1:] += 0 if run.causal else 0.5
        return layout._replace(context=context)
    if fault == "one block":  # adjacent references see each other
        images = [run for run in runs if not run.causal]
        joined = TokenRun(images[0].start, images[-1].end, False)
        return layout._replace(runs=(*(run for run in runs if run.end <= joined.start), joined, *runs[-1:]))
    assert fault == "text sees all"
    return layout._replace(runs=tuple(run._replace(causal=False) for run in runs))


FAULTS = ("half a token", "one block", "text sees all", "time of the step", "gain", "order of tokens")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    engine, ours = opened(folder, "cpu")
    case = CASES["adjacent references"]
    given = inputs(case)
    expected = theirs(model, case, given, 0.625)
    right = predicted(engine, ours, given, 0.625, condition(engine, ours, case, given))
    assert relative_float32(right, expected) <= FLOAT32
    if fault == "time of the step":  # text and references are not seen at time 0
        time_row = qwen21_conditioning.time_row
        monkeypatch.setattr(qwen21_conditioning, "time_row", lambda time, dtype: time_row(625.0, dtype))
    elif fault == "gain":
        ours.model.txt_in.text_norm.weight.data += 0.01
    elif fault == "order of tokens":  # by slots: 2 x 2 tokens of each, in place of rows of the image

        def by_slots(tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
            return tokens.reshape(1, rows, 2, columns, 2, 12).transpose(0, 1, 3, 2, 4, 5).reshape(tokens.shape)

        shapes = [place[1:] for place in case.places]
        given = given._replace(
            references=[by_slots(one, *shape) for one, shape in zip(given.references, shapes, strict=True)]
        )
    else:
        layout = moved(case, fault)
        monkeypatch.setattr(qwen21_conditioning, "layout", lambda *any: layout)
    error = relative_float32(predicted(engine, ours, given, 0.625, condition(engine, ours, case, given)), expected)
    print(f"{fault}: {error:.1e} (limit {FLOAT32})")
    assert error > 100 * FLOAT32


# Numbers


def test_positions() -> None:
    """Golden numbers: 3 text tokens, a reference of 4 x 4 latent tokens, 5 text tokens, an image of 4 x 6."""
    made = qwen21_conditioning.layout(12, [(3, 2, 2)], (4, 6))
    text = np.concatenate([made.context[:3], made.context[19:]])
    assert text.tolist() == [[p, p, p] for p in (0, 1, 2, 7, 8, 9, 10, 11)]
    reference = made.context[3:19]
    assert set(reference[:, 0]) == {3} and reference[0].tolist() == [3, -2, -2] and reference[-1].tolist() == [3, 1, 1]
    assert reference[1].tolist() == [3, -2, -1], "row by row"
    assert made.image[0].tolist() == [12, -2, -3] and made.image[-1].tolist() == [12, 1, 2] and len(made.image) == 24
    assert made.runs == (TokenRun(0, 3, True), TokenRun(3, 19, False), TokenRun(19, 24, True))


def test_manifest_is_that_of_the_reference(model: Any, folder: Path) -> None:
    stored = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert qwen21_dit.NETWORK.manifest(read_config(qwen21_dit.NETWORK, folder)) == stored


def test_published_counts() -> None:
    manifest = qwen21_dit.NETWORK.manifest(qwen21_dit.Qwen21Config())
    assert len(manifest) == 297
    assert sum(int(np.prod(shape)) for shape in manifest.values()) // 10_000 == 711_512
