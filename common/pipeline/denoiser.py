"""The model of a run as the samplers see it: branches, guidance and mask, and why a result was not finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.pipeline.inpaint import Blend
from qwenimg.common.pipeline.step_cache import Pass, StepCache
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.runtime import Runtime

CALLS = 4  # that are remembered, to look at when a result is not finite: no step makes more


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How the branches of a step, the prompt's first and the negative one's second, become one prediction."""

    scale: float
    keep_norm: bool = False  # each token's norm stays that of the prompt's branch, as Qwen-Image takes it
    rescale: float = 0.0  # share by which the deviation moves to that of the prompt's branch (S. Lin et al., 2023)

    def __call__(self, engine: Engine, branches: Sequence[Array]) -> Array:
        """One branch is the prediction as it is."""
        if len(branches) == 1:
            return branches[0]
        conditional, unconditional = branches
        if self.keep_norm:
            return engine.guide(conditional, unconditional, self.scale)
        guided = unconditional + self.scale * (conditional - unconditional)
        return engine.rescale(guided, conditional, self.rescale) if self.rescale else guided


class Denoiser:
    """The picture that the model sees in x at a noise level, for one segment of one run."""

    def __init__(
        self,
        runtime: Runtime,
        title: str,
        passes: Sequence[Callable[[Array, float], Array]],
        denoised: Callable[[Array, float, Array], Array],
        guidance: Guidance,
        *,
        branches: int,
        alone: Callable[[Array, float], Array] | None = None,
        guided_above: float = -1.0,
        blend: Blend | None = None,
    ):
        """passes: calls of the model with x and sigma, each giving one branch or a batch of them; together `branches`,
        the prompt's first. alone: the call for the prompt's branch, which is all at a noise level not above
        `guided_above`. denoised: the picture from x, sigma and a prediction."""
        self.runtime, self.title, self.passes, self.denoised = runtime, title, passes, denoised
        self.guidance, self.branches, self.blend = guidance, branches, blend
        self.alone, self.guided_above = None if alone is None else [alone], guided_above
        self.cache: StepCache | None = None  # of the run; every pass is then a `Pass`
        self.calls: deque[tuple[Array, float]] = deque(maxlen=CALLS)

    def __call__(self, x: Array, sigma: float) -> Array:
        """Guidance applied."""
        x = self._shown(x, sigma)
        return self._kept(self.denoised(x, sigma, self.guidance(self.runtime.engine, self._predictions(x, sigma))))

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        """With guidance, and as predicted without the prompt (for CFG++)."""
        x = self._shown(x, sigma)
        branches = self._predictions(x, sigma)
        guided = self._kept(self.denoised(x, sigma, self.guidance(self.runtime.engine, branches)))
        if len(branches) == 1:
            return guided, guided
        return guided, self._kept(self.denoised(x, sigma, branches[-1]))

    def explain(self, step: int) -> NumericsError:
        """Runs the calls of the last step again with probes: component, block and operation of what is not finite."""
        again = (partial(call, x, sigma) for x, sigma in self.calls for call in self._passes(sigma))
        return self.runtime.explain(self.title, step, again)

    def _predictions(self, x: Array, sigma: float) -> list[Array]:
        self.calls.append((x, sigma))
        passes = self._passes(sigma)
        if self.cache is None:
            found = [call(x, sigma) for call in passes]
        else:
            found = self.cache.predictions(cast(Sequence[Pass], passes), x, sigma)
        whole = passes is self.passes and len(found) < self.branches
        return self.runtime.engine.split(found[0]) if whole else found

    def _passes(self, sigma: float) -> Sequence[Callable[[Array, float], Array]]:
        return self.passes if self.alone is None or sigma > self.guided_above else self.alone

    def _shown(self, x: Array, sigma: float) -> Array:
        return x if self.blend is None else self.blend.shown(x, sigma)

    def _kept(self, denoised: Array) -> Array:
        return denoised if self.blend is None else self.blend.kept(denoised)
