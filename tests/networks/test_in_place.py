"""Results that nobody reads again are written over, and large convolutions are taken in parts: the same bits, with less
new memory. An observer, who may keep what it sees, gets everything apart; its run is the other side here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paper.torch_kernels import CALLS
from support.paper_cases import NETWORKS
from support.parity_cases import TEXT
from support.policies import BF16, BF16_PLAIN, FP32
from torch.utils._python_dispatch import TorchDispatchMode

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.ops import layers
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.network import import_network
from qwenimg.common.precision.precision import Precision
from qwenimg.common.runtime.observers import observe
from qwenimg.common.weights.plan import LoadPlan

CPU = torch.device("cpu")
CLIP = CLIPConfig(
    vocab_size=131, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, projection_dim=48
)
# Besides those of `NETWORKS`, which are given random latents: text encoders, given tokens.
TEXTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "decoder": (TEXT, lambda component: component.encode([5, 3, 100, 7, 1])),
    "clip": (CLIP, lambda component: component.encode([[2, *range(3, 78), 130]], 1, True)[0]),
}
WRITTEN = {"unet": {"silu_", "add_", "mul_"}, "kl_vae": {"silu_", "add_"}, "qwen_vae": {"silu_", "add_"}} | {
    "decoder": {"silu_", "mul_", "add_"}, "clip": {"add_"},
}  # fmt: skip


class Called(TorchDispatchMode):
    """Counts operations by name; what ends in `_` writes over its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def filled(network: str, config: Any, precision: Precision) -> Any:
    """A component with random weights, those of norms around 1."""
    module = import_network("qwenimg.backends.torch.networks", network)
    role = "text" if network in TEXTS else "vae" if "vae" in network else "transformer"
    component = module.Runner(
        config, LoadPlan(component=role, entries={}, files=(), precision=precision), precision, CPU
    )
    torch.manual_seed(0)
    for name, parameter in list(component.model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        value = torch.randn(parameter.shape)
        value = 1 + 0.3 * value if value.ndim == 1 else value / max(1, value[0].numel()) ** 0.5
        layer = component.model.get_submodule(path)
        dtype = torch.float32 if role == "vae" else ops.DTYPES[precision.compute_dtype(role)]
        setattr(layer, leaf, torch.nn.Parameter(value.to(dtype), requires_grad=False))
    return component


def call_of(network: str, precision: Precision) -> Callable[[], Any]:
    """One call, on the same numbers each time."""
    if network in TEXTS:
        config, run = TEXTS[network]
        component = filled(network, config, precision)
        return lambda: run(component)
    config, case = NETWORKS[network]
    component = filled(network, config, precision)
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:  # of which the latents are made there: numbers instead

        def numbers(*shape: Any, **options: Any) -> torch.Tensor:
            made = empty(*shape, **options)
            return made.normal_() if made.is_floating_point() else made

        patch.setattr(torch, "empty", numbers)
        return CALLS[network](component, config, case)


@pytest.mark.parametrize("policy", [FP32, BF16, BF16_PLAIN], ids=lambda policy: policy.name)
@pytest.mark.parametrize("network", WRITTEN)
@pytest.mark.sample(5)
def test_writing_over_gives_the_same_bits(network: str, policy: Precision) -> None:
    call = call_of(network, policy)
    with torch.inference_mode():
        with observe(lambda *_: None):
            apart = call()
        with Called() as called:
            made = call()
        again = call()
    written = {name for name in called.names if name in ("silu_", "add_", "mul_")}
    print(network, policy.name, {name: called.names[name] for name in written}, float(made.float().std()))
    assert float(made.float().std()) > 1e-3 and torch.isfinite(made).all()
    assert torch.equal(made, apart) and torch.equal(again, apart), "and nothing that is read again was written over"
    assert written == WRITTEN[network] if policy is FP32 else written <= WRITTEN[network]


def test_who_needs_results_gets_them_apart() -> None:
    """Gradients and observers, and a sum of another dtype or order in memory."""
    x, update = torch.randn(2, 6, 4, 4), torch.randn(2, 6, 4, 4)
    kept = update.clone()
    with torch.enable_grad():
        ops.residual(x, update)
    with torch.no_grad():
        with observe(lambda *_: None):
            ops.residual(x, update)
        ops.residual(x.double(), update)
        ops.residual(x.contiguous(memory_format=torch.channels_last), update)
        ops.residual(x.repeat(2, 1, 1, 1), update[:1])
    assert torch.equal(update, kept)
    with torch.no_grad():
        made = ops.residual(x, update)
    assert made is update and torch.equal(made, x + kept)


# Convolutions


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize(
    ("dtype", "multiplies"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
)
def test_a_convolution_in_parts(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, multiplies: bool, stride: int, padding: int, bias: bool
) -> None:
    """Of 200 output channels 64 at a time: as near to float64 as a roundoff of the dtype allows. Where a CPU does not
    multiply bfloat16 its convolution is a float32 one."""
    torch.manual_seed(2)
    layer = layers.Conv2d(24, 200, 3, stride=stride, padding=padding, bias=bias).to(dtype)
    x = torch.randn(2, 24, 7, 6).to(dtype)
    computed = dtype if multiplies else torch.float32
    size = layer.weight.numel() * computed.itemsize
    monkeypatch.setattr(layers, "multiplies", lambda dtype, device: dtype is torch.float32 or multiplies)
    monkeypatch.setattr(layers, "LAID_OUT", {computed: size // 4 + 1})
    sizes = list[int]()
    plain = torch.nn.functional.conv2d

    def convolve(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        sizes.append(weight.shape[0])
        return plain(x, weight, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "conv2d", convolve)
    with torch.no_grad():
        made = layer(x)
    columns = torch.nn.functional.unfold(x.double(), 3, padding=padding, stride=stride)
    exact = (layer.weight.detach().double().flatten(1) @ columns).reshape(made.shape)
    exact = exact if layer.bias is None else exact + layer.bias.detach().double()[:, None, None]
    error = float((made.double() - exact).abs().max() / exact.abs().max())
    print(sizes, f"{error:.1e}")
    assert sizes == [64, 64, 64, 8] and made.dtype == dtype
    # The sum is of 216 products; float32 rounds each, bfloat16 the result once.
    assert error < {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]


@pytest.mark.parametrize(("outputs", "inputs", "side", "at_once"), [
    (1280, 1280, 8, 320), (1280, 2560, 16, 160), (640, 1280, 32, 320), (640, 640, 32, 640), (320, 640, 64, 320),
    (1280, 2560, 64, 160), (1280, 1280, 32, 320), (1280, 1280, 80, 1280),
])  # fmt: skip
def test_what_is_laid_out_at_once(outputs: int, inputs: int, side: int, at_once: int) -> None:
    """In Stable Diffusion: at most 16 MiB of a float32 weight, where the image is smaller than the weight."""
    with torch.device("meta"):
        layer = layers.Conv2d(inputs, outputs, 3, padding=1)
    x = torch.empty(1).expand(2, inputs, side, side)
    with torch.no_grad():
        found = layer._at_once(x, torch.float32)
        assert layer._at_once(x.to("meta"), torch.float32) == outputs, "a card does it by itself"
        assert layer._at_once(x, torch.float64) == outputs, "which that library does not convolve"
    assert found == at_once and layer._at_once(x, torch.float32) == outputs, "with gradients as a whole"
    assert found == outputs or found * inputs * 9 * 4 <= layers.LAID_OUT[torch.float32]
