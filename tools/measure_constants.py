"""Writes common/parity/constants.json: K of every kind of block, the largest of both backends on CPUs,
with AVX-512 and with AVX2 alone (--add). MLX computes with the BLAS of its own wheel, as users on Linux have it: its
sums are added up number by number, so that its errors are larger than those of the library that the tests load.

python tools/measure_constants.py              # the built-in model and the tests' tiny ones in every precision, and in
                                               # float32 twelve folders of each family of random sizes: ten minutes
python tools/measure_constants.py --add        # the same, and keeps what was recorded on another machine and is larger
python tools/measure_constants.py --add sd3    # some models alone, by their names in MODELS (random:sd3: random sizes)
python tools/measure_constants.py --check      # measures, and fails where a K has grown by half
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  (the environment of the tests, before a framework is imported)
import numpy as np
import torch
from support import random_folders
from support.tiny_anima import write_tiny_anima
from support.tiny_auraflow import write_tiny_auraflow
from support.tiny_cascade import write_tiny_cascade
from support.tiny_chroma import write_tiny_chroma
from support.tiny_control import write_controlnet, write_patches
from support.tiny_edit import write_tiny_edit
from support.tiny_ernie import write_tiny_ernie
from support.tiny_flux import write_tiny_flux
from support.tiny_flux2 import write_tiny_flux2
from support.tiny_flux2_dev import write_tiny_flux2_dev
from support.tiny_flux3 import write_tiny_flux3
from support.tiny_hunyuan import write_tiny_hunyuan
from support.tiny_krea2 import write_tiny_krea2
from support.tiny_longcat import write_tiny_longcat
from support.tiny_lumina import write_tiny_lumina
from support.tiny_model import write_tiny_model
from support.tiny_ovis import write_tiny_ovis
from support.tiny_pixart import write_tiny_pixart
from support.tiny_qwen21 import small_pictures, write_tiny_qwen21
from support.tiny_sana import write_tiny_sana
from support.tiny_sd import write_tiny_sd
from support.tiny_sd3 import write_tiny_sd3
from support.tiny_zimage import write_tiny_zimage

import qwenimg
from qwenimg import backends
from qwenimg.common.families import registry
from qwenimg.common.families.longcat import references as longcat_references
from qwenimg.common.families.qwen_image import references
from qwenimg.common.hub.resolve import resolve
from qwenimg.common.parity import check, constants, inputs, record
from qwenimg.common.parity.parity import STORED
from qwenimg.common.parity.passport.passport import Figure
from qwenimg.common.request.control_text import Control

ASKED: dict[str, Any] = {"prompt": "a large blue star", "width": 64, "height": 64, "steps": 2, "seed": 0}
POLICIES = ("fp32", "bf16,vae=bf16", "fp16-plain,vae=fp16")
# Alone of a run with loud control networks, as the tests' are: on the latents of such a run random UNets have lost
# 20,000 units of roundoff, more than the largest gain accounts for
CONTROLS = tuple(
    f"{network}."
    for network in (
        "clip_vision", "flux_controlnet", "ip_adapter", "qwen_controlnet", "qwen_patches", "redux", "siglip_vision",
        "t2i_adapter", "unet_controlnet", "unet_controlnet_union", "zimage_control",
    )
)  # fmt: skip
TINY_VAES = (
    "tiny_vae.",
    "tiny_video_vae.",
)  # the same: the other networks of such a run have been measured without one
GROWTH = 1.5  # times the recorded K: more is a change for the worse, to be explained
ROUNDING = 0.6  # of the two additions to a stream in a block, each rounding by 0.42 rms, in units of roundoff
# Over the root of the number of values: two standard deviations of that rms. On the stream of a ControlNet Union's
# token, 12 values of 100 times its update, the rms itself gave K 43, where the block's own K is 2
SCATTER = 2.0
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
    "flux2-kv": partial(write_tiny_flux2, distilled=True, kv=True),
    "flux2-dev": write_tiny_flux2_dev,
    "flux3": partial(write_tiny_flux3, distilled=True),
    "sd3": write_tiny_sd3,
    "cascade": write_tiny_cascade,
    "chroma": write_tiny_chroma,
    "ernie": write_tiny_ernie,
    "krea2": write_tiny_krea2,
    "anima": write_tiny_anima,
    "auraflow": write_tiny_auraflow,
    "lumina": write_tiny_lumina,
    "sana": write_tiny_sana,
    "sana-sprint": partial(write_tiny_sana, kind="sana-sprint"),
    "ovis": write_tiny_ovis,
    "hunyuan": partial(write_tiny_hunyuan, kind="hunyuan-1.1"),
    "pixart": partial(write_tiny_pixart, kind="pixart-alpha"),
    "longcat": partial(write_tiny_longcat, kind="text"),
    "longcat-edit": partial(write_tiny_longcat, kind="edit"),
    "z-image": write_tiny_zimage,
}
RANDOM, SEEDS = "random:", range(1, 13)  # folders of random sizes, and those of each family
MODELS = ("shapes", *WRITERS, *(f"{RANDOM}{family}" for family in random_folders.FAMILIES))


def main() -> None:
    torch.set_num_threads(1)
    references.AREA = longcat_references.AREA = 128**2  # of the pictures that a model sees
    chosen = [name for name in sys.argv[1:] if not name.startswith("--")]
    if unknown := set(chosen) - set(MODELS):
        sys.exit(f"no {', '.join(unknown)} in WRITERS")
    if chosen and not {"--add", "--check"} & {*sys.argv}:
        sys.exit("give --add: without it, what other models have is dropped")
    before = constants.document() if "--add" in sys.argv else {"k": {}, "configurations": {}}
    found: dict[str, dict[str, float]] = before["k"]
    configurations: dict[str, dict[str, int]] = before["configurations"]
    counts = Counter[tuple[str, str]]()
    with small_pictures(), tempfile.TemporaryDirectory() as folder:
        for model, rows in measured(Path(folder), chosen or MODELS):
            for kind, dtype, k in rows:
                row = found.setdefault(kind, {})
                row[dtype] = max(row.get(dtype, 0.0), k)
            counts.update({(kind.partition(".")[0], model) for kind, dtype, _ in rows if dtype == "float32"})
    for (network, model), count in counts.items():
        configurations.setdefault(network, {})[model] = count
    rounded = {kind: {d: float(f"{k:.3g}") for d, k in sorted(row.items())} for kind, row in sorted(found.items())}
    if "--check" in sys.argv:
        found_worse = grown((kind, dtype, k) for kind, row in rounded.items() for dtype, k in row.items())
        print("\n".join(found_worse) or "no K has grown by half")
        sys.exit(6 if found_worse else 0)
    about: dict[str, Any] = {
        "command": "python tools/measure_constants.py",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(),
        "versions": {k: v for name in ("cpu", "mlx") for k, v in backends.load(name).versions().items()},
    }
    about["configurations"] = {network: dict(sorted(row.items())) for network, row in sorted(configurations.items())}
    constants.path().write_text(json.dumps(about | {"k": rounded}, indent=1) + "\n", encoding="utf-8")


def grown(found: Iterable[tuple[str, str, float]]) -> list[str]:
    """Each K that is more than GROWTH times the recorded one."""
    return [
        f"{kind} {dtype}: K {k:.3g}, recorded {constants.recorded(kind, dtype)}"
        for kind, dtype, k in found
        if not k <= GROWTH * (constants.recorded(kind, dtype) or 0.0)
    ]


def measured(folder: Path, models: Sequence[str]) -> Iterator[tuple[str, list[tuple[str, str, float]]]]:
    """Of each configuration of `models` its name in MODELS, and kind, dtype and K of every block, on both backends and
    under each of its policies."""
    for name in models:
        if name.startswith(RANDOM):
            for seed in SEEDS:
                yield name, of_random(folder / f"{seed}", name.removeprefix(RANDOM), seed)
            continue
        place = resolve("shapes").folder if name == "shapes" else folder / name
        if name != "shapes":
            WRITERS[name](place)
        controls = written_controls(folder) if name == "qwen-control" else []
        refused = registry.of_folder(place).precision.refused
        policies = POLICIES[:2] if "float16" in refused else POLICIES
        asked = ASKED | ({"pictures": 1} if name in ("edit", "longcat-edit", "flux2-kv") else {})
        found = [row for policy in policies for row in of_model(str(place), policy, asked, controls=controls)]
        yield name, [row for row in found if not controls or row[0].startswith(CONTROLS)]


def of_random(folder: Path, family: str, seed: int) -> list[tuple[str, str, float]]:
    """The same of the folder of random sizes `seed` of a family, in float32, recorded on either backend in turn."""
    place = folder / family
    random_folders.write(place, family, seed)
    controls = random_folders.write_controls(place, seed) if family in random_folders.CONTROLLED else []
    tiny = random_folders.write_tiny_vae(place, family, seed) if family in random_folders.TINY_VAES else None
    asked, backends = random_folders.asked(family, seed), ("cpu", "mlx") if seed % 2 else ("mlx", "cpu")
    found = list(of_model(str(place), "fp32", asked, controls=controls, recording=backends, vae=tiny))
    shutil.rmtree(folder)
    kept = CONTROLS if controls else TINY_VAES if tiny else ("",)
    return [row for row in found if row[0].startswith(kept)]


def written_controls(folder: Path) -> list[str]:
    """Write control networks of each kind, and return their paths."""
    nets = (write_controlnet(folder / f"net{seed}", seed) for seed in (11, 12))
    return [*map(str, nets), str(write_patches(folder / "patches.safetensors"))]


def of_model(
    place: str,
    policy: str,
    asked: Mapping[str, Any] = ASKED,
    *,
    controls: Sequence[str] = (),
    recording: Sequence[str] = ("cpu", "mlx"),
    vae: Path | None = None,
) -> Iterator[tuple[str, str, float]]:
    pipe, other = (qwenimg.load(place, backend, policy, vae=vae) for backend in recording)
    picture = np.random.default_rng(2).integers(0, 256, (asked["height"], asked["width"], 3), np.uint8)
    asked = {**asked, **({"control": [_control(net, picture) for net in controls]} if controls else {})}
    exact = {pipe.engine.name: pipe.engine, other.engine.name: other.engine}["cpu"]
    passport = record.record(pipe, asked, exact=exact, notify=lambda text: None)
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
            size = math.prod(kept.shape)
            yield kind, judged.dtype, max(own(figure, known, size) for figure in both) / of
    pipe.close()
    other.close()


def _control(net: str, picture: np.ndarray) -> Control:
    """The control of a run by the network `net`: a Union's has a kind."""
    return Control(net, "picture", "depth" * net.endswith("union"), picture=picture)


def own(figure: Figure, known: float, size: int) -> float:
    """The error, less what the rounding of its stream makes. known: what was allowed for the block without that; size:
    of the result."""
    share = min(STORED, ROUNDING * (1 + SCATTER / math.sqrt(size)))
    stored = share * max(0.0, figure.allowed - known) / STORED
    return math.sqrt(max(0.0, figure.error**2 - stored**2))


if __name__ == "__main__":
    main()
