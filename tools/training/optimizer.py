"""The optimizer: Muon for the matrices inside transformer blocks, AdamW for all other parameters.

Muon (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) takes the momentum of a matrix
and makes all its singular values about 1 before it is added, so that rare directions learn as fast as common ones. On
this model it needs about half as many images as AdamW alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from qwenimg.common.training.optimizer import EPS, Arrays

BETAS = (0.9, 0.99)
DECAY = 0.01  # for weights with two axes or more
AVERAGE = 0.999  # decay of the average once it is warm
MOMENTUM = 0.95
MUON_RATE = 40.0  # times AdamW's: an orthogonal step is that much longer than it looks
STEPS = 5  # Newton-Schulz iterations
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # for x, x x' x and x x' x x' x: singular values end in 0.7 to 1.2


class Optimizer:
    """The optimizer of all `parameters`, which it changes in place, and the average of them over the steps: an
    `Optimizer` of `common/training/optimizer.py`. Those named in `matrices`, with two axes each, are Muon's; those
    without a gradient stay."""

    def __init__(self, parameters: Arrays, matrices: Collection[str]):
        self.matrices = frozenset(matrices)
        self.state: Arrays = {f"average.{name}": p.detach().clone() for name, p in parameters.items()}
        for name, p in parameters.items():
            kinds = ("momentum",) if name in self.matrices else ("exp_avg", "exp_avg_sq")
            self.state |= {f"{kind}.{name}": torch.zeros_like(p, requires_grad=False) for kind in kinds}

    @property
    def average(self) -> Arrays:
        """The exponential average of the parameters."""
        return {name.removeprefix("average."): one for name, one in self.state.items() if name.startswith("average.")}

    @torch.no_grad()
    def step(self, parameters: Arrays, gradients: Arrays, rate: float, number: int) -> Arrays:
        """Apply the gradients; AdamW's rate is `rate`."""
        plain = [name for name in parameters if name in gradients and name not in self.matrices]
        decayed = [name for name in plain if parameters[name].ndim >= 2 and "embed_tokens" not in name]
        rest = [name for name in plain if name not in decayed]
        for names, decay in ((decayed, DECAY), (rest, 0.0)):
            self._adam(names, parameters, gradients, rate, decay, number)
        alike: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in parameters:
            if name in gradients and name in self.matrices:
                alike[tuple(parameters[name].shape)].append(name)
        for shape, names in alike.items():
            self._muon(shape, names, parameters, gradients, MUON_RATE * rate)
        share = 1 - min(AVERAGE, number / (number + 9))
        torch._foreach_lerp_(list(self.average.values()), list(parameters.values()), share)
        return parameters

    def _adam(
        self, names: Sequence[str], parameters: Arrays, gradients: Arrays, rate: float, decay: float, number: int
    ) -> None:
        weights = [parameters[name] for name in names]
        adamw(
            weights,
            [gradients[name] for name in names],
            [self.state[f"exp_avg.{name}"] for name in names],
            [self.state[f"exp_avg_sq.{name}"] for name in names],
            [],
            [torch.full((), number - 1.0, device=p.device) for p in weights],
            fused=True,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=rate,
            weight_decay=decay,
            eps=EPS,
            maximize=False,
        )

    def _muon(
        self, shape: tuple[int, ...], names: Sequence[str], parameters: Arrays, gradients: Arrays, rate: float
    ) -> None:
        """Update all matrices of one shape at once: many small products mostly cost the time to start them."""
        weights: list[Tensor] = [parameters[name] for name in names]
        found = [gradients[name] for name in names]
        momentum = [self.state[f"momentum.{name}"] for name in names]
        torch._foreach_lerp_(momentum, found, 1 - MOMENTUM)
        ahead = torch.stack(found).lerp_(torch.stack(momentum), MOMENTUM)  # Nesterov's form
        update = orthogonal(ahead).mul_(max(1.0, shape[0] / shape[1]) ** 0.5)
        torch._foreach_mul_(weights, 1 - rate * DECAY)
        torch._foreach_add_(weights, list(update), alpha=-rate)


def orthogonal(x: Tensor) -> Tensor:
    """Move the singular values of matrices [N, rows, columns] near 1, by Newton and Schulz's iteration."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.mT if tall else x
