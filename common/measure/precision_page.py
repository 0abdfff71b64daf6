"""The report of `qwenimg precision` as lines for a terminal, as charts, and as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.text import aligned, clean
from qwenimg.common.measure.activations import BlockActivations
from qwenimg.common.measure.precision import FLOAT16_MAX, PolicyRun, PrecisionReport
from qwenimg.common.pictures import html_page
from qwenimg.common.pictures.charts import Chart, Series, svg
from qwenimg.common.precision.precision import labelled

SHOWN = 12  # blocks in a terminal
Row = tuple[str, ...]


def lines(report: PrecisionReport) -> list[str]:
    """Return the report as text; of the blocks, those with activations nearest to float16's maximum."""
    blocks = sorted(report.blocks, key=lambda block: -_order(block))
    against = next(iter(report.compared))
    head, rows = _block_rows(report, blocks[:SHOWN], against)
    hidden = len(blocks) - SHOWN
    return [
        _about(report),
        "",
        *aligned([_POLICY_HEAD, *policy_rows(report)]),
        *(f"{run.policy}: {run.fault}" for run in report.runs if run.fault),
        "",
        f"largest |activation|, headroom to float16's {FLOAT16_MAX:.0f}, errors against {_where(report, against)}:",
        *aligned([head, *rows]),
        *([f"and {hidden} blocks with more headroom (--json, --html)"] if hidden > 0 else []),
        "",
        *conclusions(report),
    ]


def conclusions(report: PrecisionReport) -> list[str]:
    auto = report.auto
    name = f"--precision {report.recommended}" if report.recommended else "nothing"
    return [
        f"recommended here: {name}, since {report.why}",
        f"--preset auto chooses {auto.precision}, since {auto.reason}",
        *beyond(report),
    ]


def beyond(report: PrecisionReport) -> list[str]:
    """Return a line for each part of the model with activations above float16's maximum or close to it."""
    lines = []
    for part in dict.fromkeys(block.part for block in report.blocks):
        worst = max((block for block in report.blocks if block.part == part), key=_order)
        if not worst.largest <= FLOAT16_MAX / 8:
            where = f"{worst.name}, {worst.at}"
            verb = "holds little more than" if worst.largest <= FLOAT16_MAX else "does not hold"
            lines.append(f"float16 {verb} the {part}: {_size(worst.largest)} at {where}")
    return lines


def charts(report: PrecisionReport) -> list[Chart]:
    """Return charts of the largest activations and of the policies' errors."""
    blocks, against = report.blocks, next(iter(report.compared))
    runs = [run for run in report.runs if any(block.errors.get(against) for block in run.blocks)]
    places = [block.name for block in blocks]
    by_key = [{block.key: block.errors.get(against) for block in run.blocks} for run in runs]
    errors = [
        Series(name=labelled(run.policy), values=[by_block.get(block.key) for block in blocks])
        for run, by_block in zip(runs, by_key, strict=True)
    ]
    sizes = [
        Series(name=part, values=[_plotted(block) if block.part == part else None for block in blocks])
        for part in dict.fromkeys(block.part for block in blocks)
    ]
    limit = (FLOAT16_MAX, "float16 ends")
    return [
        Chart(title=f"Largest |activation| in {report.shown}", places=places, series=sizes, limit=limit),
        Chart(title=f"Relative error against {_where(report, against)}, first step", places=places, series=errors),
    ]


def page(report: PrecisionReport) -> str:
    """Return the report as one page of HTML."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts = [
        html_page.paragraph(f"{_about(report)}; {versions}."),
        *map(html_page.paragraph, conclusions(report)),
        html_page.heading("Policies"),
        html_page.table(_POLICY_HEAD, policy_rows(report)),
        *(html_page.paragraph(f"{run.policy}: {run.fault}") for run in report.runs if run.fault),
    ]
    for chart in charts(report):
        parts += [html_page.heading(chart.title), svg(chart)]
    for against in report.compared:
        head, rows = _block_rows(report, report.blocks, against)
        parts += [
            html_page.heading(f"Blocks against {_where(report, against)}"),
            html_page.table(head, rows, _is_beyond),
        ]
    headroom = (
        f"Headroom: how many times larger the largest activation may be until float16, which ends at "
        f"{FLOAT16_MAX:.0f}, does not hold it. Errors are of the block's last result in the first step."
    )
    return html_page.page(f"Precision of {clean(report.model, 80)}", *parts, html_page.paragraph(headroom))


def _about(report: PrecisionReport) -> str:
    asked = report.asked
    reference = f"against {report.reference}" if report.reference else "with no reference"
    return (
        f"{clean(report.model, 80)}, {report.backend} on {report.device}: {clean(asked.prompt, 80)!r}, "
        f"{asked.width}x{asked.height}, {asked.steps} steps, seed {asked.seed}; pictures and latents {reference}"
    )


# Tables

_POLICY_HEAD: Row = ("policy", "s/step", "weights", "peak", "latents", "picture")


def policy_rows(report: PrecisionReport) -> list[Row]:
    return [_policy_row(run) for run in report.runs]


def _policy_row(run: PolicyRun) -> Row:
    seconds = "-" if run.seconds is None else f"{run.seconds:.3f}"
    peak = "-" if run.peak is None or run.fault else size_text(run.peak)
    latents = "-" if run.latents_error is None else f"{run.latents_error:.1e}"
    picture = "none" if run.psnr is None else "the same" if math.isinf(run.psnr) else f"{run.psnr:.1f} dB"
    return labelled(run.policy), seconds, size_text(run.weights), peak, latents, picture


def _where(report: PrecisionReport, policy: str) -> str:
    """Return a policy with its device: `fp64 on CPU (torch, 2 threads)`."""
    return f"{policy} on {report.compared[policy]}"


def _block_rows(report: PrecisionReport, blocks: Sequence[BlockActivations], against: str) -> tuple[Row, list[Row]]:
    """Return a table of blocks, with the policies' errors against the policy `against`."""
    others = [run for run in report.runs if run.policy != against]
    by_run = [{block.key: block for block in run.blocks} for run in others]
    rows = []
    for block in blocks:
        errors = (_error(by_key.get(block.key), against) for by_key in by_run)
        rows.append((f"{block.part} {block.name}", _size(block.largest), _headroom(block.largest), *errors))
    return ("block", "largest", "headroom", *(labelled(run.policy) for run in others)), rows


def _headroom(largest: float) -> str:
    if not 0 < largest < math.inf:
        return "-"
    factor = FLOAT16_MAX / largest
    return f"{factor:,.1f}x" if factor >= 1 else f"{factor:.1e}x"


def _error(block: BlockActivations | None, against: str) -> str:
    if block is None:
        return "-"
    error = block.errors.get(against)
    if error is None:
        return "-" if math.isfinite(block.largest) else "overflow"
    return f"{error:.1e}"


def _size(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _order(block: BlockActivations) -> float:
    return block.largest if math.isfinite(block.largest) else math.inf


def _plotted(block: BlockActivations) -> float | None:
    return block.largest if 0 < block.largest < math.inf else None


def _is_beyond(text: str) -> bool:
    """Return whether a value overflows: a headroom below 1 counts as overflow."""
    return text == "overflow" or (text.endswith("x") and "e-" in text)
