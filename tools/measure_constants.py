"""Writes common/parity/constants.json: K of every kind of block, the largest of both backends on CPUs,
with AVX-512 and with AVX2 alone (--add).

python tools/measure_constants.py              # two minutes, on the built-in model and the tests' tiny ones
python tools/measure_constants.py --add        # the same, and keeps what was recorded on another machine and is larger
python tools/measure_constants.py --add sd3    # on some models alone, by their names in WRITERS
python tools/measure_constants.py --check      # measures, and fails where a K has grown by half
"""

from __future__ import annotations

import json
import math
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  (the environment of the tests, before a framework is imported)
import numpy as np
from support import frameworks  # noqa: F401
from support.tiny_control import write_controlnet, write_patches
from support.tiny_edit import write_tiny_edit
from support.tiny_flux import write_tiny_flux
from support.tiny_flux2 import write_tiny_flux2
from support.tiny_model import write_tiny_model
from support.tiny_qwen21 import small_pictures, write_tiny_qwen21
from support.tiny_sd import write_tiny_sd
from support.tiny_sd3 import write_tiny_sd3
from support.tiny_zimage import write_tiny_zimage

import qwenimg
from qwenimg import backends
from qwenimg.common.families import registry
from qwenimg.common.families.qwen_image import references
from qwenimg.common.hub.resolve import resolve
from qwenimg.common.parity import check, constants, inputs, record
from qwenimg.common.parity.parity import STORED
from qwenimg.common.parity.passport.passport import Figure

ASKED: dict[str, Any] = {"prompt": "a large blue star", "width": 64, "height": 64, "steps": 2, "seed": 0}
POLICIES = ("fp32", "bf16,vae=bf16", "fp16-plain,vae=fp16")
CONTROLS = ("qwen_controlnet.", "qwen_patches.")  # alone of a run with loud control networks, as the tests' are
GROWTH = 1.5  # times the recorded K: more is a change for the worse, to be explained
ROUNDING = 0.42  # of one rounding to nearest, rms, in units of roundoff
WRITERS = {
    "qwen": write_tiny_model,
    "qwen-control": write_tiny_model,
    "qwen21": write_tiny_qwen21,
    "qwen21-text": partial(write_tiny_qwen21, tower=False),
    "edit": partial(write_tiny_edit, kind="2511"),
    "sd15": partial(write_tiny_sd, kind="sd15"),
    "sdxl": partial(write_tiny_sd, kind="sdxl"),
    "flux": partial(write_tiny_flux, variant="dev"),
    "flux2": partial(write_tiny_flux2, distilled=False),
    "sd3": write_tiny_sd3,
    "z-image": write_tiny_zimage,
}
MODELS = ("shapes", *WRITERS)


def main() -> None:
    references.AREA = 128**2  # of the pictures that a model sees
    chosen = [name for name in sys.argv[1:] if not name.startswith("--")]
    if unknown := set(chosen) - set(MODELS):
        sys.exit(f"no {', '.join(unknown)} in WRITERS")
    if chosen and not {"--add", "--check"} & {*sys.argv}:
        sys.exit("give --add: without it, what other models have is dropped")
    found: dict[str, dict[str, float]] = constants.document()["k"] if "--add" in sys.argv else {}
    with small_pictures(), tempfile.TemporaryDirectory() as folder:
        for kind, dtype, k in measured(Path(folder), chosen or MODELS):
            row = found.setdefault(kind, {})
            row[dtype] = max(row.get(dtype, 0.0), k)
    rounded = {kind: {d: float(f"{k:.3g}") for d, k in sorted(row.items())} for kind, row in sorted(found.items())}
    if "--check" in sys.argv:
        found_worse = grown((kind, dtype, k) for kind, row in rounded.items() for dtype, k in row.items())
        print("\n".join(found_worse) or "no K has grown by half")
        sys.exit(6 if found_worse else 0)
    about = {
        "command": "python tools/measure_constants.py",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(),
        "versions": {k: v for name in ("cpu", "mlx") for k, v in backends.load(name).versions().items()},
    }
    constants.path().write_text(json.dumps(about | {"k": rounded}, indent=1) + "\n", encoding="utf-8")


def grown(found: Iterable[tuple[str, str, float]]) -> list[str]:
    """Each K that is more than GROWTH times the recorded one."""
    return [
        f"{kind} {dtype}: K {k:.3g}, recorded {constants.recorded(kind, dtype)}"
        for kind, dtype, k in found
        if not k <= GROWTH * (constants.recorded(kind, dtype) or 0.0)
    ]


def measured(folder: Path, models: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Kind, dtype and K of every block of `models` under every policy, on both backends."""
    for name in models:
        place = resolve("shapes").folder if name == "shapes" else folder / name
        if name != "shapes":
            WRITERS[name](place)
        controls = written_controls(folder) if name == "qwen-control" else []
        refused = registry.of_folder(place).precision.refused
        for policy in POLICIES[:2] if "float16" in refused else POLICIES:
            found = of_model(str(place), policy, controls)
            yield from (row for row in found if not controls or row[0].startswith(CONTROLS))


def written_controls(folder: Path) -> list[str]:
    """Write control networks of each kind, and return their paths."""
    nets = (write_controlnet(folder / f"net{seed}", seed) for seed in (11, 12))
    return [*map(str, nets), str(write_patches(folder / "patches.safetensors"))]


def of_model(place: str, policy: str, controls: Sequence[str] = ()) -> Iterator[tuple[str, str, float]]:
    pipe, other = (qwenimg.load(place, backend, policy) for backend in ("cpu", "mlx"))
    picture = np.random.default_rng(2).integers(0, 256, (ASKED["height"], ASKED["width"], 3), np.uint8)
    control = {"control": "; ".join(f"{net}=a" for net in controls), "control_images": (picture,) * len(controls)}
    asked = ASKED | (control if controls else {})
    passport = record.record(pipe, asked, exact=pipe.engine, notify=lambda text: None)
    theirs = list(check.blocks(passport, other, networks=controls))
    parts = check.parts(inputs.weights(pipe, asked), pipe.precision)
    for recorded, judged in zip(passport.blocks, theirs, strict=True):
        part = parts[recorded.component]
        block = part.block(recorded.block, recorded.path)
        assert block is not None
        updates = part.updates(block, recorded.path)
        for kept, *both in zip(recorded.results, judged.recorded, judged.figures, strict=True):
            of = kept.gain * updates**0.5
            kind = f"{part.component.network}.{recorded.block}"
            known = constants.limit(kind, judged.dtype) * of
            yield kind, judged.dtype, max(own(figure, known) for figure in both) / of
    pipe.close()
    other.close()


def own(figure: Figure, known: float) -> float:
    """The error, less what the rounding of its stream makes. known: what was allowed for the block without that."""
    stored = ROUNDING * max(0.0, figure.allowed - known) / STORED
    return math.sqrt(max(0.0, figure.error**2 - stored**2))


if __name__ == "__main__":
    main()
