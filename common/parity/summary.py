"""The report of a check: a line for each component, for each block that fails, and for the image."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.text import aligned, clean
from qwenimg.common.parity.check import Judged, RedrawnImage
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.parity.stations import Passed
from qwenimg.common.precision.precision import short

SHORT = 12  # the most failures that are listed
PICTURE = "the picture: token ids, text states, noise, noise levels, steps with guidance, what enters the VAE, pixels"
TEXT = "the text: scores of each next token, and the tokens that are written in float32"


def headline(passport: Passport) -> str:
    """Return a line with the recorded model, precision and machine."""
    model, side = passport.model, passport.sides[0]
    bits = f", weights in {clean(model.quantize, 30)} bits" if model.quantize else ""
    versions = ", ".join(f"{clean(name, 20)} {clean(version, 30)}" for name, version in side.versions.items())
    return (
        f"{clean(model.name, 60)} in {clean(passport.precision, 40)}{bits}: {counted(len(passport.blocks), 'block')}, "
        f"recorded on {clean(side.device, 60)} ({versions}), {clean(passport.created, 30)}"
    )


def lines(judged: Sequence[Judged], drawn: RedrawnImage | None = None) -> list[str]:
    """Return the result of a check."""
    rows: list[tuple[str, ...]] = [
        ("component", "blocks", "dtypes", "worst error", "recorded", "allowed", "worst block")
    ]
    for component in dict.fromkeys(one.name.partition(".")[0] for one in judged):
        rows.append(_row(component, [one for one in judged if one.name.partition(".")[0] == component]))
    texts = aligned(rows)
    failed = [one for one in judged if one.failures]
    texts += [f"falls short: {clean(one.name, 100)}: {one.failures[0]}" for one in failed[:SHORT]]
    if len(failed) > SHORT:
        texts.append(f"and {len(failed) - SHORT} more")
    return texts if drawn is None else [*texts, *_picture(drawn)]


def _picture(drawn: RedrawnImage) -> list[str]:
    """Return, for each kind of station, the one that uses most of its limit, and the failures."""
    kinds: dict[str, list[Passed]] = {}
    for one in drawn.stations:
        if one.output_error is not None:
            kinds.setdefault(one.name.rstrip("0123456789 "), []).append(one)
    rows: list[tuple[str, ...]] = [("the picture again", "times", "differs by", "allowed", "what enters")]
    for kind, passed in kinds.items():
        worst = max(passed, key=lambda one: _share(one.output_error or 0.0, one.allowed or 1.0))
        allowed = "-" if worst.allowed is None else f"{worst.allowed:.1e}"
        inputs = max(one.input_error for one in passed)
        rows.append((clean(kind, 40), str(len(passed)), f"{worst.output_error:.1e}", allowed, f"{inputs:.1e}"))
    table = aligned(rows) if kinds else []
    wrong = f": {'; '.join(drawn.failures[:SHORT])}" if drawn.failures else ""
    latents = f"latents differ by {drawn.latents:.1e}" if isfinite(drawn.latents) else "latents are not compared"
    return [*table, f"the whole picture: {latents}, pixels by {drawn.pixels}{wrong}"]


def not_looked_at(passport: Passport, drawn: RedrawnImage | None) -> list[str]:
    """Return the parts of a run that the check did not judge."""
    traced = {block.component for block in passport.blocks}
    untraced = sorted(passport.model.shapes.keys() - traced)
    parts = [f"the blocks of {clean(name, 40)}, of which none is traced" for name in untraced]
    if drawn is None:
        return [*parts, PICTURE, *([TEXT] if passport.writing else [])]
    if not passport.run:
        only = "" if passport.precision.startswith("fp32") else "; latents and pixels are told only"
        return [
            *parts,
            f"each step and what enters the VAE, which this passport does not have: record it again{only}",
        ]
    return [*parts, *(f"{clean(name, 40)}, of which float32 was not recorded" for name in drawn.unjudged)]


def _row(component: str, judged: list[Judged]) -> tuple[str, ...]:
    """Return a component's row: errors in units of roundoff, of the block that uses most of its limit."""
    rows = [(figure, one, i) for one in judged for i, figure in enumerate(one.figures)]
    worst, one, i = max(rows, key=lambda row: _share(row[0].error, row[0].allowed))
    recorded = f"{one.recorded[i].error:.2f} u" if i < len(one.recorded) else "-"
    dtypes = " ".join(dict.fromkeys(short(row.dtype) for row in judged))
    place = one.name.partition(".")[2]
    sizes = (f"{worst.error:.2f} u", recorded, f"{worst.allowed:.1f} u")
    return (clean(component, 30), str(len(judged)), dtypes, *sizes, clean(place, 60))


def _share(error: float, allowed: float) -> float:
    return error / allowed if error == error and allowed > 0 else float("inf")


def verdict(judged: Sequence[Judged], drawn: RedrawnImage | None) -> str:
    """Return why the check failed, in a line; "" if it passed."""
    failed = [one for one in judged if one.failures]
    if failed:
        first = failed[0]
        return (
            f"{clean(first.name, 80)} is the first of {counted(len(failed), 'block')} of {len(judged)} to fall short: "
            f"{clean(first.failures[0], 160)}"
        )
    return f"the picture: {'; '.join(drawn.failures)}" if drawn is not None and drawn.failures else ""
