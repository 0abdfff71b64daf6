"""The block `writing` of a passport: recorded on torch and held against both backends, with faults planted that only
tokens after the first show, and in files that are damaged or hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_language
from support.cli_runner import cli
from support.mutant import Patch, side
from support.passport_runs import check, record
from support.policies import BF16, FP32
from support.refusals import refused

from qwenimg import backends
from qwenimg.common.parity import writing
from qwenimg.common.parity.blocks import ComponentPolicy
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Figure, RecordedWriting
from qwenimg.common.parts.language_models import LanguageModel, open_language_model
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime

KINDS = ("gemma 2", "llama 2", "qwen3")  # windows and soft caps; with a head; with a tied one
BACKENDS = ("cpu", "mlx")
DISTINCT = 8  # tokens of the highest scores


class Bench:
    """A tiny language model, and its record in one precision."""

    def __init__(self, folder: Path, name: str, precision: str):
        self.precision = {"fp32": FP32, "bf16": BF16}[precision]
        self.model: LanguageModel = open_language_model(tiny_language.write(folder, name))
        self.part = ComponentPolicy("text_encoder", self.model.component, self.precision)
        exact = backends.load("cpu")
        self.recorded: RecordedWriting = writing.record(self.residents("cpu"), self.part, self.tokenizer, exact)

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer.tokenizer

    def residents(self, backend: str) -> Residents:
        return Residents(Runtime(backends.load(backend), self.precision, lambda kind, text: None))

    def judged(self, backend: str) -> Figure:
        return writing.judged(self.recorded, self.residents(backend), self.part, self.tokenizer)


Benches = Callable[[str, str], Bench]


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Benches:
    return cache(lambda name, precision: Bench(tmp_path_factory.mktemp("model"), name, precision))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(1)
def test_both_backends_pass(benches: Benches, name: str, precision: str, backend: str) -> None:
    bench = benches(name, precision)
    found, recorded = bench.judged(backend), bench.recorded
    distinct = len({row[0] for row in recorded.highest})
    print(
        f"{name} in {precision} on {backend}: {found.error:.2f} u of {found.allowed:.1f} u, "
        f"noise {recorded.noise:.1e}, {distinct} distinct tokens, {len(recorded.written)} written"
    )
    assert not found.failures and 0 < found.error < found.allowed and distinct >= DISTINCT
    assert bool(recorded.written) == (precision == "fp32") and not recorded.figure.failures


# Faults


def delta_forgotten(patch: Patch) -> None:
    """The position of the next token is the number of tokens before it, as without the picture."""
    patch.built(patch.backend.network("decoder").Row, lambda row: setattr(row, "position", writing.LENGTH))


def mask_offset(patch: Patch) -> None:
    """The tokens of the second part see as many keys as if they were the first ones."""

    def changed(made: Callable[..., Any], q: Any, row: Any, form: Any) -> Any:
        kept = row.length - q.shape[1]
        if q.shape[1] == 1 or not kept:
            return made(q, row, form)
        keys, values = (one[:, :, : q.shape[1]].swapaxes(1, 2) for one in (row.keys, row.values))
        return patch.backend.ops.causal_attention(q, keys, values, form)

    patch.around(patch.backend.ops, "kept_attention", changed)


def other_table(patch: Patch) -> None:
    """The head is not the table of the embedding, but that with each row one later."""
    roll = patch.backend.lib.roll
    patch.around(patch.backend.ops.Embedding, "scores", lambda made, layer, x: roll(made(layer, x), 1, -1))


def cap_dropped(patch: Patch) -> None:
    patch.built(patch.backend.network("decoder").Decoder, lambda model: setattr(model, "cap", 0.0))


def window_one_longer(patch: Patch) -> None:
    def changed(layer: Any) -> None:
        if layer.form.window:
            layer.form = layer.form._replace(window=layer.form.window + 1)

    patch.built(patch.backend.network("decoder").Attention, changed)


IN_16_BIT = [
    (delta_forgotten, "qwen3"),
    (mask_offset, "llama 2"),
    (other_table, "qwen3"),
    (window_one_longer, "gemma 2"),
]
FAULTS = [
    *((fault, name, precision) for fault, name in IN_16_BIT for precision in ("fp32", "bf16")),
    (cap_dropped, "gemma 2", "fp32"),  # in bfloat16 it is smaller than the roundings of these scores
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("fault", "name", "precision"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.sample(2)
def test_a_planted_fault_is_caught(
    benches: Benches, monkeypatch: pytest.MonkeyPatch, fault: Any, name: str, precision: str, backend: str
) -> None:
    bench = benches(name, precision)
    fault(Patch(monkeypatch, side(backend)))
    found = bench.judged(backend)
    print(
        f"{fault.__name__} in {precision} on {backend}: {found.error:.0f} u of {found.allowed:.1f} u, {found.failures}"
    )
    assert found.failures


# Passports


@pytest.fixture(scope="module")
def passports(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Path]:
    """Of Qwen-Image's text encoder, recorded on each backend."""
    folder = tmp_path_factory.mktemp("passports")
    found = {backend: folder / f"{backend}.safetensors" for backend in BACKENDS}
    for backend, path in found.items():
        record(tiny_folder, path, backend, "--size", "32x32", "--sampled")
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_passport_is_checked_on_the_other_backend(
    passports: dict[str, Path], tiny_folder: Path, backend: str
) -> None:
    path = passports[next(one for one in BACKENDS if one != backend)]
    found = passport_file.read(path)
    assert found.writing is not None and passport_file.encoded(found) == path.read_bytes()
    [event] = json.loads(f"[{check(tiny_folder, path, backend, '--json')}]")
    [row] = [one for one in event["blocks"] if one["name"] == "text_encoder.writing"]
    assert row["ok"] and row["dtype"] == "float32" and 0 < row["results"][0]["error"] < row["results"][0]["allowed"]
    ran = cli("parity", "check", str(path), str(tiny_folder), "--backend", backend, "--blocks")
    assert ran.code == 0 and "not looked at: the text" in ran.out.decode()


WRONG: dict[str, tuple[Callable[[RecordedWriting], RecordedWriting], str]] = {
    "other tokens are read": (lambda one: replace(one, ids="0" * 64), "other tokens than when it was recorded"),
    "another text is written": (
        lambda one: replace(one, written=(*one.written[:5], one.written[5] + 1, *one.written[6:])),
        "number 6 is another one",
    ),
    "another token is the highest": (
        lambda one: replace(one, highest=tuple((row[1], row[0], *row[2:]) for row in one.highest)),
        "tokens with a clear score",
    ),
    "other scores": (lambda one: replace(one, exact=1.01 * one.exact), "error "),
    "a token that is in no table": (
        lambda one: replace(one, highest=tuple((2**52, *row[1:]) for row in one.highest)),
        "tokens with a clear score",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.sample(1)
def test_a_wrong_record_falls_short(passports: dict[str, Path], tiny_folder: Path, tmp_path: Path, name: str) -> None:
    change, words = WRONG[name]
    found = passport_file.read(passports["cpu"])
    assert found.writing is not None
    passport_file.write(tmp_path / "wrong.safetensors", replace(found, writing=change(found.writing)), overwrite=False)
    ran = cli("parity", "check", str(tmp_path / "wrong.safetensors"), str(tiny_folder), "--backend", "mlx")
    assert ran.code == 6 and "text_encoder.writing is the first of 1 block" in ran.err and words in ran.err


def test_damaged_records_are_refused_in_one_line(passports: dict[str, Path], tmp_path: Path) -> None:
    found = passport_file.read(passports["cpu"])
    made = found.writing
    assert made is not None
    finite = made.exact.copy()
    finite[3, 3] = np.inf
    wrong: list[dict[str, Any]] = [
        {"exact": made.exact[1:]}, {"exact": finite}, {"values": made.values[:, 1:]}, {"values": made.values[1:]},
        {"highest": ()}, {"highest": (made.highest[0][:1], *made.highest[1:])}, {"written": (1,) * 513},
        {"written": (-1,)}, {"gain": 0.5}, {"gain": 1e9}, {"noise": -1.0}, {"component": 5}, {"figure": None},
    ]  # fmt: skip
    for changes in wrong:
        broken = object.__new__(RecordedWriting)
        for field in fields(RecordedWriting):
            object.__setattr__(broken, field.name, changes.get(field.name, getattr(made, field.name)))
        path = tmp_path / "wrong.safetensors"
        passport_file.write(path, replace(found, writing=broken), overwrite=True)
        refused(passport_file.read, path)


@pytest.mark.sample(0)
def test_a_text_encoder_without_a_head_has_no_such_block(folders: dict[str, Path], tmp_path: Path) -> None:
    record(folders["sd15"], tmp_path / "sd.safetensors", "cpu", "--sampled")
    assert passport_file.read(tmp_path / "sd.safetensors").writing is None
