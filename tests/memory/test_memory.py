"""Predictions of memory against what is measured, refusals before anything is allocated, and what keeps peaks low."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_model import write
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from support import oracle_effnet
from support import tiny_autoencoder as tiny_vaes
from support.opened_parts import open_part
from support.parity_cases import MLX, TORCH, Twin
from support.policies import FP32, FP64

import qwenimg
from qwenimg.backends.workspaces import TORCH as TORCH_WORKSPACE
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.families.cascade import memory as cascade
from qwenimg.common.memory import bands, memory
from qwenimg.common.networks.vaes import effnet, qwen_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.networks.vaes.tiny_vae import TinyVAEConfig
from qwenimg.common.networks.vaes.tiny_video_vae import TinyVideoVAEConfig
from qwenimg.common.parts import tiny_memory
from qwenimg.common.parts.vae import decodes
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.weights import keys

BACKENDS = ("cpu", "mlx")
HIGH = 1.25  # a prediction is at most this far above what is measured, and never below
# In bands. MLX computes the two convolutions of a residual block one after the other, and takes less than planned.
HIGH_BANDED = {"cpu": HIGH, "mlx": 1.35}
NEAR = 0.10  # of what is measured, a prediction of the encoder
# Seams: relative to the largest pixel. The same sums in float32, in blocks of other sizes.
SEAMS = 1e-5
# Chunks of queries against all at once and against float64, relative L2: softmax over some hundred keys in float32.
CHUNKS = 1e-6


def twin_of(backend: str) -> Twin:
    return TORCH() if backend == "cpu" else MLX()


# Measurement, each in a process of its own

PREAMBLE = """
import ctypes, json, os, sys
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

os.environ |= {"MLX_ENABLE_TF32": "0", "MLX_DISABLE_COMPILE": "1"}
backend, name = sys.argv[1], "mlx" if sys.argv[1] == "mlx" else "torch"
if backend == "mlx":
    ctypes.CDLL(str(Path(find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    import mlx.core as mx
else:
    import torch

    torch.set_num_threads(1)
import numpy as np
from qwenimg import backends
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.precision.precision import bases, float64
from qwenimg.common.weights import keys
FP32, FP64 = bases(KIND)["fp32"], float64(KIND)

attending = import_module(f"qwenimg.backends.{name}.ops.attention")
backends.load(backend).expect(2**30)  # as for a large run

def reset():
    "Begins to measure; returns what is in use now."
    if backend == "mlx":
        mx.clear_cache()
        mx.reset_peak_memory()
        return mx.get_active_memory()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak():
    return mx.get_peak_memory() if backend == "mlx" else resident("VmHWM")


def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024

"""

DECODE = """
config = qwen_vae.QwenVAEConfig(base_dim=int(sys.argv[3]), num_res_blocks=1)
height, width = int(sys.argv[4]), int(sys.argv[5])
stored = qwen_vae.manifest(config)
plan = keys.plan(Path(sys.argv[2]), "vae", stored, uses=qwen_vae.uses)
vae = backends.load(backend).open("qwen_vae", config, plan.stored(FP32), FP32)
vae.decode(np.zeros((1, 16, 5, 3), np.float32))
latents = np.random.default_rng(0).standard_normal((1, 16, height, width)).astype(np.float32)
found = []
for rows in json.loads(sys.argv[6]):
    before = reset()
    vae.decode(latents, rows)
    found.append(peak() - before)
print(json.dumps(found))
"""

ENCODE = DECODE.replace("decode(np.zeros((1, 16, 5, 3)", "encode(np.zeros((1, 3, 40, 24)")
ENCODE = ENCODE.replace("(1, 16, height, width)", "(1, 3, height, width)").replace("vae.decode(", "vae.encode(")

TINY_VAE = """
from qwenimg.common.parts import tiny_vae
from qwenimg.common.parts.vae import halves
from qwenimg.common.precision.precision import parse

path, side, policy = Path(sys.argv[2]), int(sys.argv[3]), parse(sys.argv[4], on_gpu=False, kind=KIND)
part, loaded = tiny_vae.open_tiny(path), backends.load(backend)
plans = halves(part.stored(policy))
vaes = {half: loaded.open(part.network, part.config, plan, policy) for half, plan in plans.items()}
rng = np.random.default_rng(0)
z = rng.standard_normal((1, part.config.latent_channels, side, side)).astype(np.float32)
x = rng.standard_normal((1, 3, 8 * side, 8 * side)).astype(np.float32)
decode, encode = vaes["decoder"].decode, vaes["encoder"].encode
decode(z[:, :, :4, :4])
encode(x[:, :, :32, :32])
found = []
for rows in json.loads(sys.argv[5]):
    for run, data in ((decode, z), (encode, x)):
        before = reset()
        run(data, rows)
        found.append(peak() - before)
print(json.dumps(found))
"""

ATTEND = """
h, w, channels = 72, 72, 24
qkv = np.random.default_rng(0).standard_normal((1, 3 * channels, h, w)).astype(np.float32)
attending.SCORE_BYTES = int(sys.argv[2])
found = {}
if backend == "mlx":
    x = mx.array(qkv.transpose(0, 2, 3, 1))
    mx.eval(x)
    before = reset()
    mx.eval(attending.spatial_attention(x))
    found["MLX"] = peak() - before
else:
    x = torch.from_numpy(qkv)
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    for name, kernel in {"torch": nullcontext(), "torch without a fused kernel": plain}.items():
        with torch.inference_mode(), kernel:
            attending.spatial_attention(x)  # what libraries read of their own files at the first call stays resident
            before = reset()
            attending.spatial_attention(x)
            found[name] = peak() - before
print(json.dumps(found))
"""

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak of resident memory")


def measured(script: str, *arguments: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Decoding

WIDTHS = {"cpu": (32, 44, 40), "mlx": (12, 30, 32)}  # base_dim, and the size in latents


@linux
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_decode_peak_is_predicted(tmp_path: Path, backend: str) -> None:
    """Whole, and in the bands that are chosen when the whole does not fit."""
    base, height, width = WIDTHS[backend]
    config = QwenVAEConfig(base_dim=base, num_res_blocks=1)
    path = write(tmp_path / "vae.safetensors", qwen_vae.manifest(config), "F32")
    workspace = twin_of(backend).engine.workspace
    predicted = memory.decode_peak(config, height, width, 4, workspace)
    needed = {rows: bands.decode_bytes(config, height, width, 4, workspace, rows) for rows in bands.ROWS}
    rows = next(rows for rows, size in needed.items() if size <= predicted // 2)
    whole, banded = measured(DECODE, backend, path, base, height, width, json.dumps([None, rows]))
    mib = [round(value / 2**20) for value in (predicted, whole, needed[rows], banded)]
    print(f"{backend}: predicted {mib[0]} MiB, measured {mib[1]} ({predicted / whole:.2f}); ", end="")
    print(f"in bands of {rows} rows {mib[2]}, measured {mib[3]} ({needed[rows] / banded:.2f})")
    assert whole <= predicted <= HIGH * whole
    assert 0.85 * banded <= needed[rows] <= HIGH_BANDED[backend] * banded and banded < whole


@linux
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_encode_peak_is_predicted(tmp_path: Path, backend: str) -> None:
    """Whole, in the first level of the published width on torch: a residual block's input stays beside a convolution,
    of which MLX holds one at a time."""
    base, height, width = {"cpu": (96, 256, 256), "mlx": (12, 240, 256)}[backend]
    path = write(tmp_path / "vae.safetensors", qwen_vae.manifest(QwenVAEConfig(base_dim=base, num_res_blocks=1)), "F32")
    predicted = bands.encode_bytes(base, height, width, 4, twin_of(backend).engine.workspace, None)
    [whole] = measured(ENCODE, backend, path, base, height, width, json.dumps([None]))
    copies = whole / (4 * base * height * width)
    print(
        f"{backend}: planned {predicted / 1e6:.0f} MB, measured {whole / 1e6:.0f} ({predicted / whole:.2f}): ", end=""
    )
    print(f"{copies:.1f} times the first level's image")
    assert abs(predicted / whole - 1) <= NEAR


TINY = {
    "taesd": TinyVAEConfig(),
    "taef2": TinyVAEConfig(latent_channels=32, pooled=True),
    "taew2_1": TinyVideoVAEConfig(),
}
SIDES = {"cpu": 64, "mlx": 32}  # latents a side
EFFNET = """
from dataclasses import replace
from qwenimg.common.networks.vaes import effnet
from qwenimg.common.parts.open_file import open_part

part = open_part(effnet.LAYOUTS, Path(sys.argv[2]), effnet.EffnetConfig(), "effnet")
policy = replace(FP32, vae=sys.argv[5])
run = backends.load(backend).open(part.network, part.config, part.stored(policy), policy)
run.encode(np.zeros((1, 3, 64, 32), np.float32))
picture = np.random.default_rng(0).random((1, 3, int(sys.argv[3]), int(sys.argv[4])), np.float32)
before = reset()
run.encode(picture)
print(json.dumps(peak() - before))
"""


@linux
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_peak_of_cascades_encoder_is_predicted(tmp_path: Path, backend: str, dtype: str) -> None:
    """Of the published sizes, for the pictures of 1024 x 1024 and 512 x 683."""
    height, width = {"cpu": (768, 768), "mlx": (384, 512)}[backend]
    path = tmp_path / "effnet.safetensors"
    save_torch(oracle_effnet.tiny_effnet(shapes=effnet.manifest(effnet.EffnetConfig())), path)
    whole, workspace = measured(EFFNET, backend, path, height, width, dtype), twin_of(backend).engine.workspace
    planned = cascade.encode_bytes(effnet.EffnetConfig(), height, width, BYTES[dtype], workspace)
    print(f"{backend} {dtype}: planned {planned / 1e6:.0f} MB, measured {whole / 1e6:.0f} ({planned / whole:.2f})")
    assert abs(planned / whole - 1) <= NEAR


POLICIES = {"fp32": 4, "bf16,vae=bf16": 2}  # bytes of a value
TINY_ROWS = (None, 64, 16)


@linux
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0, rest=3)
def test_peaks_of_tiny_vaes_are_predicted(tmp_path: Path, backend: str, name: str, policy: str) -> None:
    """Both halves, whole and in bands, of the published sizes."""
    made, side, itemsize = TINY[name], SIDES[backend], POLICIES[policy]
    if backend == "cpu" and itemsize == 2 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor widens bfloat16")
    weights = tiny_vaes.weights(made)
    if name == "taew2_1":
        path = tmp_path / f"{name}.safetensors"
        save_file(weights, path)
    else:
        path = tiny_vaes.write_authors(tmp_path, name, weights)
    found = measured(TINY_VAE, backend, path, side, policy, json.dumps(TINY_ROWS))
    workspace, far = twin_of(backend).engine.workspace, []
    for rows, peaks in zip(TINY_ROWS, zip(found[::2], found[1::2], strict=True), strict=True):
        decoding = tiny_memory.decode_bytes(made, side, side, itemsize, workspace, rows)
        encoding = tiny_memory.encode_bytes(made, 8 * side, 8 * side, itemsize, workspace, rows)
        for half, planned, peak in zip(("decoder", "encoder"), (decoding, encoding), peaks, strict=True):
            ratio = planned / peak
            print(f"{half}, rows {rows}: planned {planned / 1e6:.1f} MB, measured {peak / 1e6:.1f} ({ratio:.2f})")
            far += [(half, rows)] if abs(ratio - 1) > NEAR else []
    assert not far


def test_higher_bands_take_more() -> None:
    """Of both published models: more rows take more, and one image that is kept is the least that a decoder takes."""
    for config in (QwenVAEConfig(), KLVAEConfig(block_out_channels=(128, 256, 512, 512))):
        for side in (64, 128, 166):
            needed = [bands.decode_bytes(config, side, side - 7, 4, TORCH_WORKSPACE, rows) for rows in bands.ROWS]
            assert needed == sorted(needed, reverse=True)
            last = config.up_blocks[-1][1] * 64 * side * (side - 7) * 4
            assert last < needed[-1] < 1.6 * last
            assert needed[-1] < memory.decode_peak(config, side, side - 7, 4, TORCH_WORKSPACE) / 2


SMALL_VAE = QwenVAEConfig(base_dim=4)


def small_vae(twin: Twin, folder: Path, precision: Any = FP32) -> Any:
    stored = qwen_vae.manifest(SMALL_VAE)
    path = write(folder / "vae.safetensors", stored, "F32")
    return twin.engine.open(
        "qwen_vae", SMALL_VAE, keys.plan(path, "vae", stored, uses=qwen_vae.uses).stored(precision), precision
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("height", "width", "rows"), [(21, 15, 16), (17, 20, 64), (9, 11, 3), (5, 13, 39)])
@pytest.mark.sample(1)
def test_bands_have_no_seams(tmp_path: Path, backend: str, height: int, width: int, rows: int) -> None:
    vae = small_vae(twin_of(backend), tmp_path)
    rng = np.random.default_rng(height)
    latents = rng.standard_normal((1, 16, height, width)).astype(np.float32)
    pixels = rng.uniform(-1, 1, (1, 3, 8 * height, 8 * width)).astype(np.float32)
    for half, values in ((vae.decode, latents), (vae.encode, pixels)):
        whole, banded = half(values), half(values, rows)
        error = np.abs(whole - banded).max() / np.abs(whole).max()
        print(f"{backend} {height}x{width} in bands of {rows} rows: {error:.1e}")
        assert whole.shape == banded.shape and whole.std() > 0.1
        assert error <= SEAMS


# Attention


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """[... L D] in float64."""
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score_bytes", [1, 5000, 40_000])
def test_spatial_attention_in_chunks(monkeypatch: pytest.MonkeyPatch, backend: str, score_bytes: int) -> None:
    twin, (h, w, C) = twin_of(backend), (13, 11, 20)
    qkv = np.random.default_rng(2).standard_normal((2, 3 * C, h, w))
    x = twin.array(qkv, "float32", image=True)
    at_once = twin.output(twin.nn.spatial_attention(x), image=True).values
    monkeypatch.setattr(twin.attending, "SCORE_BYTES", score_bytes)
    chunked = twin.output(twin.nn.spatial_attention(x), image=True).values
    flat = qkv.astype(np.float32).astype(np.float64).reshape(2, 3, C, h * w).swapaxes(2, 3)
    exact = softmax_attention(flat[:, 0], flat[:, 1], flat[:, 2]).swapaxes(1, 2).reshape(2, C, h, w)
    rows = max(1, score_bytes // (4 * h * w))
    print(f"{backend}, {rows} of {h * w} rows: {error(chunked, at_once):.1e}, to float64 {error(chunked, exact):.1e}")
    assert rows < h * w and max(error(chunked, at_once), error(chunked, exact)) <= CHUNKS


@pytest.mark.parametrize("masked", [False, True])
def test_joint_attention_in_chunks_on_mlx(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    """torch's kernels never hold all scores; MLX's do where they are not fused, as on a CPU."""
    import mlx.core as mx

    twin, rng = MLX(), np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 37, 3, 10)).astype(np.float32) for _ in range(3))
    mask = np.arange(37)[None] < np.array([37, 21])[:, None] if masked else None
    mask = None if mask is None else mask[:, None, None]
    arguments = [*map(mx.array, (q, k, v)), None if mask is None else mx.array(mask)]
    at_once = twin.engine.numpy(twin.nn.attention(*arguments))
    monkeypatch.setattr(twin.attending, "SCORE_BYTES", 5 * 4 * 2 * 3 * 37)
    chunked = twin.engine.numpy(twin.nn.attention(*arguments))
    exact = softmax_attention(*(x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v)), mask)
    exact = exact.swapaxes(1, 2).reshape(2, 37, 30)
    print(f"chunks {error(chunked, at_once):.1e}, float64 {error(chunked, exact):.1e}")
    assert max(error(chunked, at_once), error(chunked, exact)) <= CHUNKS


@linux
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_all_scores_are_never_in_memory(backend: str) -> None:
    scores, chunk = (72 * 72) ** 2 * 4, 2**22
    for name, found in measured(ATTEND, backend, chunk).items():
        print(f"{name}: {found / 2**20:.0f} MiB; all scores would be {scores / 2**20:.0f}, a chunk's are 4")
        assert found <= scores / 4


# Refusals


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", ["text encoder", "transformer"])
def test_what_does_not_fit_is_refused_before_it_is_read(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, part: str
) -> None:
    """By the plan of the whole run, and by each component itself where it is opened outside of one."""
    pipe = qwenimg.load(tiny_folder, backend=backend, precision="fp32")
    touched: list[str] = []
    monkeypatch.setattr(OpenFile, "fill", lambda self, view, begin: touched.append(self.path.name))
    load = importlib.import_module(type(pipe.engine).__module__.replace(".engine", ".load"))
    monkeypatch.setattr(load, "empty", lambda build: touched.append("a model"))
    monkeypatch.setattr(pipe.engine, "free_memory", lambda: 1000)
    calls = {
        "(the transformer|decoding a picture of 32x32)": lambda: pipe(
            "a red circle", guidance=1.0, width=32, height=32, steps=1, seed=0
        ),
        f"the {part}": lambda: open_part(pipe, part),
    }
    for what, call in calls.items():
        with pytest.raises(DoesNotFit) as caught:
            call()
        text = str(caught.value)
        assert caught.value.exit_code == 4 and re.match(rf"{what} takes [\d.]+ [kM]B in fp32, 1\.0 kB are", text), text
        assert text.isprintable() and "free on" in text and not touched
    pipe.close()


@pytest.mark.parametrize("kind", ["qwen", "sd15"])
def test_a_vae_that_does_not_fit_is_refused_before_it_is_read(
    tiny_folder: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Half by half, and only after the transformer or UNet was freed for it."""
    pipe = qwenimg.load(tiny_folder if kind == "qwen" else folders[kind], backend="cpu", precision="fp32")
    told: list[str] = []
    pipe.runtime.notify = lambda stage, text: told.append(text)
    pipe("a red circle", width=32, height=32, steps=1, seed=0)
    pipe.model.residents.free("vae")
    touched: list[str] = []
    monkeypatch.setattr(OpenFile, "fill", lambda self, view, begin: touched.append(self.path.name))
    monkeypatch.setattr(pipe.engine, "free_memory", lambda: 1000)
    for half, use in (
        ("decoder", lambda: pipe.model.vae.decode(np.zeros((1, pipe.model.channels, 4, 4), np.float32))),
        ("encoder", lambda: pipe.model.vae.encode(np.zeros((1, 3, 32, 32), np.float32))),
    ):
        with pytest.raises(DoesNotFit, match=f"^the vae {half} takes .* in fp32, 1.0 kB are free") as caught:
            use()
        print(caught.value)
    pipe.close()
    assert not touched
    assert [text for text in told if text.startswith("freeing")] == told[-3:-2], "once, before the first refusal"
    assert [text.split(" (")[0] for text in told[-2:]] == ["loading vae decoder", "loading vae encoder"]


def test_an_inpainting_unet_is_loaded_after_its_empty_picture_is_encoded(folders: dict[str, Path]) -> None:
    """One that is freed for the VAE's encoder must not be held meanwhile."""
    pipe = qwenimg.load(folders["inpaint"], backend="cpu", precision="fp32")
    told: list[str] = []
    pipe.runtime.notify = lambda stage, text: told.append(text.split(" (")[0])
    pipe("a red circle", width=32, height=32, steps=1, seed=0)
    pipe.close()
    loaded = [text for text in told if text.startswith("loading")]
    assert loaded == ["loading text encoder", "loading vae encoder", "loading unet", "loading vae decoder"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_in_the_dtypes_of_its_file_is_not_opened(tiny_folder: Path, backend: str) -> None:
    """That the policy was applied is checked: the weights of a plan without it would have the file's dtypes."""
    pipe = qwenimg.load(tiny_folder, backend=backend, precision="fp32")
    vae = pipe.model.checkpoint["vae"]
    for plan in (vae.plan, vae.plan.stored(FP64)):
        with pytest.raises(AssertionError, match="vae is not planned in fp32"):
            pipe.engine.open("qwen_vae", vae.config, plan, pipe.precision)
    pipe.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-plain"])
def test_weight_bytes_are_what_is_loaded(tiny_folder: Path, precision: str) -> None:
    """The figure that the refusal rests on, against the tensors that torch holds."""
    pipe = qwenimg.load(tiny_folder, backend="cpu", precision=precision)
    opened = pipe.model.checkpoint
    for component, plan in (
        (open_part(pipe, "text encoder"), opened["text_encoder"].plan),
        (open_part(pipe, "transformer"), opened["transformer"].plan.when(ALWAYS)),
        (open_part(pipe, "vae decoder"), opened["vae"].plan.only(decodes)),
    ):
        held = {name: p.nbytes for name, p in component.model.named_parameters() if not p.is_meta}
        assert held.keys() == plan.entries.keys()
        assert plan.stored(pipe.precision).nbytes == sum(held.values()) > 0
    pipe.close()


def test_free_memory_is_what_the_system_says() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.free_ram() < pages and 0 < TORCH().engine.free_memory() < pages
