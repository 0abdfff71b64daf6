"""The check of a run's shortcuts (`--check`): at its first step each is compared with its plain form, and at the first
call that a step cache skips, the whole call.

Compiled blocks are called uncompiled too, on the same arguments; products of quantized weights are made in float64 from
decoded weights; a prediction by what a prompt keeps between the steps is made again by what is prepared anew. Errors
are relative, and limits those by which passports judge (`parity.judge`), without the gain of a block's inputs, which
needs float64. The picture stays the same, bit for bit, unless a block is found faulty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.block import Block
from qwenimg.common.numbers.rounding import nearest
from qwenimg.common.parity import constants, parity
from qwenimg.common.parity.blocks import ComponentPolicy
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.shortcuts import CompiledCall, ProductCall
from qwenimg.common.runtime.traced import Tree, Values, leaves

COMPILED, KEPT, PRODUCTS, CACHE = "compiled blocks", "kept keys", "quantized products", "step cache"
_WHOLE = Block(name="model", paths=re.compile(""))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of a shortcut from its plain form, in units of what is allowed."""

    shortcut: str
    where: str  # the module, or the call
    error: float  # relative
    allowed: float | None  # None: nothing says how much it may be
    faults: int = 0  # calls that differ by more

    @property
    def ratio(self) -> float:
        """The difference in units of what is allowed; infinite if it is no number."""
        return self.error / (self.allowed or 1.0) if math.isfinite(self.error) else math.inf

    def line(self) -> str:
        """Return the difference as text."""
        if not self.error:
            return f"check: {self.shortcut}: no difference"
        at = f" in {self.where}" if self.where else ""
        limit = "" if self.allowed is None else f", at most {self.allowed:.1e} is allowed"
        return f"check: {self.shortcut}: largest difference {self.error:.1e}{at}{limit}"

    def advice(self) -> str:
        """Return what follows from a difference that is more than allowed."""
        if self.shortcut == COMPILED:
            return f"{counted(self.faults, 'block')} will not be called compiled"
        if self.shortcut == CACHE:
            return "deeper blocks change more than the first one; give --step-cache less, or leave it out"
        return "the picture may be wrong; please report it"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error if math.isfinite(self.error) else None}


class Check:
    """The check of the denoisers that a pipeline opens."""

    def __init__(self, runtime: Runtime, networks: frozenset[str]):
        """Set the parts. networks: of denoisers, which are checked when they are opened."""
        self.runtime, self.networks = runtime, networks
        self.differences: dict[str, Difference] = {}
        self._reported: list[Difference] = []

    def opened(self, component: Component, network: Any) -> Any:
        """Have the first predictions of a denoiser compared. An observer of `Runtime`."""
        if component.network in self.networks:
            _Checked(self, component, network)
        return network

    def as_json(self) -> list[dict[str, Any]]:
        return [one.as_json() for one in self.differences.values()]

    def lines(self) -> list[str]:
        return [one.line() for one in self.differences.values()]

    def add(self, found: Difference) -> None:
        """Take a difference, of which the largest of each shortcut is kept."""
        before = self.differences.get(found.shortcut, found)
        largest = max(before, found, key=lambda one: one.ratio)
        faults = found.faults + (0 if before is found else before.faults)
        self.differences[found.shortcut] = replace(largest, faults=faults)

    def report(self, *shortcuts: str) -> None:
        """Print the differences of `shortcuts`, those beyond their limit as warnings; of a second denoiser only those
        that are larger than the first one's."""
        for found in (self.differences[name] for name in shortcuts if name in self.differences):
            if found in self._reported:
                continue
            self._reported.append(found)
            if found.faults:
                self.runtime.notify("warning", f"{found.line()}: {found.advice()}")
            else:
                self.runtime.notify("notice", found.line())


class _Checked:
    """One opened denoiser, whose class is replaced by one whose calls come here first."""

    def __init__(self, check: Check, component: Component, network: Any):
        self.check, self.engine = check, check.runtime.engine
        self.part = ComponentPolicy(component.role, component, check.runtime.precision)
        self._prepared: list[tuple[Any, Callable[[], Any]]] = []  # conditions of the first step, and how to make each
        self._started = self._cache_compared = False
        kind = type(network)

        def condition(network: Any, *arguments: Any, **named: Any) -> Any:
            make = partial(kind.condition, network, *arguments, **named)
            made = make()
            if not self._started:
                self._prepared.append((made, make))
            return made

        def predict(network: Any, x: Array, step: Any, condition: Any, *control: Any) -> Array:
            return self._predict(network, lambda one: kind.predict(network, x, step, one, *control), condition)

        network.__class__ = type(kind.__name__, (kind,), {"condition": condition, "predict": predict})

    def _predict(self, network: Any, predict: Callable[[Any], Array], condition: Any) -> Array:
        skipping = getattr(network, "skipping", None)
        whole: Any = (lambda predicted: predicted()) if skipping is None else skipping.whole
        at = next((i for i, (made, _) in enumerate(self._prepared) if made is condition), None)
        again: Callable[[], Any] = (lambda: condition) if at is None else self._prepared.pop(at)[1]
        if not self._started:
            self._started = True
            self._compare_blocks(network, lambda: whole(lambda: predict(again())))
        result = predict(condition)
        if at is not None:
            self._compare_kept(whole(lambda: predict(condition)), whole(lambda: predict(again())))
        elif skipping is not None and skipping.skipped and not self._cache_compared:
            self._cache_compared = True
            self._compare_cache(skipping.threshold, result, whole(lambda: predict(condition)))
        return result

    # Compiled blocks and quantized products

    def _compare_blocks(self, network: Any, predict: Callable[[], Array]) -> None:
        """Compare in two predictions: blocks, and without compiling the layers in them."""
        compiled = self.part.network.compiled
        assert compiled is not None
        with self.engine.compared_blocks(network, compiled, self._block):
            self.engine.finite(predict())
        with self.engine.compared_products(network, self._product):
            self.engine.finite(predict())
        self.check.report(COMPILED, PRODUCTS)

    def _block(self, call: CompiledCall) -> bool:
        """Compare the results of a block, and return whether it may stay compiled."""
        kinds = self.part.network.traced
        block = next((one for one in kinds if not one.method and one.paths.fullmatch(call.path)), None)
        found = [
            self._judged(COMPILED, call.path, block, result, plain, _stream(call, block, i, plain))
            for i, (result, plain) in enumerate(zip(leaves(call.results), leaves(call.plain), strict=True))
        ]
        worst = max(found, key=lambda one: one.ratio)
        faulty = any(one.faults for one in found)
        self.check.add(replace(worst, faults=int(faulty)))
        return not faulty

    def _product(self, call: ProductCall) -> None:
        values = call.code.values(call.weight.arrays).astype(np.float64)
        x = call.x if call.rounded == "float32" else nearest(call.x, call.rounded)
        exact = x.astype(np.float64) @ values.T + (0.0 if call.bias is None else call.bias)
        sums = math.sqrt(call.x.shape[-1]) * parity.UNIT["float32"]  # errors of sums in float32, which add up at random
        k = parity.LIMIT[call.dtype] + sums / parity.UNIT[call.dtype]
        case = parity.Case(component="product", dtype=call.dtype, returned=call.dtype, k=k)
        verdict = parity.judge(case, exact, parity.Output(values=call.result, dtype=call.dtype))
        self.check.add(_difference(PRODUCTS, call.path, verdict))

    # Predictions

    def _compare_kept(self, kept: Array, plain: Array) -> None:
        result, again = (Values("float32", self.engine.numpy(one)) for one in (kept, plain))
        self.check.add(self._judged(KEPT, "", _WHOLE, result, again, None))
        if not self._prepared:
            self.check.report(KEPT)

    def _compare_cache(self, threshold: float | None, reused: Array, whole: Array) -> None:
        result, exact = (self.engine.numpy(one).astype(np.float64) for one in (reused, whole))
        error = float(np.linalg.norm(result - exact) / np.linalg.norm(exact))
        faults = int(threshold is not None and not error <= threshold)
        where = "the first call that it skips"
        self.check.add(Difference(shortcut=CACHE, where=where, error=error, allowed=threshold, faults=faults))
        self.check.report(CACHE)

    def _judged(
        self,
        shortcut: str,
        path: str,
        block: Block | None,
        result: Values,
        plain: Values,
        stream: NDArray[Any] | None,
    ) -> Difference:
        """Return by how much `result` of a block at `path` differs, by the limit of its kind."""
        kind = f"{self.part.component.network}.{'' if block is None else block.name}"
        dtype = plain.dtype if block is None else self.part.dtype(block, path, [plain.dtype])
        case = parity.Case(
            component=kind,
            dtype=dtype,
            returned=plain.dtype,
            blocks=1 if block is None else self.part.updates(block, path),
            k=constants.limit(kind, dtype),
        )
        output = parity.Output(values=result.array, dtype=result.dtype)
        verdict = parity.judge(case, plain.array.astype(np.float64), output, stream)
        if np.array_equal(result.array, plain.array):  # also where the block adds nothing
            return Difference(shortcut=shortcut, where=path, error=0.0, allowed=verdict.allowed)
        return _difference(shortcut, path, verdict)


def _difference(shortcut: str, where: str, verdict: parity.BlockVerdict) -> Difference:
    error, faults = verdict.figures.relative, int(bool(verdict.failures))
    return Difference(shortcut=shortcut, where=where, error=error, allowed=verdict.allowed, faults=faults)


def _stream(call: CompiledCall, block: Block | None, place: int, result: Values) -> NDArray[Any] | None:
    """Return the argument that a result of the block updates, or None if it has another shape."""
    argument: Tree = call.arguments[place] if block is not None and place < block.streams else None
    if isinstance(argument, Values) and argument.array.shape == result.array.shape:
        return argument.array
    return None


def watch(pipe: Pipeline) -> Check:
    """Have the denoisers that `pipe` opens from now on checked."""
    assert pipe.checkpoint is not None
    refiner = pipe.checkpoint.refiner
    denoisers = [*pipe.checkpoint.denoisers, *(refiner.denoisers if refiner else ())]
    check = Check(pipe.runtime, frozenset(part.network for part in denoisers))
    pipe.runtime.observers.append(check.opened)
    return check


@contextmanager
def checked(pipe: Pipeline) -> Iterator[Check]:
    """Have the denoiser of `pipe` opened again, and checked, within the context."""
    pipe.free_transformer()
    check = watch(pipe)
    try:
        yield check
    finally:
        pipe.runtime.observers.remove(check.opened)
        pipe.free_transformer()
