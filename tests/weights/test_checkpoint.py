"""Finding, planning and reading the weights of a component: refusals by class, values bit for bit."""

import gc
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from support.refusals import refused, safetensors_bytes, tensor

from qwenimg.common.formats.files import find_files
from qwenimg.common.weights.keys import plan
from qwenimg.common.weights.plan import ParamUse
from qwenimg.common.weights.values import read

SINGLE = "diffusion_pytorch_model.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"
SHARDS = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def weights():
    """Odd shapes, all three dtypes, values that exercise signs, subnormals and extremes."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "proj.weight": normal(5, 3).to(torch.bfloat16),
        "proj.bias": torch.tensor([0.1, -0.0, 3e38, 1e-40, 7.0]).to(torch.bfloat16),
        "norm.gamma": normal(7, 1, 1, 1) * 1e-3,
        "conv.weight": normal(4, 3, 3, 2, 5).half(),
        "conv.bias": torch.tensor([65504.0, 6e-8, -1.5, 0.0]).half(),
        "scale": torch.tensor(2.5),
        "nothing": torch.zeros(3, 0),
    }


def shapes(tensors):
    return {name: tuple(t.shape) for name, t in tensors.items()}


def save(folder, tensors, name=SINGLE):
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, folder / name)
    return folder


def save_shards(folder, tensors, weight_map=None):
    """Two shards and an index, which is `weight_map` if given."""
    names = sorted(tensors)
    truth = {}
    for shard, part in zip(SHARDS, (names[:3], names[3:]), strict=True):
        save(folder, {name: tensors[name] for name in part}, shard)
        truth |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": truth if weight_map is None else weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def bits(array):
    return array.shape, array.dtype.itemsize, array.tobytes()


def expected_bits(t):
    array = t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()
    return array.shape, array.dtype.itemsize, array.tobytes()


# Reading


@pytest.mark.parametrize("layout", [save, save_shards])
def test_values_are_those_of_torch_bit_for_bit(tmp_path, layout):
    tensors = weights()
    planned = plan(layout(tmp_path / "unet", tensors), "transformer", shapes(tensors))
    assert planned.entries.keys() == tensors.keys()
    for name, entry in planned.entries.items():
        array = read(entry)
        assert bits(array) == expected_bits(tensors[name]), name
        assert array.dtype == {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[entry.source.first.dtype]
        if array.size:
            assert array.flags.writeable and array.flags.c_contiguous
    assert planned.parameters == sum(t.numel() for t in tensors.values())
    assert planned.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert planned.dtypes == {"BF16": 2, "F16": 2, "F32": 3}
    planned.close()
    planned.close()


def test_entries_lie_in_the_order_of_the_disk(tmp_path):
    tensors = weights()
    planned = plan(save_shards(tmp_path / "unet", tensors), "transformer", shapes(tensors))
    places = [(piece.file.path.name, piece.begin) for e in planned.entries.values() for piece in e.source.pieces]
    assert places == sorted(places)
    planned.close()


def test_a_file_larger_than_one_piece_of_reading(tmp_path):
    tensors = {"big": torch.arange(700_001, dtype=torch.float32), "small": torch.ones(3)}
    planned = plan(save(tmp_path / "unet", tensors), "transformer", shapes(tensors))
    assert np.array_equal(read(planned.entries["big"]), tensors["big"].numpy())
    planned.close()


def test_last_temporal_tap_and_gains(tmp_path):
    """What a convolution over time makes of one frame, when the frames before it are zero, is its last tap."""
    tensors = weights()
    uses = {
        "conv.weight": ParamUse((4, 3, 2, 5), "last_tap"),
        "norm.gamma": ParamUse((7,)),
        "conv.bias": ParamUse((4,)),
    }
    planned = plan(save(tmp_path / "vae", tensors), "vae", shapes(tensors), uses=lambda manifest: uses)
    assert planned.entries.keys() == uses.keys()
    assert planned.nbytes == (math.prod((4, 3, 2, 5)) + 4) * 2 + 7 * 4
    tap = torch.from_numpy(read(planned.entries["conv.weight"])).double()
    frame = torch.randn(1, 3, 1, 6, 9, generator=torch.Generator().manual_seed(1)).double()
    padded = torch.nn.functional.pad(frame, (0, 0, 0, 0, 2, 0))
    over_time = torch.nn.functional.conv3d(padded, tensors["conv.weight"].double())[:, :, 0]
    flat = torch.nn.functional.conv2d(frame[:, :, 0], tap)
    print("largest difference", (over_time - flat).abs().max().item())
    assert torch.allclose(over_time, flat, rtol=0, atol=1e-12)  # float64 sums in another order
    assert np.array_equal(read(planned.entries["norm.gamma"]), tensors["norm.gamma"].numpy().reshape(7))
    planned.close()


def test_only_and_rename(tmp_path):
    tensors = {"model." + name: t for name, t in weights().items()} | {"model.position_ids": torch.arange(9)}
    manifest = shapes(weights())

    def rename(key):
        return None if key.endswith("position_ids") else key.removeprefix("model.")

    planned = plan(save(tmp_path / "unet", tensors), "transformer", manifest, rename=rename)
    part = planned.only(lambda name: name.startswith("conv."))
    assert [(e.name, e.source.first.key) for e in part.entries.values()] == [
        (name, "model." + name) for name in planned.entries if name.startswith("conv.")
    ]
    assert part.parameters == 4 * 3 * 3 * 2 * 5 + 4
    part.close()
    assert all(file.stream.closed for file in planned.files)


# Finding


def write(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_plain_files_come_before_variants(tmp_path):
    names = [f"model{variant}.safetensors" for variant in ("", ".fp16", ".non_ema")]
    folder = write(tmp_path / "a", *names, "model.fp16.bin", "config.json")
    assert find_files(folder).files == (folder / "model.safetensors",)
    folder = write(tmp_path / "b", "diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin")
    assert find_files(folder).files == (folder / "diffusion_pytorch_model.fp16.safetensors",)
    single = folder / "diffusion_pytorch_model.bin"
    assert find_files(single).files == (single,)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "no safetensors"),
        (["model.safetensors", SINGLE], "keep the one"),
        ([SINGLE, INDEX], "keep the one"),
        (["model.fp16.safetensors", "model.bf16.safetensors"], "keep the one"),
        (["one.safetensors", "two.safetensors"], "one.safetensors, two.safetensors"),
        (["diffusion_pytorch_model.bin"], "pickles are not read"),
        (["v1-5.ckpt"], "pickles are not read"),
        (["pytorch_model.pt"], "pickles are not read"),
        (SHARDS, INDEX),
        (["model.fp16-00001-of-00002.safetensors"], "model.fp16.safetensors.index.json"),
    ],
)
def test_folders_without_a_clear_choice(tmp_path, names, reason):
    assert reason in refused(find_files, write(tmp_path / "unet", *names))


def test_missing_folder(tmp_path):
    assert "does not exist" in refused(find_files, tmp_path / "unet")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refused(find_files, loop)
    refused(find_files, tmp_path / "nu\0ll")


# Class C: shards and index


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        ("../secret.safetensors", "plain file name"),
        ("/etc/passwd", "plain file name"),
        ("..\\secret.safetensors", "plain file name"),
        ("%2e%2e%2fsecret.safetensors", "plain file name"),
        ("a\0.safetensors", "plain file name"),
        ("model.bin", "plain file name"),
        ("\x1b[2J.safetensors", "plain file name"),
        (SHARDS[0] + "\n", "plain file name"),
        ("missing.safetensors", "missing.safetensors: does not exist"),
        (SHARDS[0].upper(), "plain file name"),
        (3, "not a name"),
        (None, "not a name"),
        (["a"], "not a name"),
    ],
)
def test_shard_names(tmp_path, shard, reason):
    tensors = weights()
    folder = save_shards(tmp_path / "unet", tensors, dict.fromkeys(tensors, shard))
    assert reason in refused(plan, folder, "transformer", shapes(tensors))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[]", "weight_map"),
        ("{}", "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {}}', "0 shards"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "occurs twice"),
        ('{"weight_map": ' + "[" * 100_000, "deep"),
        (json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(101)}}), "101 shards"),
        ('{"weight_map": {' + ", ".join(f'"{i}": "x.safetensors"' for i in range(1_000_000)) + "}}", "values"),
    ],
)
def test_broken_index(tmp_path, text, reason):
    folder = write(tmp_path / "unet")
    (folder / INDEX).write_text(text)
    message = refused(plan, folder, "transformer", {})
    assert INDEX in message and reason in message


def test_index_without_metadata_is_enough(tmp_path):
    tensors = weights()
    folder = save_shards(tmp_path / "unet", tensors)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    plan(folder, "transformer", shapes(tensors)).close()


def test_index_and_shards_must_agree(tmp_path):
    tensors = weights()
    folder = save_shards(tmp_path / "unet", tensors)
    truth = json.loads((folder / INDEX).read_text())["weight_map"]

    def says(weight_map, manifest=None):
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return refused(plan, folder, "transformer", manifest or shapes(tensors))

    wrong = truth | {"conv.bias": SHARDS[1]}
    assert f"places tensor 'conv.bias' in {SHARDS[1]}" in says(wrong)
    assert "'ghost'" in says(truth | {"ghost": SHARDS[0]})
    text = says({name: shard for name, shard in truth.items() if name != "conv.weight"})
    assert SHARDS[0] in text and "'conv.weight' is not in the index" in text
    save(folder, {"conv.bias": tensors["conv.bias"] + 1, **{n: tensors[n] for n in sorted(tensors)[3:]}}, SHARDS[1])
    assert f"'conv.bias' is also in {SHARDS[0]}" in says(truth)


def test_links_to_shards(tmp_path):
    """Links inside the model and into the cache's blobs are followed; links elsewhere are not."""
    tensors = weights()
    real = save_shards(tmp_path / "real", tensors)
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in (INDEX, *SHARDS):
        (outside / name).symlink_to(real / name)
    assert "outside the model" in refused(plan, outside, "transformer", shapes(tensors))

    repo = tmp_path / "hub" / "models--Some--Model"
    snapshot = repo / "snapshots" / "0123abcd" / "transformer"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for name in (INDEX, *SHARDS):
        (repo / "blobs" / f"hash-of-{name}").write_bytes((real / name).read_bytes())
        (snapshot / name).symlink_to(Path("../../../blobs") / f"hash-of-{name}")
    plan(snapshot, "transformer", shapes(tensors)).close()
    whole = tmp_path / "whole"
    whole.symlink_to(snapshot)
    plan(whole, "transformer", shapes(tensors)).close()

    other = tmp_path / "hub" / "models--Other--Model" / "blobs"
    other.mkdir(parents=True)
    (repo / "blobs" / f"hash-of-{SHARDS[0]}").rename(other / "x")
    (snapshot / SHARDS[0]).unlink()
    (snapshot / SHARDS[0]).symlink_to(other / "x")
    assert "outside the model" in refused(plan, snapshot, "transformer", shapes(tensors))
    (snapshot / SHARDS[0]).unlink()
    (snapshot / SHARDS[0]).symlink_to(SHARDS[0])
    refused(plan, snapshot, "transformer", shapes(tensors))


# Class E: weights against the manifest


def faulty(change):
    tensors = weights()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (faulty(lambda t: t.pop("conv.bias")), "lacks tensor 'conv.bias'"),
        (faulty(lambda t: [t.pop(name) for name in ("conv.bias", "scale", "nothing")]), "(and 2 more)"),
        (faulty(lambda t: t.update(ghost=torch.ones(2))), "unknown tensor 'ghost'"),
        (
            faulty(lambda t: t.update({"x.scale": t.pop("scale")})),
            "lacks tensor 'scale' and holds unknown tensor 'x.scale'",
        ),
        (faulty(lambda t: t.update({"proj.weight": t["proj.weight"].T.contiguous()})), "[3, 5], expected [5, 3]"),
        (faulty(lambda t: t.update(scale=torch.ones(1))), "[1], expected []"),
        (faulty(lambda t: t.update({"proj.bias": torch.arange(5)})), "'proj.bias' is I64"),
        (faulty(lambda t: t.update({"proj.bias": torch.ones(5).bool()})), "is BOOL"),
        (faulty(lambda t: t.update({"proj.bias": torch.ones(5).to(torch.float8_e8m0fnu)})), "is F8_E8M0"),
        ({}, "no tensors"),
    ],
)
def test_weights_that_are_not_the_manifests(tmp_path, tensors, reason):
    folder = save(tmp_path / "unet", tensors)
    text = refused(plan, folder, "transformer", shapes(weights()))
    assert SINGLE in text and reason in text


def test_two_names_for_one_parameter(tmp_path):
    tensors = {"a": torch.ones(2), "old.a": torch.ones(2)}
    text = refused(plan, save(tmp_path / "u", tensors), "vae", {"a": (2,)}, rename=lambda k: k.removeprefix("old."))
    assert "'old.a'" in text and "'a'" in text


def test_unread_tensors_are_checked_too(tmp_path):
    tensors = weights()
    folder = save(tmp_path / "vae", tensors)
    manifest = shapes(tensors) | {"proj.weight": (5, 4)}
    assert "'proj.weight'" in refused(plan, folder, "vae", manifest, uses=lambda manifest: {"scale": ParamUse(())})


def test_a_manifest_at_odds_with_its_forward_is_our_mistake(tmp_path):
    folder = save(tmp_path / "vae", weights())
    wrong = (
        ("conv.weight", ParamUse((3, 4, 2, 5), "last_tap")),
        ("conv.weight", ParamUse((4, 3, 2, 5))),
        ("norm.gamma", ParamUse((6,))),
    )
    for name, use in wrong:
        with pytest.raises(AssertionError):
            plan(folder, "vae", shapes(weights()), uses=lambda manifest: {name: use})  # noqa: B023


# Class B: files that change


def planned_single(tmp_path, size=400_000):
    tensors = {"a": torch.arange(size, dtype=torch.float32)}
    folder = save(tmp_path / "unet", tensors)
    return folder / SINGLE, plan(folder, "transformer", shapes(tensors)).entries["a"]


def test_truncated_after_planning(tmp_path):
    path, entry = planned_single(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert "cut short while" in refused(read, entry)


def test_overwritten_after_planning(tmp_path):
    path, entry = planned_single(tmp_path)
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"evil")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert "changed while" in refused(read, entry)


def test_grown_after_planning(tmp_path):
    path, entry = planned_single(tmp_path)
    os.truncate(path, path.stat().st_size + 1)
    assert "changed while" in refused(read, entry)


def test_replaced_or_deleted_after_planning_reads_what_was_planned(tmp_path):
    path, entry = planned_single(tmp_path)
    new = tmp_path / "new"
    new.write_bytes(safetensors_bytes({"a": tensor([1], 0, 4)}, b"evil"))
    new.replace(path)
    path.unlink()
    assert np.array_equal(read(entry), np.arange(400_000, dtype=np.float32))


def test_bad_component_closes_every_file(tmp_path):
    tensors = weights()
    folder = save_shards(tmp_path / "unet", tensors)
    gc.collect()  # what other tests left open
    before = len(list(Path("/dev/fd").iterdir()))
    refused(plan, folder, "transformer", shapes(tensors) | {"ghost": (1,)})
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_refusal_imports_no_framework(tmp_path):
    """A bad file must be named before anything slow is imported."""
    folder = save(tmp_path / "unet", {"a": torch.ones(2)})
    code = f"""
import sys
from pathlib import Path
from qwenimg.common.weights.keys import plan
from qwenimg.common.base.errors import ModelError
try:
    plan(Path({str(folder)!r}), "transformer", {{"b": (2,)}})
except ModelError as error:
    print(error)
print(sorted({{"torch", "mlx", "numpy", "safetensors", "PIL", "tokenizers", "huggingface_hub"}} & set(sys.modules)))
"""
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(source)}
    )
    message, loaded = done.stdout.splitlines()
    assert "lacks tensor 'b'" in message and loaded == "[]" and not done.stderr
