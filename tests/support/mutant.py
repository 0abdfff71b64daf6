"""Planted faults: each wrong in one backend's own code, or in what both share, and what of a passport notices it."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

import qwenimg
from qwenimg import backends
from qwenimg.common.networks.network import import_network
from qwenimg.common.parity import check, record
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.parity.sample import called
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result
from qwenimg.common.request.lora_text import Lora
from support.relative import relative

PRECISIONS = ("fp32", "bf16", "fp16")
ASKED = {"prompt": "a large blue star", "width": 48, "height": 64, "steps": 2, "seed": 0, "guidance": 3.0}
LATENTS = 1e-5  # relative L2 of the final latents (measured without a fault: at most 2.2e-6), and
PIXELS = 2  # of 255: by which a picture in float32 may differ from diffusers'


class Backend:
    """One backend's modules, by what they are called in both."""

    def __init__(self, name: str):
        self.name, package = name, "mlx" if name == "mlx" else "torch"
        self.torch = package == "torch"
        self.calls = "forward" if self.torch else "__call__"
        self.lib: Any = importlib.import_module("torch" if self.torch else "mlx.core")
        self.ops, self.attending, self.products, self.load, self.images, self.quantized = (
            importlib.import_module(f"qwenimg.backends.{package}.{module}")
            for module in ("ops", "ops.attention", "ops.products", "load", "ops.images", "ops.quantized")
        )
        self.package = package

    def network(self, name: str) -> Any:
        return import_network(f"qwenimg.backends.{self.package}.networks", name)

    def axes(self) -> tuple[int, int, int]:
        """Channels, rows and columns of an image."""
        return (1, 2, 3) if self.torch else (3, 1, 2)

    def join(self, parts: list[Any], axis: int) -> Any:
        return self.lib.cat(parts, axis) if self.torch else self.lib.concatenate(parts, axis)

    def halves(self, x: Any, axis: int = -1) -> list[Any]:
        """The two halves of an axis, exchanged."""
        a, b = x.chunk(2, axis) if self.torch else self.lib.split(x, 2, axis)
        return [b, a]

    def cast(self, x: Any, dtype: str) -> Any:
        kind = getattr(self.lib, dtype)
        return x.to(kind) if self.torch else x.astype(kind)

    def like(self, x: Any, y: Any) -> Any:
        """x in y's dtype."""
        return x.to(y.dtype) if self.torch else x.astype(y.dtype)

    def array(self, values: Any) -> Any:
        """A numpy array as the backend's."""
        return self.lib.from_numpy(values) if self.torch else self.lib.array(values)

    def parameter(self, x: Any) -> Any:
        """x as a layer keeps a weight."""
        return self.lib.nn.Parameter(x, requires_grad=False) if self.torch else x

    def rounded(self, x: Any, dtype: str = "bfloat16") -> Any:
        """Through that dtype and back."""
        before = x.dtype
        made = self.cast(x, dtype)
        return made.to(before) if self.torch else made.astype(before)


class Patch:
    """A place to plant a fault, taken back at the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: Backend):
        self.monkeypatch, self.backend = monkeypatch, backend

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.monkeypatch.setattr(owner, name, value)

    def around(self, owner: Any, name: str, change: Callable[..., Any]) -> None:
        """Makes `owner.name` change(the original, its arguments)."""
        original = getattr(owner, name)
        self.set(owner, name, lambda *arguments, **options: change(original, *arguments, **options))

    def built(self, owner: Any, change: Callable[[Any], None]) -> None:
        """Makes every new object of that class go through change(object)."""

        def changed(init: Callable[..., None], made: Any, *arguments: Any, **options: Any) -> None:
            init(made, *arguments, **options)
            change(made)

        self.around(owner, "__init__", changed)

    def exchanged(self, owner: Any, name: str, one: str, other: str) -> None:
        """Makes `owner.name` run with two attributes of its object exchanged."""

        def exchange(layer: Any) -> None:
            first, second = getattr(layer, one), getattr(layer, other)
            setattr(layer, one, second)
            setattr(layer, other, first)

        def changed(call: Callable[..., Any], layer: Any, *arguments: Any) -> Any:
            exchange(layer)
            try:
                return call(layer, *arguments)
            finally:
                exchange(layer)

        self.around(owner, name, changed)

    def attention(self, change: Callable[..., Any]) -> None:
        """Makes every attention over heads change(the original, its arguments)."""
        for owner in (self.backend.ops, self.backend.attending):  # the networks' own calls, and those of a layer
            self.around(owner, "attention", change)

    def layer(self, kind: str, change: Callable[[Any, Any, Any], Any], owner: Any = None) -> None:
        """Makes every layer of that class return change(layer, x, its own result)."""
        cls, calls = getattr(owner or self.backend.ops, kind), self.backend.calls
        original = getattr(cls, calls)
        self.set(cls, calls, lambda layer, x, *more: change(layer, x, original(layer, x, *more)))

    def entering(self, kind: str, change: Callable[[Any, Any], Any]) -> None:
        """Makes every layer of that class compute its result of change(layer, x)."""
        calls = self.backend.calls
        self.around(
            getattr(self.backend.ops, kind), calls, lambda call, layer, x, *more: call(layer, change(layer, x), *more)
        )

    def loaded(self, change: Callable[[Any, Any], Any]) -> None:
        """Makes every tensor that is read change(entry, tensor)."""
        self.around(self.backend.load, "tensor", lambda read, entry, *more: change(entry, read(entry, *more)))


class Probe(Patch):
    """Changes nothing: notes in `reached` the faults to whose place a run comes, and there has something to change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: Backend):
        super().__init__(monkeypatch, backend)
        self.fault, self.places, self.reached = "", 0, set[str]()

    def plant(self, mutant: Mutant) -> None:
        self.fault, self.places = mutant.name, 0
        mutant.plant(self)
        assert self.places, f"{self.fault} changes nothing"

    def _place(self, owner: Any, name: str, made: Callable[..., tuple[Any, bool]]) -> None:
        """Puts in that place what `made` returns, and notes the fault where it says so."""
        fault = self.fault

        def noted(*arguments: Any, **options: Any) -> Any:
            result, reached = made(*arguments, **options)
            self.reached |= {fault} if reached else set()
            return result

        self.places += 1
        self.monkeypatch.setattr(owner, name, noted)

    def set(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        assert value is not original, f"{self.fault}: {name} is that already"
        if callable(original):
            self._place(owner, name, lambda *arguments, **options: (original(*arguments, **options), True))
        else:  # a constant: nothing calls it
            self.places += 1
            self.reached.add(self.fault)

    def layer(self, kind: str, change: Callable[[Any, Any, Any], Any], owner: Any = None) -> None:
        cls, calls = getattr(owner or self.backend.ops, kind), self.backend.calls
        original = getattr(cls, calls)

        def changed(layer: Any, x: Any, *more: Any) -> tuple[Any, bool]:
            y = original(layer, x, *more)
            return y, change(layer, x, y) is not y

        self._place(cls, calls, changed)

    def entering(self, kind: str, change: Callable[[Any, Any], Any]) -> None:
        cls, calls = getattr(self.backend.ops, kind), self.backend.calls
        original = getattr(cls, calls)
        self._place(cls, calls, lambda layer, x, *more: (original(layer, x, *more), change(layer, x) is not x))

    def loaded(self, change: Callable[[Any, Any], Any]) -> None:
        original = self.backend.load.tensor

        def changed(entry: Any, *more: Any) -> tuple[Any, bool]:
            tensor = original(entry, *more)
            return tensor, change(entry, tensor) is not tensor

        self._place(self.backend.load, "tensor", changed)


Plant = Callable[[Patch], None]


@dataclass(frozen=True)
class Mutant:
    """A fault, and what it is looked for in: the precision of the passport, and whether its picture is drawn."""

    plant: Plant
    what: str
    precision: str = "fp32"
    quantize: str = ""
    picture: bool = False
    lora: bool = False  # whether the picture has one
    refused: tuple[str, ...] = ()  # precisions in which its family draws nothing, or in which it is not looked for
    scene: str = ""  # of its table, where that has several: a picture in float32 beside diffusers'

    @property
    def name(self) -> str:
        return self.plant.__name__

    @property
    def precisions(self) -> tuple[str, ...]:
        """In which it is looked for: all of its family, but for one that only 16 bit can have."""
        if self.scene:
            return (self.precision,)
        every = tuple(name for name in PRECISIONS if name not in self.refused)
        return every if self.precision == "fp32" else (self.precision,)

    def under(self, precision: str) -> Mutant:
        return replace(self, precision=precision)


Theirs = Callable[[], tuple[Any, Any]] | None


class Judged(Protocol):
    """Something that faults are held against."""

    def caught(self, backend: str, mutant: Mutant, *, planted: bool = True) -> list[str]:
        """By what: what of a block or of the picture failed, each with its place; nothing where nothing notices."""
        ...

    def draw(self, backend: str, precision: str, quantize: str) -> None:
        """Draws what faults are looked for in, and holds it against nothing."""
        ...


Setting = Callable[[pytest.MonkeyPatch], None]
"""Makes what is the same with a fault and without: how many pixels of a picture a model sees."""


def as_it_is(patch: pytest.MonkeyPatch) -> None:
    """Set nothing."""


class Judge:
    """Holds a model with a fault against passports of it without: recorded once each, on torch."""

    def __init__(
        self,
        folder: Path | str,
        prepare: Callable[[Pipeline], None] = lambda pipe: None,
        lora: Path | None = None,
        setting: Setting = as_it_is,
        **asked: Any,
    ):
        self.folder, self.prepare, self.lora, self.setting = str(folder), prepare, lora, setting
        self.asked = ASKED | asked
        self._passports: dict[tuple[str, str, bool], Passport] = {}

    def pipe(self, backend: str, mutant: Mutant) -> Pipeline:
        return self._opened(backend, mutant.precision, mutant.quantize)

    def passport(self, mutant: Mutant) -> Passport:
        key = (mutant.precision, mutant.quantize, mutant.lora)
        if key not in self._passports:
            asked = self.asked | {"lora": self._loras(mutant)}
            with pytest.MonkeyPatch.context() as patch:
                self.setting(patch)
                pipe = self.pipe("cpu", mutant)
                made = record.record(pipe, asked, exact=pipe.engine, notify=lambda text: None)
            self._passports[key] = _soon(made)
        return self._passports[key]

    def _loras(self, mutant: Mutant) -> tuple[Lora, ...]:
        return (Lora(str(self.lora)),) if mutant.lora else ()

    def shares(self, backend: str, variant: Mutant) -> tuple[float, float]:
        """Of a machine with other kernels, the largest errors of what is allowed: of blocks and of stations."""
        passport = self.passport(variant)
        with pytest.MonkeyPatch.context() as monkeypatch:
            self.setting(monkeypatch)
            variant.plant(Patch(monkeypatch, side(backend)))
            pipe = self.pipe(backend, variant)
            try:
                judged = list(check.blocks(passport, pipe, self._loras(variant)))
                drawn = check.picture(passport, pipe, self._loras(variant))
            finally:
                pipe.close()
        failures = [f"{one.name}: {why}" for one in judged for why in one.failures] + list(drawn.failures)
        assert failures == [], (backend, variant.name, variant.precision, failures)
        stations = max(
            one.output_error / one.allowed for one in drawn.stations if one.output_error is not None and one.allowed
        )
        return max(figure.error / figure.allowed for one in judged for figure in one.figures), stations

    def caught(self, backend: str, mutant: Mutant, *, planted: bool = True) -> list[str]:
        passport = self.passport(mutant)
        with pytest.MonkeyPatch.context() as monkeypatch:
            self.setting(monkeypatch)
            if planted:
                mutant.plant(Patch(monkeypatch, side(backend)))
            try:
                return self._caught(backend, mutant, passport)
            except (qwenimg.QwenimgError, ArithmeticError) as error:
                return [f"an error: {error}"]

    def _caught(self, backend: str, mutant: Mutant, passport: Passport) -> list[str]:
        pipe = self.pipe(backend, mutant)
        try:
            if mutant.picture:
                drawn = check.picture(passport, pipe, self._loras(mutant))
                return list(drawn.failures)
            for judged in check.blocks(passport, pipe, self._loras(mutant)):
                if judged.failures:
                    return [f"{judged.name}: {failure}" for failure in judged.failures]
            return []
        finally:
            pipe.close()

    def draw(self, backend: str, precision: str, quantize: str) -> None:
        """Draws a picture that starts from one, or sees some, with a LoRA under codes."""
        lora = str(self.lora) if self.lora and quantize else ""
        first = {"image": np.full((24, 40, 3), 90, np.uint8), "strength": 1.0}
        more = {} if "pictures" in self.asked else first
        asked = called(self.asked | {"width": 40, "height": 24, "steps": 1}) | more
        with pytest.MonkeyPatch.context() as patch:
            self.setting(patch)
            with closing(self._opened(backend, precision, quantize)) as pipe:
                pipe(**asked, lora=lora)

    def _opened(self, backend: str, precision: str, quantize: str) -> Pipeline:
        pipe = qwenimg.load(self.folder, backend, precision, quantize=quantize or None)
        self.prepare(pipe)
        return pipe


def _soon(passport: Passport) -> Passport:
    """The passport with one block of each kind before all others, and whole components last: a fault is in most blocks
    of a kind, and judging ends at the first that notices it."""
    seen, places = Counter[tuple[str, ...]](), []
    for block in passport.blocks:
        kind = (block.component, block.block, str(block.name.endswith(" small")))
        places.append((not block.path, seen[kind]))
        seen[kind] += 1
    order = sorted(range(len(places)), key=places.__getitem__)
    sides = tuple(replace(one, figures=tuple(one.figures[i] for i in order)) for one in passport.sides)
    return replace(passport, blocks=tuple(passport.blocks[i] for i in order), sides=sides)


class PictureJudge:
    """Holds the picture of a model with a fault, in float32, against the one of another program: made once."""

    def __init__(
        self,
        folder: Path | str,
        asked: Mapping[str, Any],
        theirs: Theirs,
        setting: Setting = as_it_is,
        seen: Callable[[Result], Any] = lambda made: made.pixels,
        most: float = LATENTS,
        **parts: Path,
    ):
        """asked: for our pipeline. theirs: makes the other program's final latents and pixels; None: ours on torch
        without a fault, where no other program has the model. seen: the pixels of a result that are compared. most:
        the relative L2 by which its latents may differ. parts: files in place of the folder's."""
        self.folder, self.asked, self._made_by, self.setting = str(folder), dict(asked), theirs, setting
        self.parts, self.seen, self.most = parts, seen, most

    @cached_property
    def theirs(self) -> tuple[Any, Any]:
        if self._made_by is None:
            return self._drawn("cpu")
        with pytest.MonkeyPatch.context() as patch:
            self.setting(patch)
            return self._made_by()

    def _drawn(self, backend: str, planted: Callable[[pytest.MonkeyPatch], None] = as_it_is) -> tuple[Any, Any]:
        with pytest.MonkeyPatch.context() as patch:
            self.setting(patch)
            planted(patch)
            with closing(qwenimg.load(self.folder, backend, "fp32", **self.parts)) as pipe:
                made = pipe(**self.asked)
        return made.latents, self.seen(made)

    def caught(self, backend: str, mutant: Mutant, *, planted: bool = True) -> list[str]:
        latents, pixels = self.theirs

        def plant(patch: pytest.MonkeyPatch) -> None:
            mutant.plant(Patch(patch, side(backend)))

        try:
            ours = self._drawn(backend, plant if planted else as_it_is)
        except (qwenimg.QwenimgError, ArithmeticError) as error:
            return [f"an error: {error}"]
        if [one.shape for one in ours] != [one.shape for one in (latents, pixels)]:
            return ["it has another size"]
        error, worst = relative(ours[0], latents), np.abs(ours[1] - pixels.astype(float)).max()
        failures = [f"latents: differ by {error:.1e}, at most {self.most}"] if not error <= self.most else []
        return failures + ([f"pixels: differ by {worst:.0f}, at most {PIXELS}"] if worst > PIXELS else [])

    def draw(self, backend: str, precision: str, quantize: str) -> None:
        if not quantize:
            self._drawn(backend)


class Scenes:
    """The judges of a table with faults in several models or pictures, by the scenes of its faults."""

    def __init__(self, judges: Mapping[str, Judged]):
        self.judges = judges

    def caught(self, backend: str, mutant: Mutant, *, planted: bool = True) -> list[str]:
        return self.judges[mutant.scene].caught(backend, mutant, planted=planted)

    def draw(self, backend: str, precision: str, quantize: str) -> None:
        for judge in self.judges.values():
            judge.draw(backend, precision, quantize)


@cache
def side(name: str) -> Backend:
    backends.load(name)
    return Backend(name)
