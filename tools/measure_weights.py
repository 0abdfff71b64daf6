"""What keeping weights in codes costs: size of the published model, difference of pictures, verdicts of the self-test.

    python tools/measure_weights.py          # writes the table of -q in docs/measured/weights.md again
    python tools/measure_weights.py gguf     # writes that of GGUF's types
    python tools/measure_weights.py mlx      # writes that of what MLX quantizes

The self-test's 40 prompts are drawn by the built-in model in float32 on torch, from the same noise: with its weights as
they are, and by each policy.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path

import k_quants
import numpy as np
from doc_tables import table, write

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.networks.encoders.qwen import QwenVLConfig
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.quant.affine import Affine, encode
from qwenimg.common.quant.bits import widened
from qwenimg.common.quant.rotated import rotated
from qwenimg.common.shapes import builtin, selftest
from qwenimg.common.shapes.gate import selftest_prompts
from qwenimg.common.weights import on_paper, quantize
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import read

POLICIES = ("8", "6", "4")


def sizes(policy: str | None) -> list[str]:
    """GB of the transformer's weights that stay in memory, of all of them, and of the text encoder's."""
    found: list[str] = []
    for network, config in ((qwen_dit.NETWORK, QwenDiTConfig()), (qwen.QWEN2_5_VL, QwenVLConfig())):
        plan = on_paper.plan(network.name, network.uses(config))
        if policy is not None and network.blocks is not None:
            plan = quantize.quantized(plan, quantize.parse(policy)[network.role], network.blocks)
        counts = [plan.when(ALWAYS).nbytes, plan.nbytes] if network.role == "transformer" else [plan.nbytes]
        found += [f"{count / 1e9:.1f}" for count in counts]
    return found


def drawn(
    policy: str | None, transformer: Path | None = None, text_encoder: Path | None = None
) -> tuple[list[np.ndarray], int]:
    pipe = qwenimg.load("shapes", "cpu", "fp32", quantize=policy, transformer=transformer, text_encoder=text_encoder)
    made, right = [], 0
    for event in selftest.draw(pipe, selftest_prompts()):
        if isinstance(event, selftest.Answer):
            made.append(event.pixels.astype(np.float64))
            right += not event.wrong
    pipe.close()
    return made, right


def decibels(pictures: Iterable[np.ndarray], exact: Iterable[np.ndarray]) -> list[float]:
    return [
        10 * np.log10(255**2 / max(float(np.mean((a - b) ** 2)), 1e-6)) for a, b in zip(pictures, exact, strict=True)
    ]


def figures(made: Sequence[np.ndarray], exact: Sequence[np.ndarray], right: int) -> list[str]:
    found = decibels(made, exact)
    return [f"{statistics.median(found):.1f} dB", f"{min(found):.1f} dB", f"{right} of {len(made)}"]


def policies() -> None:
    exact, right = drawn(None)
    rows = [["as they are (bf16)", *sizes(None), "", "", "", f"{right} of {len(exact)}"]]
    for policy in POLICIES:
        made, right = drawn(policy)
        rows.append([f"`-q {policy}`", *sizes(policy), f"{error(policy):.4f}", *figures(made, exact, right)])
        print(rows[-1])
    head = ["weights", "transformer, GB in memory", "GB in all", "text encoder, GB", "error of a layer"]
    write("weights.md", "codes", table([*head, "median PSNR", "worst", "right"], rows))


def error(policy: str) -> float:
    """Of the built-in transformer's weights that are in codes, as MLX decodes them, relative: the root of the mean
    square over layers."""
    import mlx.core as mx

    opened = registry.open_model(builtin.folder())
    plan, blocks = opened.checkpoint["transformer"].plan, qwen_dit.NETWORK.blocks
    assert blocks is not None
    errors = []
    for entry in quantize.quantized(plan, quantize.parse(policy)["transformer"], blocks).entries.values():
        if isinstance(entry.storage, Packed) and isinstance(code := entry.storage.code, Affine):
            values = widened(read(entry))
            coded = encode([values], values.shape, code).arrays
            codes, *rest = (mx.array(part) for part in coded)
            decoded = mx.dequantize(codes, *(part.astype(mx.float32) for part in rest), code.group, code.bits)
            errors.append(relative(np.array(decoded), rotated(values, code.rotation) if code.rotation else values))
    opened.checkpoint.close()
    return float(np.mean(errors)) ** 0.5


def relative(decoded: np.ndarray, values: np.ndarray) -> float:
    """The square of the error of a layer."""
    return float(np.sum((decoded - values) ** 2) / np.sum(values**2))


def in_file(bits: float, group: int) -> str:
    """GB of the published transformer with all matrices of whole groups in so many bits a weight, the rest in 16."""
    entries = on_paper.plan(qwen_dit.NETWORK.name, qwen_dit.uses(qwen_dit.manifest(QwenDiTConfig()))).entries.values()
    coded = sum(prod(e.shape) for e in entries if len(e.shape) == 2 and e.shape[1] % group == 0)
    return f"{(coded * bits + (sum(prod(e.shape) for e in entries) - coded) * 16) / 8e9:.1f}"


def files(
    block: str, kind: str, first: Sequence[str], makers: Mapping[str, Callable[[Path], tuple[float, int, float]]]
) -> None:
    """Writes the table `block`: `first` is the row of the weights as they are, up to what their file takes; each maker
    writes a file of this kind and says bits of a weight, its group, and the relative error of a layer."""
    exact, right = drawn(None)
    rows = [[*first, "", "", "", f"{right} of {len(exact)}"]]
    for name, make in makers.items():
        with tempfile.TemporaryDirectory() as folder:
            bits, group, error = make(path := Path(folder) / f"transformer.{kind}")
            made, right = drawn(None, path)
        rows.append([name, f"{bits:.1f}", in_file(bits, group), f"{error:.4f}", *figures(made, exact, right)])
        print(rows[-1], flush=True)
    heads = ["bits of a weight", "published transformer, GB", "error of a layer", "median PSNR", "worst", "right"]
    write("measured/weights.md", block, table(["type", *heads], rows))


# MLX

AFFINE = [("affine", 64, bits) for bits in (8, 6, 5, 4, 3, 2)]
SCHEMES = [*AFFINE, ("mxfp8", 32, 8), ("mxfp4", 32, 4), ("nvfp4", 16, 4)]  # mode, group, bits


def write_mlx(mode: str, group: int, bits: int, path: Path) -> tuple[float, int, float]:
    """The built-in transformer with its matrices as MLX's own `quantize` writes them; bits of a weight with its share
    of scales, the group, and the relative error, the root of the mean square over layers."""
    import mlx.core as mx

    opened = registry.open_model(builtin.folder())
    tensors, errors, kept = {}, [], 0.0
    for name, entry in opened.checkpoint["transformer"].plan.entries.items():
        values = widened(read(entry))
        tensors[name] = mx.array(values)
        if values.ndim == 2 and values.shape[1] % group == 0:
            parts = mx.quantize(tensors[name], group_size=group, bits=bits, mode=mode)
            decoded = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode).astype(mx.float32)
            errors.append(relative(np.array(decoded), values))
            kept = 8 * sum(part.nbytes // (2 if part.dtype == mx.float32 else 1) for part in parts[1:])
            kept = (8 * parts[0].nbytes + kept) / values.size
            names = (f"{name.removesuffix('.weight')}.{part}" for part in ("scales", "biases"))
            tensors |= {name: parts[0]} | dict(zip(names, parts[1:], strict=False))
    opened.checkpoint.close()
    mx.save_safetensors(str(path), tensors)
    return kept, group, float(np.mean(errors)) ** 0.5


def schemes() -> None:
    makers = {
        f"{bits} bits, groups of {group}" if mode == "affine" else mode: partial(write_mlx, mode, group, bits)
        for mode, group, bits in SCHEMES
    }
    files("mlx", "safetensors", ["as they are", "16.0", in_file(16, 64)], makers)


# GGUF


def write_gguf(type: str, path: Path) -> tuple[float, int, float]:
    """The built-in model's transformer with its matrices in `type`; returns bits of a weight, weights of a block, and
    the relative error, the root of the mean square over layers. Those of blocks of 256 are written as the values that
    gguf decodes of them: its rows of 128 are half a block."""
    import gguf

    writer, kind = gguf.GGUFWriter(path, "qwen_image"), gguf.GGMLQuantizationType[type]
    opened = registry.open_model(builtin.folder())
    errors = []
    for name, entry in opened.checkpoint["transformer"].plan.entries.items():
        values = widened(read(entry))
        coded = values.ndim == 2 and values.shape[1] % 32 == 0
        own = kind if coded and type not in k_quants.TYPES else gguf.GGMLQuantizationType.F32
        if coded and own != kind:
            decoded = gguf.dequantize(k_quants.encode(values.reshape(-1, 256), type), kind).reshape(values.shape)
            stored = decoded
        else:
            stored = gguf.quantize(values, own)
            decoded = gguf.dequantize(stored, own)
        writer.add_tensor(name, stored, raw_dtype=own)
        if coded:
            errors.append(relative(decoded, values))
    opened.checkpoint.close()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return 8 * size / block, block, float(np.mean(errors)) ** 0.5


def types() -> None:
    names = ("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K")
    files("gguf", "gguf", ["F32", "32.0", ""], {name: partial(write_gguf, name) for name in names})


if __name__ == "__main__":
    {"gguf": types, "mlx": schemes}.get("".join(sys.argv[1:]), policies)()
