"""Weights on both backends: the same bits, strictly and lazily read, and no more memory than they take."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_model import write
from safetensors.torch import load_file, save_file
from support.opened_parts import open_part
from support.parity_cases import MLX, TORCH, Files, Twin, twins
from support.policies import BF16, BF16_PLAIN, FP16_PLAIN, FP32

import qwenimg
from qwenimg.backends.mlx import load as mlx_load
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.families.qwen_image import checkpoint as model
from qwenimg.common.formats.stored import TensorSlice
from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.parts.vae import decodes
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan
from qwenimg.common.weights.storage import Dense

BACKENDS = ("torch", "mlx")
PARTS = ("transformer", "text", "vae")


def twin_of(backend: str) -> Twin:
    return TORCH() if backend == "torch" else MLX()


def named(twin: Twin, loaded: Any) -> dict[str, Any]:
    """Every parameter by its path."""
    if twin.name == "torch":
        return dict(loaded.named_parameters())
    from mlx.utils import tree_flatten

    return dict(tree_flatten(loaded.parameters()))


def whole(twin: Twin, files: Files, part: str, precision: Precision) -> Any:
    """A component with all its weights, those of the modulation too."""
    made = twin.component(files, part, precision)
    if part == "transformer":
        device = [made.device] if twin.name == "torch" else []
        twin.load.fill(made.model, made.plan, *device)
    return made.model


def bits(twin: Twin, array: Any) -> np.ndarray:
    """Values widened to float32, convolutions as torch lays them out, as integers."""
    values = twin.engine.numpy(array)
    assert values.dtype == np.float32
    if twin.name == "mlx" and values.ndim == 4:
        values = values.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(values).view(np.uint32)


# Values

POLICIES = {"float32": (FP32, BF16_PLAIN), "float16": (FP32, FP16_PLAIN), "bfloat16": (FP32, BF16)}
CASES = [(stored, policy) for stored, policies in POLICIES.items() for policy in policies]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    folder = tmp_path_factory.mktemp("loading")
    return cache(lambda stored: Files(folder, stored))


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX reads large tensors itself. What is small goes through numpy, as in the tests of all other rooms."""
    monkeypatch.setattr(mlx_load, "WORTH_A_THREAD", 1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("stored", "policy"), CASES, ids=lambda value: getattr(value, "name", value))
@pytest.mark.sample(1)
def test_values_are_equal_bit_for_bit(files: Callable[[str], Files], stored: str, policy: Precision, part: str) -> None:
    """On both backends and in the file, read by another library and rounded by torch."""
    plan = files(stored).plans[part]
    source = load_file(plan.files[0].path)
    found = {name: named(twin, whole(twin, files(stored), part, policy)) for name, twin in twins().items()}
    assert found["torch"].keys() == found["MLX"].keys() == plan.entries.keys()
    for name, entry in plan.entries.items():
        value = source[entry.source.first.key]
        value = value[:, :, -1] if value.ndim == 5 else value
        dtype = getattr(torch, policy.weight_dtype(part, name, entry.residency))
        expected = value.to(dtype).float().reshape(entry.shape).numpy().view(np.uint32)
        for twin in twins().values():
            got = found[{"torch": "torch", "mlx": "MLX"}[twin.name]][name]
            assert str(got.dtype).rpartition(".")[2] == str(dtype).rpartition(".")[2], name
            assert np.array_equal(bits(twin, got), expected), f"{twin.name} {name}"


# Largest, smallest and subnormal values of each format, both zeros, ties, and neighbours of ties.
EDGES = {
    "float32": [0.0, -0.0, 1.0, -3.3895e38, 2.0**-126, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 65504.0],
    "float16": [0.0, -0.0, 65504.0, -65504.0, 2.0**-14, 2.0**-24, 1 + 2.0**-10, 0.1],
    "bfloat16": [0.0, -0.0, 3.3895e38, -3.3895e38, 2.0**-126, 2.0**-133, 1 + 2.0**-7, 0.1],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("stored", "wanted"), [(s, "float32") for s in EDGES] + [("float32", "bfloat16")])
def test_edges_of_the_formats(tmp_path: Path, backend: str, stored: str, wanted: str) -> None:
    values = torch.tensor(EDGES[stored], dtype=getattr(torch, stored))
    save_file({"edges": values}, tmp_path / "edges.safetensors")
    twin = twin_of(backend)
    plan = keys.plan(tmp_path / "edges.safetensors", "edges", {"edges": (len(values),)})
    device = [torch.device("cpu")] if twin.name == "torch" else []
    made = twin.load.tensor(replace(plan.entries["edges"], storage=Dense(wanted)), *device)
    plan.close()
    assert np.array_equal(bits(twin, made), values.to(getattr(torch, wanted)).float().numpy().view(np.uint32))


# Refusals

SMALL = QwenDiTConfig(
    num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
)
RESIDENT, TIMED = "transformer_blocks.1.attn.to_q.weight", "transformer_blocks.1.img_mod.1.bias"


def broken(folder: Path, key: str, value: float, dtype: str) -> LoadPlan:
    """A transformer of two files, one value of the tensor `key` replaced."""
    manifest = qwen_dit.manifest(SMALL)
    tensors = load_file(write(folder / "all.safetensors", manifest, dtype))
    (folder / "all.safetensors").unlink()
    tensors[key].view(-1)[1] = value
    first = [name for name in tensors if name < "transformer_blocks.1"]
    parts = {"a": first, "b": [name for name in tensors if name not in first]}
    index = {name: f"model-{i:05}-of-00002.safetensors" for i, part in enumerate(parts.values(), 1) for name in part}
    for i, part in enumerate(parts.values(), 1):
        save_file({name: tensors[name] for name in part}, folder / f"model-{i:05}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return keys.plan(folder, "transformer", manifest, uses=qwen_dit.uses)


def load_and_modulate(backend: str, plan: LoadPlan, precision: Precision) -> None:
    made = twin_of(backend).engine.open("qwen_dit", SMALL, plan.stored(precision), precision)
    made.modulate(qwen_conditioning.time_rows(SMALL, [500.0], "float32"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", [RESIDENT, TIMED])
@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "BF16"), (-np.inf, "F32"), (np.inf, "F16")])
def test_a_non_finite_weight_is_named(tmp_path: Path, backend: str, key: str, value: float, dtype: str) -> None:
    plan = broken(tmp_path, key, value, dtype)
    with pytest.raises(ModelError) as caught:
        load_and_modulate(backend, plan, FP32)
    plan.close()
    text = str(caught.value)
    assert caught.value.exit_code == 5 and text.isprintable()
    assert key in text and plan.entries[key].source.first.file.path.name in text and "1 non-finite" in text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", [RESIDENT, TIMED])
def test_a_value_too_large_for_float16_is_named(tmp_path: Path, backend: str, key: str) -> None:
    plan = broken(tmp_path, key, -70000.0, "F32")
    load_and_modulate(backend, plan, BF16)
    with pytest.raises(ModelError, match=r"reaches 7e\+04, too large for .*float16.* --precision bf16") as caught:
        load_and_modulate(backend, plan, FP16_PLAIN)
    plan.close()
    assert key in str(caught.value) and plan.entries[key].source.first.file.path.name in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_that_the_model_has_not_is_no_parameter(tmp_path: Path, backend: str) -> None:
    """The manifest and the model are both ours; where they differ, loading stops."""
    twin = twin_of(backend)
    manifest = qwen_dit.manifest(SMALL)
    for changed in (manifest | {"img_in.gain": (3,)}, manifest | {"img_in.bias": (33,)}):
        plan = keys.plan(write(tmp_path / "m.safetensors", changed, "F32"), "transformer", changed)
        with pytest.raises((AttributeError, KeyError, AssertionError)):
            twin.engine.open("qwen_dit", SMALL, plan.stored(FP32), FP32)
        plan.close()


# Laziness


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Path, first and last byte of every read of weights."""
    seen: list[tuple[str, int, int]] = []
    original = OpenFile.fill

    def fill(self: OpenFile, view: memoryview, begin: int) -> None:
        if self.path.suffix == ".safetensors":
            seen.append((str(self.path), begin, begin + len(view)))
        original(self, view, begin)

    monkeypatch.setattr(OpenFile, "fill", fill)
    return seen


def pieces(plan: LoadPlan) -> Iterator[TensorSlice]:
    return (piece for entry in plan.entries.values() for piece in entry.source.pieces)


def data_bytes(plan: LoadPlan, seen: list[tuple[str, int, int]]) -> int:
    """How many bytes of the plan's tensors were read, those read twice counted twice."""
    count = 0
    for path, begin, end in seen:
        for piece in pieces(plan):
            if str(piece.file.path) == path:
                count += max(0, min(end, piece.end) - max(begin, piece.begin))
    return count


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_weight_is_loaded_once_when_it_is_needed_and_those_of_the_end_are_looked_at_before(
    tiny_folder: Path, backend: str, reads: list[tuple[str, int, int]]
) -> None:
    pipe = qwenimg.load(tiny_folder, backend=backend, precision="fp32")
    opened = pipe.model.checkpoint
    parts = {name: opened[name].plan for name in ("text_encoder", "transformer", "vae")}
    assert not reads, "opening reads headers alone"

    def stored(plan: LoadPlan) -> int:
        return sum(piece.end - piece.begin for piece in pieces(plan))

    pipe.prepare(["a red circle"])
    looked_at = stored(parts["vae"].only(decodes))  # a damaged VAE is found before the first step
    assert [data_bytes(plan, reads) for plan in parts.values()] == [stored(parts["text_encoder"]), 0, looked_at]
    transformer = open_part(pipe, "transformer")
    resident = stored(parts["transformer"].when(ALWAYS))
    assert data_bytes(parts["transformer"], reads) == resident < stored(parts["transformer"])
    for times in (1, 2):  # schedules
        transformer.modulate(qwen_conditioning.time_rows(opened["transformer"].config, [500.0], "float32"))
        timed = stored(parts["transformer"].when(ONCE))
        assert data_bytes(parts["transformer"], reads) == resident + times * timed
    assert data_bytes(parts["vae"], reads) == looked_at
    for _ in range(2):
        open_part(pipe, "vae decoder").decode(np.zeros((1, 16, 2, 2), np.float32))
    half = stored(parts["vae"].only(decodes))
    assert data_bytes(parts["vae"], reads) == looked_at + half < looked_at + stored(parts["vae"])
    open_part(pipe, "vae encoder")
    assert data_bytes(parts["vae"], reads) == looked_at + stored(parts["vae"])
    opened.close()


def test_opening_imports_no_framework_and_reads_no_weight(tiny_folder: Path) -> None:
    script = (
        "import sys, pathlib; from qwenimg.common.families.qwen_image.checkpoint import open_folder;"
        f"open_folder(pathlib.Path({str(tiny_folder)!r})); assert not {{'torch', 'mlx'}} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    assert model.open_folder(tiny_folder)["transformer"].plan.parameters > 10_000


# Memory

WIDE = QwenDiTConfig(
    num_layers=8, attention_head_dim=128, num_attention_heads=8, joint_attention_dim=512, axes_dims_rope=(16, 56, 56)
)
# Of the weights that are resident. What comes on top is one tensor as it was read (the largest here is 3 % of all),
# and the code of a framework that is mapped when it first runs.
MARGIN = 1.10

MEASURE = """
import json, os, sys
from pathlib import Path

os.environ["MLX_ENABLE_TF32"] = "0"
import numpy as np
from qwenimg import backends
from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_dit
from qwenimg.common.weights import keys
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.precision.precision import bases
from qwenimg.common.measure import exactness
from qwenimg.common.precision.residency import ALWAYS, ONCE

BF16 = bases(KIND)["bf16"]


def peak():
    "The most memory that this process has had. On macOS in bytes; Linux's ru_maxrss would count its parent's."
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


backend, file, config = sys.argv[1], Path(sys.argv[2]), qwen_dit.QwenDiTConfig(**json.loads(sys.argv[3]))
engine = backends.load(backend)
exactness.float32_error(engine)
policy = BF16
plan = keys.plan(file, "transformer", qwen_dit.manifest(config), uses=qwen_dit.uses).stored(policy)
engine.expect(plan.nbytes)
resident = plan.when(ALWAYS)
block = plan.when(ONCE).only(lambda name: name.startswith("transformer_blocks.0."))
before = peak()
transformer = engine.open("qwen_dit", config, plan, policy)
loaded = peak()
modulation = transformer.modulate(qwen_conditioning.time_rows(config, [900.0, 400.0], "float32"))
modulated = peak()
found = {
    "resident": resident.nbytes,
    "block": block.nbytes,
    "all": plan.nbytes,
    "loading": loaded - before,
    "modulating": modulated - before,
}
if backend == "mlx":
    import mlx.core as mx

    found |= {"mlx_peak": mx.get_peak_memory(), "mlx_kept": mx.get_active_memory() + mx.get_cache_memory()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wide_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """0.6 GB: so much that what an interpreter takes beside it does not count."""
    path = write(tmp_path_factory.mktemp("wide") / "wide.safetensors", qwen_dit.manifest(WIDE))
    yield path
    path.unlink()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_peak_memory_of_loading(wide_file: Path, backend: str) -> None:
    config = {name: getattr(WIDE, name) for name in WIDE.__dataclass_fields__}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, backend, str(wide_file), json.dumps(config)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    resident = found["resident"]
    shown = {name: f"{value / 2**20:.0f} MiB ({value / resident:.3f})" for name, value in found.items()}
    print(backend, shown)
    assert found["loading"] <= MARGIN * resident
    assert found["modulating"] <= MARGIN * (resident + found["block"]) < resident + 3 * found["block"]
    if backend == "mlx":
        assert found["mlx_peak"] <= MARGIN * (resident + found["block"])
        assert found["mlx_kept"] <= MARGIN * resident
