"""The optimizer: Muon for the matrices inside transformer blocks, AdamW for all other parameters.

Muon (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) takes the momentum of a matrix
and makes all its singular values about 1 before it is added, so that rare directions learn as fast as common ones. On
this model it needs about half as many images as AdamW alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

BETAS = (0.9, 0.99)
DECAY = 0.01  # for weights with two axes or more
MOMENTUM = 0.95
MUON_RATE = 40.0  # times AdamW's: an orthogonal step is that much longer than it looks
STEPS = 5  # Newton-Schulz iterations
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # for x, x x' x and x x' x x' x: singular values end in 0.7 to 1.2


class Optimizer:
    """The optimizer of all `parameters`; those named in `matrices`, with two axes each, are Muon's."""

    def __init__(self, parameters: Mapping[str, Parameter], matrices: Collection[str]):
        self.parameters = parameters
        self.momentum = {name: torch.zeros_like(parameters[name]) for name in matrices}
        plain = {name: p for name, p in parameters.items() if name not in self.momentum}
        decayed = [p for name, p in plain.items() if p.ndim >= 2 and "embed_tokens" not in name]
        ids = {id(p) for p in decayed}
        rest = [p for p in plain.values() if id(p) not in ids]
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, betas=BETAS, fused=True)
        for p in plain.values():
            self.adam.state[p] = {
                "step": torch.zeros((), device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def state(self) -> dict[str, Tensor]:
        """Return all tensors of its state for a checkpoint; they are those in use."""
        tensors = {f"momentum.{name}": value for name, value in self.momentum.items()}
        for name, p in self.parameters.items():
            if name not in self.momentum:
                tensors |= {f"{key}.{name}": value for key, value in self.adam.state[p].items()}
        return tensors

    def step(self, rate: float) -> None:
        """Apply the parameters' gradients; AdamW's rate is `rate`."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        alike: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in self.momentum:
            if self.parameters[name].grad is not None:
                alike[tuple(self.parameters[name].shape)].append(name)
        with torch.no_grad():
            for shape, names in alike.items():
                self._muon(shape, names, MUON_RATE * rate)

    def _muon(self, shape: tuple[int, ...], names: list[str], rate: float) -> None:
        """Update all matrices of one shape at once: many small products mostly cost the time to start them."""
        weights: list[Tensor] = [self.parameters[name] for name in names]
        gradients = [p.grad for p in weights if p.grad is not None]
        momentum = [self.momentum[name] for name in names]
        torch._foreach_lerp_(momentum, gradients, 1 - MOMENTUM)
        ahead = torch.stack(gradients).lerp_(torch.stack(momentum), MOMENTUM)  # Nesterov's form
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
