"""Passports of runs of Stable Diffusion whose prompts have pictures, by IP-Adapters, and embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import embedding_files
from support import mutants_sd_prompts as faults
from support.cli_runner import cli
from support.mutant import Patch, side
from support.passport_mutants import cut
from support.passport_runs import RecordedRun, of_tiny_sd
from support.tiny_ip_adapter import write_adapter
from support.tiny_sd import write_tiny_sd

from qwenimg.common.parity import summary
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.embedding_text import Embedding

BACKENDS = ("cpu", "mlx")
RNG = np.random.default_rng(2)
PICTURES = [RNG.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(2)]
ASKED: dict[str, Any] = {
    "prompt": "a ring", "width": 64, "height": 48, "steps": 3, "seed": 3, "guidance": 4.0, "negative_prompt": "blue",
}  # fmt: skip
HERE = {"pictures": "ip-adapter 1", "embedding": "text_encoder"}  # the component that is shown for each


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    """Two adapters, one of them in a part of the steps and with two pictures, of which one counts behind a mask; and an
    embedding of three vectors."""
    place = tmp_path_factory.mktemp("passports")
    base, plus = (str(write_adapter(place / "adapters", "sd15", kind)) for kind in ("base", "plus"))
    hole = np.zeros((48, 64, 3), np.uint8)
    hole[8:40, 16:50] = 255
    pictures = [
        Control(base, "a", "", 0.7, 0.0, 0.7, picture=PICTURES[0]),
        Control(base, "b", "also", picture=PICTURES[1]),
        Control(base, "c", "mask", picture=hole),
        Control(base, "d", "mask", picture=255 - hole),
        Control(plus, "a", parts=(("style", 1.2), ("mid_block", 0.4)), picture=PICTURES[1]),
    ]
    file = embedding_files.write(place / "cat.safetensors", "sdxl", 3, 1)
    cat = {"prompt": "a cat on a ring", "embedding": (Embedding(str(file)),)}
    return {
        "pictures": of_tiny_sd(place, "sd15", "pictures", ASKED | {"control": pictures}),
        "embedding": of_tiny_sd(place, "sdxl", "embedding", ASKED | cat),
    }


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.sample(0)
def test_it_holds_on_mlx(recorded: dict[str, RecordedRun], kind: str) -> None:
    one = recorded[kind]
    judged, drawn = one.judged("mlx", one.passport)
    print(*summary.lines(judged, drawn), sep="\n")
    assert summary.verdict(judged, drawn) == ""
    assert one.passport.picture is not None
    kinds = {(block.component, block.block) for block in one.passport.blocks}
    stations = {station.name: station for station in drawn.stations}
    if kind == "pictures":
        assert kinds >= {("ip-adapter 1", "pair"), ("ip-adapter 1", "projection"), ("ip-adapter 2", "layer")}
        assert kinds >= {("image encoder 1", "layer"), ("image encoder 1", "end")}
        names = ("image encoder 1 1", "image encoder 1 2", "ip-adapter 1 1", "ip-adapter 1 2", "ip-adapter 2 1")
        assert [one.parts for one in one.passport.picture.controls][-1] == {"style": 1.2, "mid_block": 0.4}
    else:
        names = ("text_encoder 1", "text_encoder_2 1")
        assert [*one.passport.picture.embeddings] == ["cat"]
    errors = [stations[name].output_error for name in names]
    print(errors)
    assert all(error is not None and 0 < error < 2e-5 for error in errors)


FAULTS = {
    "pictures": {
        faults.keys_for_values: "ip-adapter 1.ip_adapter.0: error",
        faults.projection_not_normed: "ip-adapter 1.image_proj: error",
        faults.everywhere: "step 1: differs",
        faults.empty_is_the_picture: "ip-adapter 1 1: what enters it differs",
        faults.encoder_states_of_the_last_layer: "image encoder 1 1: differs",
    },
    "embedding": {
        faults.vectors_in_reverse: "text_encoder 1: what enters it differs",
        faults.vectors_one_late: "text_encoder 1: what enters it are other whole numbers",
        faults.pooled_at_the_embedding: "text_encoder 1: differs",
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "fault"),
    [pytest.param(kind, fault, id=f"{kind}-{fault.__name__}") for kind, row in FAULTS.items() for fault in row],
)
@pytest.mark.sample(0)
def test_a_fault_is_named_where_it_is_made(
    recorded: dict[str, RecordedRun], monkeypatch: pytest.MonkeyPatch, kind: str, fault: Any, backend: str
) -> None:
    one = recorded[kind]
    blocks = tuple(
        block.name
        for block in one.passport.blocks
        if block.component == HERE[kind] and block.block in ("pair", "projection", "layer")
    )
    fault(Patch(monkeypatch, side(backend)))
    judged, drawn = one.judged(backend, cut(one.passport, blocks))
    failures = [f"{row.name}: {why}" for row in judged for why in row.failures] + list(drawn.failures)
    print(*failures[:3], sep="\n")
    assert failures[0].startswith(FAULTS[kind][fault])


# By the command line


@pytest.mark.sample(0)
def test_what_is_given_again(tmp_path: Path) -> None:
    write_tiny_sd(tmp_path / "sd15", "sd15")
    adapter, other = (str(write_adapter(tmp_path / "adapters", "sd15", "base", seed)) for seed in (41, 42))
    cat, dog = (
        str(embedding_files.write(tmp_path / f"{name}.pt", "sd15", 2, seed)) for seed, name in enumerate(("cat", "dog"))
    )
    Image.fromarray(PICTURES[0]).save(tmp_path / "a.png")
    model, path = str(tmp_path / "sd15"), str(tmp_path / "p.safetensors")
    words = ("--prompt", "a cat", "--embedding", cat)
    pictures = ("--ip-adapter", f"{adapter}:0.6", "--ip-image", str(tmp_path / "a.png"))
    size = ("--steps", "1", "--size", "32x32", "--sampled")
    ran = cli("parity", "record", model, "--backend", "cpu", *size, *words, *pictures, "-o", path)
    assert ran.code == 0, ran.err

    def checked(*given: str) -> Any:
        return cli("parity", "check", path, model, "--backend", "cpu", "--blocks", *given)

    assert checked("--embedding", cat, "--ip-adapter", adapter).code == 0
    assert checked("--embedding", f"cat={cat}", "--control", adapter).code == 0
    checked("--ip-adapter", adapter).refused(2, "recorded with --embedding cat; give it as NAME=FILE")
    checked("--embedding", f"cat={dog}", "--ip-adapter", adapter).refused(5, "--embedding cat: another file")
    checked("--embedding", dog, "--ip-adapter", adapter).refused(2, "recorded with --embedding cat")
    checked("--embedding", cat).refused(2, "recorded with --control")
    checked("--embedding", cat, "--ip-adapter", other).refused(5, "another network than was recorded")
    plain = str(tmp_path / "plain.safetensors")
    assert cli("parity", "record", model, "--backend", "cpu", *size, "-o", plain).code == 0
    ran = cli("parity", "check", plain, model, "--backend", "cpu", "--blocks", "--embedding", cat)
    ran.refused(2, "recorded without --embedding; leave it out")
