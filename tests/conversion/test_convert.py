"""`convert`: what it writes is what drawing with the same options holds; ended runs; places that are taken."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from random_model import DIT, TEXT, VAE, write_random_model
from safetensors import safe_open
from safetensors import torch as torch_files
from safetensors.numpy import save_file
from support import comfy_files
from support.cli_runner import cli

import qwenimg
from qwenimg.common.base.amounts import size_text
from qwenimg.common.conversion import convert as module
from qwenimg.common.conversion import parts
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.quant.affine import Affine
from qwenimg.common.shapes import builtin
from qwenimg.common.weights import streaming
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import read_quantized

BACKENDS = ("cpu", "mlx")
SHAPES = builtin.folder()
ASK: dict[str, Any] = {"seed": 3, "width": 48, "height": 32, "steps": 2, "guidance": 2.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks, of which the middle one gets fewer bits; in shards of bfloat16."""
    from dataclasses import replace

    folder = tmp_path_factory.mktemp("model") / "m"
    dit = replace(DIT, num_layers=3, joint_attention_dim=96)
    text = replace(TEXT, hidden_size=96, num_attention_heads=6, intermediate_size=128)
    write_random_model(folder, dit=dit, text=text, vae=VAE, dtype="bfloat16", shards=2)
    return folder


class Told:
    """A listener."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def report(self, kind: str, text: str) -> None:
        """Nothing to tell."""

    def plan(self, size: int, files: int) -> None:
        """Nothing to tell."""

    def kept(self, name: str, size: int) -> None:
        self.files.append(name)

    def written(self, name: str, size: int) -> None:
        """Nothing to tell."""


def drawn(folder: Path, backend: str, lora: str | None = None, **choices: Any) -> np.ndarray:
    given = {} if lora is None else {"lora": lora}
    return qwenimg.load(folder, backend, "bf16", **choices)("a red circle", **ASK, **given).pixels


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.sample(0)
def test_pictures_are_those_of_codes_made_while_loading(model: Path, tmp_path: Path) -> None:
    """Not a bit differs, on both backends, also where nothing but tensors is left of the files."""
    assert cli("convert", str(model), str(tmp_path / "q"), "-q", "4").code == 0
    shutil.copytree(tmp_path / "q", tmp_path / "bare")
    for path in (tmp_path / "bare").rglob("*.safetensors"):
        torch_files.save_file(torch_files.load_file(path), path)
    for part in ("transformer", "text_encoder"):
        config = json.loads((tmp_path / "bare" / part / "config.json").read_bytes())
        assert config.pop("quantization") == config.pop("quantization_config")
        (tmp_path / "bare" / part / "config.json").write_text(json.dumps(config))
    for backend in BACKENDS:
        made = drawn(model, backend, quantize="4")
        assert np.array_equal(drawn(tmp_path / "q", backend), made)
        assert np.array_equal(drawn(tmp_path / "bare", backend), made)
    assert not np.array_equal(drawn(model, "cpu"), made)


def test_what_is_written_is_what_mlx_and_mlx_lm_mean(model: Path, tmp_path: Path) -> None:
    """Each layer by the bits and group of config.json, decoded by MLX, against our codes of the source."""
    assert cli("convert", str(model), str(tmp_path / "q"), "-q", "4").code == 0
    for part in ("transformer", "text_encoder"):
        said = json.loads((tmp_path / "q" / part / "config.json").read_bytes())["quantization"]
        tensors = {}
        for path in (tmp_path / "q" / part).glob("*.safetensors"):
            tensors |= mx.load(str(path))
            with safe_open(path, "np") as opened:
                assert opened.metadata()["format"] == "mlx" and opened.metadata()["qwenimg_format"] == "1"
                assert len(opened.metadata()["source"]) == len(opened.metadata()["sha256"]) == 64
        codes = registry.open_model(model, LoadOptions(quantize="4")).checkpoint[part].plan.entries
        coded = {name for name, entry in codes.items() if isinstance(entry.storage, Packed)}
        found = {key.removesuffix(".scales") for key in tensors if key.endswith(".scales")}
        assert {f"{layer.removeprefix('model.')}.weight" for layer in found} == coded and coded
        for layer in found:
            one = {"group_size": said["group_size"], "bits": said["bits"], **(said.get(layer) or {})}
            assert tensors[f"{layer}.scales"].dtype == mx.float16
            wide = [tensors[f"{layer}.{name}"].astype(mx.float32) for name in ("scales", "biases")]
            theirs = mx.dequantize(tensors[f"{layer}.weight"], *wide, group_size=one["group_size"], bits=one["bits"])
            entry = codes[f"{layer.removeprefix('model.')}.weight"]
            assert isinstance(entry.storage, Packed) and isinstance(entry.storage.code, Affine)
            code = entry.storage.code
            assert one.get("rotation", 0) == code.rotation == (16 if code.bits == 4 else 0)
            assert (f"{layer}.rotation" in tensors) == bool(code.rotation)
            assert np.array_equal(np.array(theirs), code._replace(rotation=0).values(read_quantized(entry).arrays)), (
                layer
            )
        kept = [
            key.removesuffix(".weight") for key, value in tensors.items() if key.endswith("weight") and value.ndim == 2
        ]
        assert all(said[layer] is False for layer in kept if layer not in found)
    assert "img_in" in kept or part == "text_encoder"


@pytest.mark.sample(0)
@pytest.mark.parametrize("backend", BACKENDS)
def test_four_bits_draw_what_their_values_draw(tmp_path: Path, backend: str) -> None:
    """The picture of a transformer with the values by MLX and by the matrix of the rotation in float64; with a LoRA
    beside the codes; with blocks streamed, the same bits."""
    assert cli("convert", str(SHAPES), str(tmp_path / "q"), "-q", "transformer=4").code == 0
    path = tmp_path / "q" / "transformer" / "diffusion_pytorch_model.safetensors"
    held = {
        name: value.astype(mx.float32) for name, value in mx.load(str(path)).items() if "uint" not in str(value.dtype)
    }
    words, values = mx.load(str(path)), {name: np.array(value) for name, value in held.items()}
    for layer in [name.removesuffix(".scales") for name in held if name.endswith(".scales")]:
        scales, biases = (held[f"{layer}.{part}"] for part in ("scales", "biases"))
        turns = f"{layer}.rotation" in words
        code = {"group_size": 32, "bits": 4} if turns else {"group_size": 64, "bits": 8}
        wide = np.array(mx.dequantize(words[f"{layer}.weight"], scales, biases, **code)).astype(np.float64)
        wide = wide @ comfy_files.rotation(wide.shape[1], 16) if turns else wide
        values[f"{layer}.weight"] = wide.astype(np.float32)
        del values[f"{layer}.scales"], values[f"{layer}.biases"]
    assert sum(name.endswith(".rotation") for name in words) == 36
    save_file(values, tmp_path / "values.safetensors")
    rng, layer = np.random.default_rng(1), "transformer.transformer_blocks.2.attn.to_q"
    low = {f"{layer}.lora_{x}.weight": rng.standard_normal(size) for x, size in (("A", (4, 128)), ("B", (128, 4)))}
    save_file({name: value.astype(np.float32) for name, value in low.items()}, tmp_path / "l.safetensors")

    def latents(lora: str = "", **choices: Any) -> np.ndarray:
        pipe = qwenimg.load(tmp_path / "q", backend, "fp32", **choices)
        given = {"lora": f"{tmp_path / 'l.safetensors'}:0.3"} if lora else {}
        return pipe("a red circle", seed=3, width=64, height=64, steps=2, **given).latents

    made = latents()
    for lora in ("", "with a LoRA"):
        kept, exact = latents(lora), latents(lora, transformer=tmp_path / "values.safetensors")
        off, effect = (np.abs(kept - one).max() / np.abs(exact).max() for one in (exact, made))
        print(f"{backend} {lora}: latents {off:.1e} off, {effect:.1e} from those without it")
        assert off < 1e-5 and (not lora or effect > 1e-2)
    fitting, blocks = streaming.stream_to_fit, set[str]()

    def half(plan: Any, streamable: Any, budget: int, moved: Any) -> Any:
        less = fitting(plan, streamable, min(budget, streaming.peak_weight_bytes(plan, moved) * 4 // 5), moved)
        blocks.update(entry.block for entry in less.entries.values())
        return less

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "stream_to_fit", half)
        pipe = qwenimg.load(tmp_path / "q", backend, "fp32", max_memory="1000GB")
        streamed = pipe("a red circle", seed=3, width=64, height=64, steps=2).latents
    assert len(blocks) > 2 and np.array_equal(streamed, made)


@pytest.mark.sample(0)
def test_info_says_what_codes_take(model: Path, tmp_path: Path) -> None:
    """Values and not words of codes are counted; by the plan's bytes; what -q would take of the source."""
    assert cli("convert", str(model), str(tmp_path / "q"), "-q", "4").code == 0
    made, plain = (cli("info", str(folder)) for folder in (tmp_path / "q", model))
    counts = [re.findall(r"(\S+) M parameters", one.out.decode()) for one in (made, plain)]
    assert made.code == plain.code == 0 and b"fault" not in made.out and counts[0] == counts[1] and len(counts[0]) == 3
    files = sum(path.stat().st_size for path in (tmp_path / "q").rglob("*.safetensors"))
    last, use = made.out.decode().splitlines()[-2:]
    assert use == f"use it: qwenimg PROMPT -m {tmp_path / 'q'}"
    held = last.rpartition(" ")[0].rpartition("at once ")[2]
    assert f"{size_text(files)} in files" in last
    pipe = qwenimg.load(tmp_path / "q", "cpu", "bf16")
    assert pipe.headline().endswith(f"q, weights {size_text(files)} in files, {held} MB at a time")
    assert b", with -q 8 " in cli("info", "shapes").out


def test_without_options_every_tensor_is_the_same(model: Path, tmp_path: Path) -> None:
    """Of the VAE too the taps in time, which no still image uses. Twice converted is once converted."""
    assert cli("convert", str(model), str(tmp_path / "a"), "--quiet").code == 0
    for part in ("transformer", "text_encoder", "vae"):
        before, after = ({}, {})
        for found, folder in ((before, model / part), (after, tmp_path / "a" / part)):
            for path in folder.glob("*.safetensors"):
                found |= mx.load(str(path))
        assert before.keys() == after.keys()
        assert all(value.dtype == after[key].dtype == mx.bfloat16 for key, value in before.items())
        assert all(mx.array_equal(value, after[key]).item() for key, value in before.items())
    assert cli("convert", str(tmp_path / "a"), str(tmp_path / "b"), "-q", "8", "--quiet").code == 0
    assert cli("convert", str(tmp_path / "b"), str(tmp_path / "c"), "--quiet").code == 0
    weights = [name for name in tree(tmp_path / "b") if name.endswith(".safetensors")]
    assert all(_data(tmp_path / "b" / name) == _data(tmp_path / "c" / name) for name in weights)


def _data(path: Path) -> bytes:
    raw = path.read_bytes()
    return raw[8 + int.from_bytes(raw[:8], "little") :]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_lora_in_the_weights(model: Path, tmp_path: Path, backend: str) -> None:
    """In float32 the picture of `--lora`, bit for bit; and in codes that of `--lora` with `-q`, which fuses first."""
    rng, layer = np.random.default_rng(1), "transformer.transformer_blocks.1.attn.to_q"
    low = {f"{layer}.lora_{x}.weight": rng.standard_normal(s) for x, s in (("A", (4, 96)), ("B", (96, 4)))}
    save_file({name: value.astype(np.float32) for name, value in low.items()}, tmp_path / "l.safetensors")
    ask = f"{tmp_path / 'l.safetensors'}:0.7"
    dense, coded = tmp_path / "dense", tmp_path / "coded"
    assert cli("convert", str(model), str(dense), "--lora", ask, "--dtype", "fp32").code == 0
    assert cli("convert", str(model), str(coded), "--lora", ask, "-q", "8").code == 0
    assert np.array_equal(drawn(dense, backend), drawn(model, backend, ask))
    assert not np.array_equal(drawn(dense, backend), drawn(model, backend))
    note = json.loads((coded / "qwenimg.json").read_bytes())
    assert note["lora"] == "l.safetensors:0.7" and str(tmp_path) not in (coded / "qwenimg.json").read_text()
    cli("convert", str(coded), str(tmp_path / "x"), "--lora", ask).refused(2, "is quantized", "the original")
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.part").exists()


@pytest.mark.sample(0)
def test_a_model_known_by_name_keeps_its_defaults(tmp_path: Path) -> None:
    """Also when what was made of it is converted again; with another transformer it is another model."""
    once, twice, other = tmp_path / "once", tmp_path / "twice", tmp_path / "other"
    assert cli("convert", "shapes", str(once), "-q", "8").code == 0
    assert cli("convert", str(once), str(twice)).code == 0
    assert cli("convert", "shapes", str(other), "--transformer", str(SHAPES / "transformer")).code == 0
    expected = replace(registry.open_model(SHAPES).defaults(), **catalog.BUILT_IN.usual)
    assert (expected.steps, expected.guidance, expected.width) == (20, 3.0, 256)
    for folder in (once, twice):
        assert registry.open_model(folder).defaults() == expected
    assert registry.open_model(other).defaults() == registry.open_model(SHAPES).defaults() != expected
    (once / "qwenimg.json").write_bytes(b"{")
    cli("plan", str(once)).refused(5, "qwenimg.json")


# Ended runs

KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from qwenimg.common.conversion import convert, parts
from qwenimg.common.families.load_options import LoadOptions
parts.SHARD = 100_000
class Dies:
    left = int(sys.argv[3])
    def plan(self, *told):
        pass
    kept = plan
    def written(self, name, size):
        self.left -= size
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), LoadOptions(quantize="4"), Dies())
"""


@pytest.mark.sample(0)
def test_a_killed_run_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed twice, and a finished file damaged besides: the same bytes as in one run."""
    monkeypatch.setattr(parts, "SHARD", 100_000)
    module.convert(model, tmp_path / "once", LoadOptions(quantize="4"), Told())
    out, work = tmp_path / "out", tmp_path / "out.part"
    for size in (400_000, 900_000):
        given = [sys.executable, "-c", KILLED, str(model), str(out), str(size)]
        done = subprocess.run(given, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        assert done.returncode == -signal.SIGKILL and not out.exists() and work.is_dir()
    finished = sorted(work.rglob("*.safetensors"))
    left = list(work.rglob("*.safetensors.part"))
    assert len(finished) > 3 and len(left) == 1
    raw = bytearray(finished[1].read_bytes())
    raw[-9] ^= 1
    finished[1].write_bytes(raw)
    told = Told()
    module.convert(model, out, LoadOptions(quantize="4"), told)
    print(f"{len(finished)} files were finished, {len(told.files)} kept")
    assert len(told.files) == len(finished) - 1
    assert tree(out) == tree(tmp_path / "once") and not work.exists()


def test_a_full_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is written where it is known; else nothing but whole files stays, and the run goes on."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        cli("convert", str(model), str(tmp_path / "a"), "--quiet").refused(4, "are needed, 1.0 kB are free", "-q")
        assert not list(tmp_path.iterdir()), "nothing was done that could go on"
    monkeypatch.setattr(parts, "SHARD", 100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, before[1]))  # more than the first shards, less than another
        cli("convert", str(model), str(tmp_path / "b"), "--quiet").refused(4, "stays in b.part", "`ulimit -f`")
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
        alone = cli("convert", str(model), str(tmp_path / "c"), "--quiet")
        alone.refused(4, "`ulimit -f`")
        assert "stays in" not in alone.err and not (tmp_path / "c.part").exists(), "no shard was finished"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    finished = {path.name for path in (tmp_path / "b.part").rglob("*.safetensors*")}
    assert finished and all(name.endswith(".safetensors") for name in finished)
    assert cli("convert", str(model), str(tmp_path / "b"), "--quiet").code == 0


# Places


def _file(out: Path) -> None:
    out.write_bytes(b"mine")


def _of_others(out: Path) -> None:
    out.with_name("o.part").mkdir()
    (out.with_name("o.part") / "mine").touch()


def _bad_note(out: Path) -> None:
    out.with_name("o.part").mkdir()
    (out.with_name("o.part") / "qwenimg.json").write_bytes(b"{" * 1000)


def _other_options(out: Path) -> None:
    out.with_name("o.part").mkdir()
    (out.with_name("o.part") / "qwenimg.json").write_text('{"format": "1", "family": "qwen-image"}')


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_file, "exists already"),
        (lambda out: out.mkdir(), "exists already"),
        (lambda out: out.symlink_to("/nowhere"), "exists already"),
        (os.mkfifo, "exists already"),
        (lambda out: out.with_name("o.part").symlink_to("/tmp"), "is not the unfinished work"),
        (lambda out: os.mkfifo(out.with_name("o.part")), "is not the unfinished work"),
        (_of_others, "is not the unfinished work"),
        (_bad_note, "qwenimg.json"),
        (_other_options, "with other options (sources differs)"),
    ],
)
def test_places_that_are_taken(model: Path, tmp_path: Path, make: Callable[[Path], None], said: str) -> None:
    make(tmp_path / "o")
    before = sorted(tmp_path.rglob("*"))
    cli("convert", str(model), str(tmp_path / "o"), "--quiet").refused(2, said)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("out", "said"),
    [("no/such/folder", "does not exist"), ("file/x", "it is none"), ("x" * 300, "too long"), ("..", "exists already")],
)
def test_places_that_cannot_be(model: Path, tmp_path: Path, out: str, said: str) -> None:
    (tmp_path / "file").touch()
    cli("convert", str(model), f"{tmp_path}/{out}", "--quiet").refused(2, said)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_root_of_all_folders(model: Path) -> None:
    cli("convert", str(model), "/", "--quiet").refused(2, "/: names no folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(model: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    cli("convert", str(model), str(tmp_path / "o"), "--quiet").refused(2, "no permission")


def test_a_second_run_at_the_same_time(model: Path, tmp_path: Path) -> None:
    class Tries(Told):
        said = ""

        def plan(self, size: int, files: int) -> None:
            ran = cli("convert", str(model), str(tmp_path / "o"), "--quiet")
            self.said = f"{ran.code} {ran.err}"

    tries = Tries()
    module.convert(model, tmp_path / "o", LoadOptions(), tries)
    assert tries.said.startswith("2 ") and "another run is converting to it" in tries.said
    assert (tmp_path / "o" / "model_index.json").is_file()


def test_a_source_that_is_damaged_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    path = tmp_path / "m" / "transformer" / "diffusion_pytorch_model-00002-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-2:] = b"\x80\x7f"  # infinity
    path.write_bytes(raw)
    for more in ((), ("-q", "4")):
        cli("convert", str(tmp_path / "m"), str(tmp_path / "o"), "--quiet", *more).refused(5, "non-finite")
        assert {entry.name for entry in tmp_path.iterdir()} == {"m"}


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.sample(0)
def test_codes_of_a_file_stay_as_they_are(model: Path, tmp_path: Path, mode: str) -> None:
    """Blocks as MLX writes them in its other modes: the same tensors, and one picture on both backends."""
    shutil.copytree(model, tmp_path / "m")
    tensors = {}
    for path in sorted((tmp_path / "m" / "transformer").glob("*.safetensors*")):
        tensors |= mx.load(str(path)) if path.suffix == ".safetensors" else {}
        path.unlink()
    for name in [name for name in tensors if "blocks" in name and name.endswith("weight") and tensors[name].ndim == 2]:
        tensors[name], tensors[f"{name.removesuffix('.weight')}.scales"] = mx.quantize(tensors[name], mode=mode)
    mx.save_safetensors(str(tmp_path / "m" / "transformer" / "diffusion_pytorch_model.safetensors"), tensors)
    assert cli("convert", str(tmp_path / "m"), str(tmp_path / "o"), "-q", "text=8").code == 0
    made = mx.load(str(tmp_path / "o" / "transformer" / "diffusion_pytorch_model.safetensors"))
    assert made.keys() == tensors.keys()
    assert all(made[name].dtype == value.dtype and mx.array_equal(made[name], value) for name, value in tensors.items())
    said = json.loads((tmp_path / "o" / "transformer" / "config.json").read_bytes())["quantization"]
    assert said["mode"] == mode and said["img_in"] is False
    first, second = (
        qwenimg.load(tmp_path / "o", backend, "fp32")("a red circle", **ASK).pixels for backend in BACKENDS
    )
    assert np.abs(first.astype(int) - second).max() <= 1
