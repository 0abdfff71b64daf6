"""Every layout of files draws, is described and is refused as it was recorded; see `tools/write_golden.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import golden, tiny_zimage
from support.golden import FAMILIES, differences, inside, latents, load, record

# Of the latents' deviation. Another processor sums in another order, and a random weight that differs in its last bit
# may round to another code of 4 bits.
LIMIT = 2e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(0, rest=3)
def test_as_recorded(family: str, tmp_path: Path) -> None:
    old, new = load(family), record(family, tmp_path)
    before, after = old.pop("latents"), new.pop("latents")
    lines, worst = differences(old, new), 0.0
    assert not lines, "\n".join(lines)
    assert before.keys() == after.keys()
    for name, one in before.items():
        other = after[name]
        assert one.keys() == other.keys() and one.get("refused") == other.get("refused"), name
        if "values" in one:
            error = difference(one, other)
            assert error <= LIMIT, f"{name}: {error:.1e}"
            worst = max(worst, error)
    print(f"{family}: {len(before)} latents, at most {worst:.1e} of their deviation (limit {LIMIT})")


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two latents, in their deviation."""
    assert one["shape"] == other["shape"]
    pairs = [(one[key], other[key]) for key in ("values", "mean", "std")]
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs) / float(one["std"])


def test_enough_is_recorded() -> None:
    found = [load(family) for family in FAMILIES]
    refused = sum(row["exit"] != 0 for one in found for row in one["refusals"].values())
    drawn = sum("sha256" in row for one in found for row in one["latents"].values())
    print(f"{refused} refusals, {drawn} latents, {sum(len(one['info']) for one in found)} files described")
    assert refused >= 600 and drawn >= 200
    assert all(
        len(line) <= 300
        for one in found
        for row in one["refusals"].values()
        if row["exit"]
        for line in row["lines"][-1:]
    )


def test_a_folder_is_as_recorded_and_a_bit_of_a_weight_and_a_word_of_a_message_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path):
        tiny_zimage.write_tiny_zimage(Path("z-image"), shard="5GB")
        [file] = Path("z-image/transformer").glob("*.safetensors")
        row = {"model": "z-image"}
        right = latents(row, "cpu")
        assert right == latents(row, "cpu")
        error = difference(load("z-image")["latents"]["z-image, folder, cpu"], right)
        print(f"a folder of Z-Image: {error:.1e} of the recorded deviation (limit {LIMIT})")
        assert error <= LIMIT
        values: dict[str, Any] = load_file(file)
        name = next(name for name in values if name.endswith("feed_forward.w1.weight"))
        values[name].view(-1).view(torch.int32)[0] ^= 1 << 22
        file.unlink()
        save_file(values, file)
        assert latents(row, "cpu")["sha256"] != right["sha256"]
        said = golden.told("info", "nowhere")
    assert said["exit"] != 0
    other = said | {"lines": [line.replace("error", "fault") for line in said["lines"]]}
    assert differences({"info": {"x": said}}, {"info": {"x": said}}) == []
    assert len(differences({"info": {"x": said, "y": said}}, {"info": {"x": other, "z": said}})) == 3
