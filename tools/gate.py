"""The quality gate of the built-in model: its prompts, drawn and judged by rules, against thresholds that are data.

    python tools/gate.py run --backend cpu --precision fp32 --workers 2 --out docs/results/gate-cpu-fp32.json
    python tools/gate.py run --oracle diffusers --out docs/results/gate-diffusers-fp32.json
    python tools/gate.py compare cpu:fp32 mlx:fp32 cpu:bf16 mlx:bf16 diffusers:fp32
    python tools/gate.py tables      # writes the tables of docs/shapes.md again

`run` ends with 1 where a threshold is missed. `compare` draws the self-test's prompts from the same noise on each, and
holds all against the first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from doc_tables import DOCS, table, write
from gate_draw import EXTRA, LOW_GUIDANCE, PLAIN, WITHOUT_RED, Artist, Drawn, Job, Pixels, draw_all, jobs, model_folder
from training import scenes as train_scenes
from training.config import parse_sizes
from training.describe import dataset_hash

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families import catalog
from qwenimg.common.pictures import pixels
from qwenimg.common.shapes import builtin
from qwenimg.common.shapes import gate as shapes_gate
from qwenimg.common.shapes.check import Verdict
from qwenimg.common.shapes.selftest import LEAST

RESULTS = DOCS / "results"
PAIRS = RESULTS / "shapes-pairs.json"
PACKAGES = ("numpy", "torch", "mlx", "diffusers", "transformers")

CHINESE_BELOW = 0.05  # at most this far below English on the same pairs and seeds
GUIDANCE_LEAST = 0.8  # right at guidance 1, and at 3, on the same prompts
VAE_PSNR = 35.0  # dB, mean over rendered pictures
VAE_PICTURES = 64
FLOORS = {"fp32": 50.0, "bf16": 30.0}  # dB of the worst picture, by the coarser precision of a pair
MOST_UNEQUAL = 1  # verdicts of 40
IDENTICAL = 99.0  # dB written for equal pictures, since JSON has no infinity


# The gate


def run(args: argparse.Namespace) -> int:
    backend = args.oracle or args.backend
    if args.oracle and args.sampler:
        raise SystemExit("--sampler: diffusers draws with the model's own only")
    artist = Artist(model=args.model, backend=backend, precision=args.precision, size=args.size, sampler=args.sampler)
    wanted = jobs(args.groups, args.limit)
    start, drawn = time.monotonic(), []
    for one in draw_all(artist, wanted, args.workers):
        drawn.append(one)
        if len(drawn) % 20 == 0 or len(drawn) == len(wanted):
            seconds = time.monotonic() - start
            left = seconds / len(drawn) * (len(wanted) - len(drawn))
            print(f"{len(drawn)} of {len(wanted)}, {seconds:.0f} s, {left:.0f} s left", file=sys.stderr, flush=True)
    result = _about(artist) | judge(drawn) | {"seconds": round(time.monotonic() - start, 1)}
    if args.vae:
        result["vae"] = vae_psnr(model_folder(args.model), args.limit or VAE_PICTURES, artist.size)
    checks = _checks(result)
    result["complete"] = len(drawn) == len(jobs(None, None)) and args.vae
    result["passed"] = all(checks.values())
    for line in _lines(result):
        print(line)
    missed = [name for name, passed in checks.items() if not passed]
    part = "" if result["complete"] else ", of a part of the gate"
    print(f"PASSED{part}" if not missed else f"FAILED{part}: {', '.join(missed)}")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(bool(missed))


def _size(text: str) -> tuple[int, int]:
    """`256x256` or `256`."""
    try:
        [size] = parse_sizes(text)
    except (UsageError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not one size, such as 256 or 160x96") from None
    return size


def _about(artist: Artist) -> dict[str, Any]:
    """What was drawn with what."""
    r, folder = catalog.BUILT_IN, model_folder(artist.model)
    weights = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
        if path.parent != folder / "training"
    }
    return {
        "model": r.name if folder == builtin.folder() else folder.name,
        "weights": weights,
        "dataset": dataset_hash(),
        "backend": artist.backend,
        "precision": artist.precision,
        "width": artist.size[0],
        "height": artist.size[1],
        "steps": r.steps,
        "guidance": r.guidance,
        **({"sampler": artist.sampler} if artist.sampler else {}),
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
    }


def judge(drawn: Sequence[Drawn]) -> dict[str, Any]:
    """Figures of every group that was drawn, and of what compares groups."""
    groups = {}
    for group, least in LEAST.items():
        members = [one for one in drawn if one.job.group == group]
        if members:
            least = None if group == "chinese" else least  # which is held against English, in `_checks`
            groups[group] = _share(members) | {"least": least, "parts": _parts(members)}
    judged = [one for one in drawn if one.job.group in LEAST]
    found: dict[str, Any] = {"groups": groups, "non_finite": sum(one.pixels is None for one in drawn)}
    if judged:
        found["overall"] = _share(judged)
    overlaps = [one.overlap for one in judged if one.overlap is not None]
    if overlaps:
        found["overlap"] = {"n": len(overlaps), "mean": float(np.mean(overlaps)), "least": min(overlaps)}
    if "chinese" in groups:
        found["english_of_the_same"] = _same(drawn, "chinese")
    low = [one for one in drawn if one.job.group == LOW_GUIDANCE]
    if low:
        found["guidance_1"] = _share(low)
        found["guidance_3_of_the_same"] = _same(drawn, LOW_GUIDANCE)
    plain, without = ([one for one in drawn if one.job.group == group] for group in (PLAIN, WITHOUT_RED))
    if plain and without:
        found["red"] = {"n": len(plain), "plain": _red(plain), "negative": _red(without)}
    return found


def _share(members: Sequence[Drawn]) -> dict[str, Any]:
    right = sum(one.right for one in members)
    return {"n": len(members), "right": right, "share": right / len(members) if members else math.nan}


def _parts(members: Sequence[Drawn]) -> dict[str, float]:
    """The share that is right of each part of the verdict that was asked for."""
    found = {}
    for field in fields(Verdict):
        answers = [getattr(one.verdict, field.name) for one in members if one.verdict is not None]
        asked = [answer for answer in answers if answer is not None]
        if asked:
            found[field.name] = sum(asked) / len(asked)
    return found


def _same(drawn: Sequence[Drawn], group: str) -> dict[str, Any] | None:
    """The English prompts of the same things and seeds as `group`, at the usual guidance; None where not drawn."""
    keys = {(one.job.asked.seed, one.job.asked.wanted) for one in drawn if one.job.group == group}
    members = [
        one
        for one in drawn
        if one.job.group in ("trained", "held-out") and (one.job.asked.seed, one.job.asked.wanted) in keys
    ]
    return _share(members) if members else None


def _red(members: Sequence[Drawn]) -> float:
    return sum("red" in one.colors for one in members) / len(members)


def _checks(result: dict[str, Any]) -> dict[str, bool]:
    """Every threshold that this run can answer."""
    checks = {"all finite": result["non_finite"] == 0}
    for group, found in result["groups"].items():
        if found["least"] is not None:
            checks[group] = found["share"] >= found["least"]
    english, low, high = (result.get(name) for name in ("english_of_the_same", "guidance_1", "guidance_3_of_the_same"))
    if english:
        checks["chinese"] = result["groups"]["chinese"]["share"] >= english["share"] - CHINESE_BELOW
    if low and high:
        checks["guidance"] = min(low["share"], high["share"]) >= GUIDANCE_LEAST
    if "red" in result:
        checks["negative prompt"] = result["red"]["negative"] < result["red"]["plain"]
    if "vae" in result:
        checks["vae"] = result["vae"]["psnr"] >= VAE_PSNR
    return checks


def _lines(result: dict[str, Any]) -> list[str]:
    rows = {**result["groups"], "overall": result.get("overall")}
    for name in ("english_of_the_same", "guidance_1", "guidance_3_of_the_same"):
        rows[name.replace("_", " ")] = result.get(name)
    lines = []
    for name, found in rows.items():
        if found:
            least = f", at least {found['least']:.0%}" if found.get("least") else ""
            lines.append(f"{name:24} {found['right']:3} of {found['n']:3} {found['share']:7.1%}{least}")
    if "red" in result:
        red = result["red"]
        lines.append(f"red of {red['n']} without a colour: {red['plain']:.1%}, against red {red['negative']:.1%}")
    if "vae" in result:
        vae = result["vae"]
        lines.append(f"VAE over {vae['n']} pictures: {vae['psnr']:.1f} dB, the worst {vae['floor']:.1f}")
    if "overlap" in result:
        overlap = result["overlap"]
        figures = f"{overlap['mean']:.3f} on average, {overlap['least']:.3f} at least"
        lines.append(f"overlap with the ideal shape, over {overlap['n']} pictures of one object: {figures}")
    return [*lines, f"not finite: {result['non_finite']}"]


def vae_psnr(folder: Path, count: int, size: tuple[int, int]) -> dict[str, float]:
    """Rendered pictures through diffusers' own encoder (the posterior's mean) and decoder."""
    import torch
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    found = []
    for seed in range(count):
        picture = train_scenes.render(train_scenes.random_scene(np.random.default_rng([7, seed])), *size)
        with torch.no_grad():
            latents = vae.encode(torch.from_numpy(picture)[None, :, None]).latent_dist.mode()
            again = vae.decode(latents, return_dict=False)[0][0, :, 0].clamp(-1, 1)
        found.append(psnr(_levels(picture), _levels(again.numpy())))
    return {"n": count, "psnr": float(np.mean(found)), "floor": min(found)}


def _levels(picture: np.ndarray[Any, Any]) -> Pixels:
    return np.rint((picture + 1) * 127.5).astype(np.uint8)


def psnr(a: Pixels, b: Pixels) -> float:
    """Of two pictures in 8 bits, in dB, at most `IDENTICAL`."""
    return min(IDENTICAL, pixels.psnr(a, b))


# Pairs


def compare(args: argparse.Namespace) -> int:
    prompts = shapes_gate.selftest_prompts()[: args.limit]
    wanted = [Job(group=asked.group, asked=asked) for asked in prompts]
    artists = [_artist(args.model, text) for text in (args.first, *args.others)]
    first, rows = list(draw_all(artists[0], wanted, args.workers)), []
    for artist in artists[1:]:
        rows.append(pair(artists[0], first, artist, list(draw_all(artist, wanted, args.workers))))
        print(json.dumps(rows[-1]), flush=True)
    result = _about(artists[0]) | {"pairs": rows, "passed": all(row["passed"] for row in rows)}
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(not result["passed"])


def _artist(model: str, text: str) -> Artist:
    backend, _, precision = text.partition(":")
    return Artist(model=model, backend=backend, precision=precision or "fp32")


def pair(a: Artist, ours: Sequence[Drawn], b: Artist, theirs: Sequence[Drawn]) -> dict[str, Any]:
    """Two artists on the same noise: PSNR of each picture, and how many verdicts are equal."""
    both = [(x.pixels, y.pixels) for x, y in zip(ours, theirs, strict=True)]
    whole = [(x, y) for x, y in both if x is not None and y is not None]
    ratios = [psnr(x, y) for x, y in whole]
    most = max((int(np.abs(x.astype(np.int16) - y).max()) for x, y in whole), default=255)
    equal = sum(x.verdict == y.verdict and x.verdict is not None for x, y in zip(ours, theirs, strict=True))
    floor = min(FLOORS[p if p in FLOORS else "bf16"] for p in (a.precision, b.precision))
    finite = len(whole) == len(both)
    return {
        "a": str(a),
        "b": str(b),
        "n": len(both),
        "psnr_floor": min(ratios, default=0.0),
        "psnr_mean": float(np.mean(ratios)) if ratios else 0.0,
        "largest_difference": most,
        "equal_verdicts": equal,
        "right": [sum(one.right for one in drawn) for drawn in (ours, theirs)],
        "least_psnr": floor,
        "passed": finite and min(ratios) >= floor and equal >= len(both) - MOST_UNEQUAL,
    }


# Tables


def write_tables() -> None:
    """docs/shapes.md from every docs/results/gate-*.json and from the pairs."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("gate-*.json"))]
    usual = catalog.BUILT_IN.width * catalog.BUILT_IN.height
    results.sort(key=lambda one: abs(one["width"] * one["height"] - usual))  # the default size first
    if results:
        write("shapes.md", "gate", table(["prompts", "at least", *map(head, results)], gate_rows(results)))
    if PAIRS.exists():
        rows = [
            [
                f"{row['a']} and {row['b']}",
                f"{row['psnr_floor']:.1f} dB",
                f"{row['psnr_mean']:.1f} dB",
                f"{row['largest_difference']}",
                f"{row['equal_verdicts']} of {row['n']}",
                "yes" if row["passed"] else "NO",
            ]
            for row in json.loads(PAIRS.read_text(encoding="utf-8"))["pairs"]
        ]
        heads = ["pair", "worst PSNR", "mean PSNR", "largest difference of 255", "equal verdicts", "passed"]
        write("shapes.md", "pairs", table(heads, rows))


def head(result: dict[str, Any]) -> str:
    """Of its column in a table."""
    size, r = (result["width"], result["height"]), catalog.BUILT_IN
    other = "" if size == (r.width, r.height) else f", {size[0]}x{size[1]}"
    return f"{result['backend']} {result['precision']}{other}"


def gate_rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    def shares(name: str, place: Sequence[dict[str, Any]], least: str) -> list[str]:
        found = [one.get(name) for one in place]
        return [
            name.replace("_", " "),
            least,
            *(f"{f['right']}/{f['n']} = {f['share']:.1%}" if f else "" for f in found),
        ]

    groups = [one["groups"] for one in results]
    floors = {name: f"{least:.0%}" if least else "" for name, least in LEAST.items()}
    rows = [shares(name, groups, least) for name, least in (floors | {"chinese": "English less 5"}).items()]
    rows += [shares("english_of_the_same", results, "")]
    rows += [shares(name, results, "80%") for name in ("guidance_1", "guidance_3_of_the_same")]
    vae = [f"{one['vae']['psnr']:.1f} dB" if "vae" in one else "" for one in results]
    red = [f"{one['red']['plain']:.0%} to {one['red']['negative']:.0%}" if "red" in one else "" for one in results]
    overlap = [f"{one['overlap']['mean']:.3f}" if "overlap" in one else "" for one in results]
    rows += [["overlap of one object with the ideal shape", "", *overlap]] if any(overlap) else []
    rows += [["VAE, PSNR", f"{VAE_PSNR:.0f} dB", *vae], ["red, with red as the negative prompt", "less", *red]]
    rows += [["values not finite", "0", *(str(one["non_finite"]) for one in results)]]
    return [*rows, ["**passed**", "", *(_passed(one) for one in results)]]


def _passed(result: dict[str, Any]) -> str:
    part = "" if result["complete"] else ", of a part"
    return ("yes" if result["passed"] else "NO") + part


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = found.add_subparsers(dest="task", required=True)
    gate, pairs = commands.add_parser("run"), commands.add_parser("compare")
    commands.add_parser("tables")
    for one in (gate, pairs):
        one.add_argument("--model", default=builtin.NAME, help="a folder; the built-in model unless given")
        one.add_argument("--workers", type=int, default=1, help="processes")
        one.add_argument("--limit", type=int, help="at most that many prompts of a group")
    gate.add_argument("--out", type=Path, help="result as JSON")
    r = catalog.BUILT_IN
    gate.add_argument(
        "--size", type=_size, default=(r.width, r.height), help="of the pictures; the model's default unless given"
    )
    gate.add_argument("--backend", default="cpu")
    gate.add_argument("--precision", default="fp32")
    gate.add_argument("--oracle", choices=["diffusers"], help="diffusers draws, from the same noise")
    gate.add_argument("--sampler", help="one of `qwenimg samplers`; the model's own unless given")
    gate.add_argument("--groups", nargs="+", metavar="GROUP", help=f"of {', '.join((*LEAST, *EXTRA))}")
    gate.add_argument("--no-vae", dest="vae", action="store_false", help="leave out the VAE's reconstruction")
    pairs.add_argument("first", metavar="BACKEND:PRECISION")
    pairs.add_argument("others", nargs="+", metavar="BACKEND:PRECISION")
    pairs.add_argument("--out", type=Path, default=PAIRS)
    return found


def main() -> int:
    args = parser().parse_args()
    if args.task == "tables":
        write_tables()
        return 0
    return run(args) if args.task == "run" else compare(args)


if __name__ == "__main__":
    sys.exit(main())
