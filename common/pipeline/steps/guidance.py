"""Guidance as data: the branches of a step, and the formula that combines their predictions.

A family has one `Guidance`. Its fields are the parts that differ: the scale at which guidance is off, the request's
number that is the scale, the formula, and more branches after the unconditional one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf
from typing import Any, TypeAlias

from qwenimg.common.base.errors import UsageError
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Array, Engine

Formula: TypeAlias = Callable[[Engine, Request, Sequence[Array]], Array]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One prediction of a step: the prompt's, the unconditional one, or another."""

    prompt: str
    steps: tuple[float, float] = (0.0, 1.0)  # its first and last step, as shares of all steps
    until: float = 1.0  # the largest share of the noise that is gone at a step that computes it
    options: Mapping[str, Any] = field(default_factory=dict)  # the network's options for this branch alone


def _guidance(request: Request) -> float:
    """Return the scale of a family that has one number."""
    return request.guidance


def _undivided(request: Request) -> Sequence[str]:
    return (request.prompt,)


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """The guidance of a family."""

    formula: Formula  # combines several predictions, in the order of their branches
    name: str = "guidance"  # of the option that is the scale
    off: float = 1.0  # the scale up to which only the prompt's branch is computed; infinite for a model without others
    scale: Callable[[Request], float] = _guidance
    until: Callable[[Request], float] = lambda request: 1.0  # of the unconditional branch
    parts: Callable[[Request], Sequence[str]] = _undivided  # of the prompt, each with a branch of its own
    more: Callable[[Request], tuple[Branch, ...]] = lambda request: ()  # branches after the unconditional one

    def is_on(self, request: Request) -> bool:
        """Return whether the unconditional branch is computed; a sum of parts needs it at any scale."""
        return self.scale(request) > self.off or len(self.parts(request)) > 1

    def resolve(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call with guidance in place of `true_cfg`, a scale of classifier-free guidance
        (unconditional + scale (prompt - unconditional)), in a family with one number. Raises UsageError for two
        numbers that contradict each other."""
        options = dict(asked)
        if self.scale is not _guidance or options.get("true_cfg") is None:
            return options
        wanted = options.pop("true_cfg") + (0.0 if isinf(self.off) else self.off - 1.0)
        if options.get("guidance") not in (None, wanted):
            raise UsageError(
                f"--true-cfg is another word for --guidance {wanted:g} in this model, and --guidance "
                f"{options['guidance']:g} is given too: give one of them"
            )
        return options | {"guidance": wanted}

    def text(self, request: Request) -> str:
        """Return why there is no unconditional branch, in words."""
        if isinf(self.off):
            return "in this model, which is distilled to draw without guidance"
        return f"at {self.name} {self.scale(request):g}"

    def branches(self, request: Request) -> tuple[Branch, ...]:
        """Return the branches of a step: the prompt, the unconditional one, and the prompt's further parts (AND)."""
        prompt, *others = (Branch(prompt=part) for part in self.parts(request))
        if not self.is_on(request):
            return (prompt,)
        steps, until = (0.0, request.cfg_end), self.until(request)
        unconditional = Branch(prompt=request.negative_prompt, steps=steps, until=until)
        return (prompt, unconditional, *others, *self.more(request))

    def combined(self, engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
        """Return the prediction of a step, combined from the branches'; a single branch's is unchanged."""
        return predictions[0] if len(predictions) == 1 else self.formula(engine, request, predictions)


# Formulas


def cfg(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance."""
    conditional, unconditional = predictions
    return unconditional + request.guidance * (conditional - unconditional)


def _true_cfg(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    conditional, unconditional = predictions
    return unconditional + request.true_cfg * (conditional - unconditional)


TRUE_CFG = Guidance(formula=_true_cfg, name="true-cfg", scale=lambda request: request.true_cfg)
"""Of a model whose own guidance is an input: classifier-free guidance between two predictions that both have it."""


def rescaled_cfg(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance, with the deviation moved to the prompt's by a share (S. Lin et al., 2023)."""
    return _rescaled(engine, request, predictions[0], cfg(engine, request, predictions))


def cfg_of_sum(weights: Sequence[float]) -> Formula:
    """Return classifier-free guidance towards the weighted sum of several parts of a prompt (N. Liu et al., 2022):
    unconditional + sum of weight (part - unconditional). A scale below 1 is 1, for the sum itself."""

    def formula(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
        first, unconditional, *others = predictions
        conditional = unconditional
        for weight, part in zip(weights, (first, *others), strict=True):
            conditional = conditional + weight * (part - unconditional)
        guided = unconditional + max(request.guidance, 1.0) * (conditional - unconditional)
        return _rescaled(engine, request, conditional, guided)

    return formula


def _rescaled(engine: Engine, request: Request, conditional: Array, guided: Array) -> Array:
    share = request.family_options.guidance_rescale
    return engine.rescale(guided, conditional, share) if share else guided


def cfg_with_norm(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance in which each token keeps the norm of the prompt's prediction."""
    conditional, unconditional = predictions
    return engine.guide(conditional, unconditional, request.guidance)
