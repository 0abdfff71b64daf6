"""Optimizers, in arithmetic that the arrays of both frameworks support: a step makes new parameters and state."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan, sqrt
from typing import Any, Protocol, TypeAlias

Array: TypeAlias = Any  # of a backend
Arrays: TypeAlias = dict[str, Array]

BETAS = (0.9, 0.999)
EPS = 1e-8
DECAY = 0.01
CLIP = 1.0  # the longest gradient
BLOCK = 256  # the most values with one scale
MIDDLE, MOST = 127.0, 255.0  # the code of 0 of a mean, and the largest of a square
MARGIN = 0.01  # so that the largest value, rounded up, has a code of 8 bits
GOLDEN = 0.6180339887498949  # its multiples, less the whole part, are even between 0 and 1
LEAST = 1e-30  # added to a divisor that may be 0


def length(gradients: Mapping[str, Array]) -> float:
    """Return the length of all gradients as one vector; not finite if one of them is not."""
    squares: Array = sum((one * one).sum() for one in gradients.values())
    return sqrt(square) if (square := float(squares.item())) >= 0 else nan


class Optimizer(Protocol):
    """The update of parameters by their gradients."""

    state: Arrays
    """All that a checkpoint keeps, by name: arrays of the backend, some of one number [1]."""

    def step(self, parameters: Arrays, gradients: Arrays, rate: float, number: int) -> Arrays:
        """Return the new parameters of step `number`, counted from 1."""
        ...


class AdamW:
    """AdamW (I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019)."""

    bytes = 16.0  # of a parameter: its value, gradient and two moments

    def __init__(self, parameters: Arrays):
        self.state: Arrays = {}
        for name, one in parameters.items():
            self.state[f"exp_avg.{name}"] = one * 0.0
            self.state[f"exp_avg_sq.{name}"] = one * 0.0

    def step(self, parameters: Arrays, gradients: Arrays, rate: float, number: int) -> Arrays:
        updated = Arrays()
        for name, p in parameters.items():
            mean, square = self._moments(name, p)
            mean, square = moved(mean, square, gradients[name])
            self._keep(name, mean, square, number)
            updated[name] = adapted(p, mean, square, rate, number)
        return updated

    def _moments(self, name: str, p: Array) -> tuple[Array, Array]:
        return self.state[f"exp_avg.{name}"], self.state[f"exp_avg_sq.{name}"]

    def _keep(self, name: str, mean: Array, square: Array, number: int) -> None:
        self.state[f"exp_avg.{name}"], self.state[f"exp_avg_sq.{name}"] = mean, square


def moved(mean: Array, square: Array, gradient: Array) -> tuple[Array, Array]:
    """Return the moving averages of gradients and of their squares after one more."""
    first, second = BETAS
    return first * mean + (1 - first) * gradient, second * square + (1 - second) * (gradient * gradient)


def adapted(p: Array, mean: Array, square: Array, rate: float, number: int) -> Array:
    """Return a parameter after step `number` of AdamW."""
    first, second = BETAS
    deviation = (square / (1 - second**number)) ** 0.5 + EPS
    return p * (1 - rate * DECAY) - (rate / (1 - first**number)) * (mean / deviation)


class AdamW8bit(AdamW):
    """AdamW with moments in 8 bits (T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022).

    - A block of at most `BLOCK` values has one scale, its largest; a code is a root of the value's share of it: the
      third root of a mean, the fourth of a square, so that small values keep a precision of some percent.
    - Codes are rounded up or down by a number that changes with each step and is even over many: a moment that
      decays by 0.1 % a step would not move otherwise.
    - Three codes are kept in the 24 bits of a float32, which adds, multiplies and compares alike in all frameworks."""

    bytes = 8.0 + 2 * (4 / 3 + 4 / BLOCK)  # two moments: a third of a float32, and a share of a block's scale

    def __init__(self, parameters: Arrays):
        self.state: Arrays = {}
        for name, one in parameters.items():
            flat = one.reshape(-1)
            size = _length(flat)
            for moment in ("exp_avg", "exp_avg_sq"):
                self.state[f"codes.{moment}.{name}"] = flat[: -(-size // 3)] * 0.0
                self.state[f"largest.{moment}.{name}"] = flat[: size // _block(size)] * 0.0

    def _moments(self, name: str, p: Array) -> tuple[Array, Array]:
        mean = (self._codes("exp_avg", name, p) - MIDDLE) * (1 / (MIDDLE - MARGIN))
        square = self._codes("exp_avg_sq", name, p)
        square = (abs(square - 0.5) + 0.5) * (1 / (MOST - MARGIN))  # 0 counts as 1, since means are divided by it
        mean = mean * mean * mean * self._largest("exp_avg", name)
        square = square * square * square * square * self._largest("exp_avg_sq", name)
        return mean.reshape(p.shape), square.reshape(p.shape)

    def _keep(self, name: str, mean: Array, square: Array, number: int) -> None:
        dither = number * GOLDEN % 1.0
        for moment, value in (("exp_avg", mean), ("exp_avg_sq", square)):
            flat = value.reshape(-1)
            blocks = flat.reshape(-1, _block(_length(flat)))
            most = abs(blocks).max(axis=1)
            most = getattr(most, "values", most)  # torch gives indices too
            self.state[f"largest.{moment}.{name}"] = most
            shares = blocks / (most.reshape(-1, 1) + LEAST)
            if moment == "exp_avg":
                root = abs(shares) ** (1 / 3)
                codes = (MIDDLE - MARGIN) * (shares / (root * root + LEAST)) + MIDDLE
            else:
                codes = (MOST - MARGIN) * shares**0.25
            self.state[f"codes.{moment}.{name}"] = _packed(((codes + dither) // 1.0).reshape(-1))

    def _codes(self, moment: str, name: str, p: Array) -> Array:
        zeros = p.reshape(-1) * 0.0
        return _unpacked(self.state[f"codes.{moment}.{name}"], zeros).reshape(-1, _block(_length(zeros)))

    def _largest(self, moment: str, name: str) -> Array:
        return self.state[f"largest.{moment}.{name}"].reshape(-1, 1)


def _length(flat: Array) -> int:
    return int(flat.shape[0])


def _block(size: int) -> int:
    """Return the length of the blocks of `size` values: the largest divisor up to `BLOCK`."""
    return next(one for one in range(BLOCK, 0, -1) if size % one == 0)


def _packed(codes: Array) -> Array:
    """Return codes of 0 to 255 [n] as whole numbers below 2^24 [n / 3, rounded up]."""
    third = -(-_length(codes) // 3)
    packed = codes[:third] * 1.0
    for place, scale in ((1, 256.0), (2, 65536.0)):
        part = codes[place * third : (place + 1) * third]
        packed[: _length(part)] = packed[: _length(part)] + part * scale
    return packed


def _unpacked(packed: Array, zeros: Array) -> Array:
    """Return codes that were packed, as many as `zeros`, which they replace."""
    third, high = _length(packed), packed // 65536.0
    low = packed - high * 65536.0
    middle = low // 256.0
    for place, part in enumerate((low - middle * 256.0, middle, high)):
        count = _length(zeros[place * third : (place + 1) * third])
        zeros[place * third : place * third + count] = part[:count]
    return zeros


class Prodigy:
    """AdamW with a step size that it finds itself (K. Mishchenko, A. Defazio, "Prodigy: An Expeditiously Adaptive
    Parameter-Free Learner", 2024). The rate is a factor of that size, 1 as published.

    `origin` and `sums` are the parameters at the start and the sum of weighted gradients; `size` is the step's."""

    bytes = 24.0  # of a parameter: its value, gradient and four states
    first_size = 1e-6

    def __init__(self, parameters: Arrays):
        self.state: Arrays = {}
        for name, one in parameters.items():
            self.state[f"exp_avg.{name}"] = one * 0.0
            self.state[f"exp_avg_sq.{name}"] = one * 0.0
            self.state[f"sums.{name}"] = one * 0.0
            self.state[f"origin.{name}"] = one * 1.0
        one = next(iter(parameters.values())).reshape(-1)[:1]
        self.state["size"], self.state["numerator"] = one * 0.0 + self.first_size, one * 0.0

    def step(self, parameters: Arrays, gradients: Arrays, rate: float, number: int) -> Arrays:
        first, second = BETAS
        third, size = sqrt(second), float(self.state["size"].item())
        weight = size / self.first_size * size * rate
        dots = sum((g * (self.state[f"origin.{name}"] - parameters[name])).sum() for name, g in gradients.items())
        numerator = third * float(self.state["numerator"].item()) + weight * float(dots.item())
        absolute: Array = 0.0
        for name, g in gradients.items():
            mean, square = f"exp_avg.{name}", f"exp_avg_sq.{name}"
            self.state[mean] = first * self.state[mean] + (size * (1 - first)) * g
            self.state[square] = second * self.state[square] + (size * size * (1 - second)) * (g * g)
            self.state[f"sums.{name}"] = third * self.state[f"sums.{name}"] + weight * g
            absolute = absolute + abs(self.state[f"sums.{name}"]).sum()
        summed = float(absolute.item())
        found = max(size, numerator / summed) if summed > 0 else size
        updated = {
            name: p * (1 - rate * size * DECAY)
            - (rate * size) * (self.state[f"exp_avg.{name}"] / (self.state[f"exp_avg_sq.{name}"] ** 0.5 + found * EPS))
            for name, p in parameters.items()
        }
        self.state["size"] = self.state["size"] * 0.0 + found
        self.state["numerator"] = self.state["numerator"] * 0.0 + numerator
        return updated


OPTIMIZERS: Mapping[str, type[AdamW] | type[Prodigy]] = {"adamw": AdamW, "adamw8bit": AdamW8bit, "prodigy": Prodigy}
