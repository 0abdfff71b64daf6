"""The command `parity`: compare the results of backends and machines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qwenimg.backends import NAMES, PLACED, known
from qwenimg.cli import options, places, streams
from qwenimg.cli.help import HELP_NAMES
from qwenimg.cli.options import FILE
from qwenimg.common.base.errors import NumericsError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.jobs.image_options import ALL, typed, with_adapters
from qwenimg.common.request.parts import components_of

if TYPE_CHECKING:
    from qwenimg import Pipeline
    from qwenimg.common.parity.passport.passport import Passport
    from qwenimg.common.parity.stations import Passed
    from qwenimg.common.parity.training_step import Compared
    from qwenimg.common.request.embedding_text import Embedding
    from qwenimg.common.request.lora_text import Lora
    from qwenimg.common.runtime.engine import Engine

_F = TypeVar("_F", bound=Callable[..., Any])
_BACKENDS = (*NAMES, *PLACED)
_BACKEND: dict[str, Any] = {"type": options.Backend(_BACKENDS), "metavar": "NAME", "help": "The backend; default auto."}
PROMPT, STEPS = "a large blue star", 4
SMALL, USUAL = "64x64", "128x128"  # image size for a model of few parameters, and for others
FEW = 2**25  # parameters


@click.group("parity", context_settings={"help_option_names": HELP_NAMES})
def parity() -> None:
    """Compare backends and machines block by block, each against float64.

    `record` writes a passport, `check` repeats it elsewhere, `run` does both here, `report` draws it. Without MODEL it
    is the built-in model. Exit code 6 if a block fails.
    """


def _opening(command: _F) -> _F:
    """Declare the options that choose the model's weights."""
    for name in ("embedding", "lora"):
        command = options.of_picture(ALL[name])(command)
    return places.declared("ip_encoder")(places.weights(command))


def _recording_options(command: _F) -> _F:
    """Declare the options of a recording."""
    for name in ("mask", "ip_mask", "ip_image", "ip_adapter", "control", "control_mode", "true_cfg", "lora_mode"):
        command = options.of_picture(ALL[name])(command)
    for option in reversed(
        (
            places.declared("precision", default="fp32", help="The number format, as for generate; default fp32."),
            click.option("--prompt", default=PROMPT, metavar="TEXT", help=f"The prompt; default {PROMPT!r}."),
            click.option("--size", metavar="WxH", help=f"Default {SMALL} for a small model, else {USUAL}."),
            click.option("--steps", type=click.IntRange(1, 1000), default=STEPS, help=f"Default {STEPS}."),
            click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, help="Default 0."),
            click.option(
                "--pictures", type=click.IntRange(1, 2), help="Give the model 1 or 2 drawn pictures, as by -i."
            ),
            click.option("--sampled", is_flag=True, help="Record random projections, as for a large model."),
            click.option("--training", is_flag=True, help="Record steps of a LoRA's training, in place of a picture."),
        )
    ):
        command = option(command)
    return command


@parity.command("record")
@click.argument("model", required=False)
@click.option("-o", "--output", type=FILE, required=True, metavar="PASSPORT", help="The file; .safetensors.")
@click.option("--overwrite", is_flag=True, help="Replace it if it exists.")
@places.declared("backend", **_BACKEND)
@_opening
@_recording_options
@places.with_opening
def record(opening: LoadOptions, output: Path, overwrite: bool, **values: Any) -> int:
    """Write a passport: the results of every block of MODEL here, and those of float64."""
    from qwenimg.common.base import atomic_files
    from qwenimg.common.parity.passport import passport_file

    atomic_files.check_output(_named(output), overwrite=overwrite)
    with _opened(opening) as session:
        passport = session.record(_typed(values))
        size = passport_file.write(output, passport, overwrite=overwrite)
    streams.say(_headline(passport))
    streams.say(f"{size:,} bytes; on another machine: qwenimg parity check {output}")
    streams.put(bytes(output) + b"\n")
    _check_own(passport)
    return 0


@parity.command("check")
@click.argument("passport", type=FILE)
@click.argument("model", required=False)
@places.declared("backend", **_BACKEND)
@click.option("--blocks", "only_blocks", is_flag=True, help="Check blocks only, one in memory at a time; draw nothing.")
@click.option("-o", "--output", type=FILE, metavar="PASSPORT", help="Write the passport with this backend's figures.")
@click.option("--overwrite", is_flag=True, help="Replace that file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--control", "--ip-adapter", "networks", multiple=True, metavar="NETWORK", help="A network of the record."
)
@_opening
@places.with_opening
def check(
    passport: Path,
    opening: LoadOptions,
    only_blocks: bool,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    lora: tuple[str, ...],
    embedding: tuple[str, ...],
    networks: tuple[str, ...],
) -> int:
    """Repeat the computations in PASSPORT, judge every block, and name the first that fails.

    Give recorded parts, LoRAs, embeddings and control networks again; those in the Hugging Face cache are found."""
    from qwenimg.common.base import atomic_files
    from qwenimg.common.hub.resolve import named, named_part
    from qwenimg.common.parity.passport import passport_file
    from qwenimg.common.parity.recorded_inputs import completed
    from qwenimg.common.request import embedding_text, lora_text

    if output is not None:
        atomic_files.check_output(_named(output), overwrite=overwrite)
    recorded = passport_file.read(passport)
    passport_file.needs_exact(passport, recorded)
    if only_blocks and recorded.training is not None:
        raise UsageError("--blocks: the passport is of a training, and has no blocks; leave it out")
    opening, loras = completed(recorded.model, opening, lora_text.parse(lora), named_part)
    if opening.model is None:
        model = named(recorded.model.name, without=components_of(recorded.model.parts))
        opening = replace(opening, model=model)
    with _opened(replace(opening, precision=recorded.precision)) as session:
        checked = session.check(recorded, loras, networks, embedding_text.parse(embedding), picture=not only_blocks)
    if output is not None:
        passport_file.write(output, checked.passport, overwrite=overwrite)
    return _print_results([checked], as_json)


@parity.command("run")
@click.argument("model", required=False)
@click.option("--backends", metavar="A,B", help=f"Some of {', '.join(_BACKENDS[1:])}; default all of this machine.")
@click.option("-o", "--output", type=FILE, metavar="PASSPORT", help="Write the passport, with all figures.")
@click.option("--overwrite", is_flag=True, help="Replace it if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_opening
@_recording_options
@places.with_opening
def run(
    opening: LoadOptions, backends: str | None, output: Path | None, overwrite: bool, as_json: bool, **values: Any
) -> int:
    """Record MODEL on the first of the backends and check it on the others, in this process."""
    from qwenimg.backends import installed
    from qwenimg.common.base import atomic_files
    from qwenimg.common.parity.passport import passport_file

    if not installed("cpu"):
        raise UsageError("parity run needs float64, which is torch's: install it, or see `qwenimg parity record`")
    names = _local_backends() if backends is None else _several(backends)
    if output is not None:
        atomic_files.check_output(_named(output), overwrite=overwrite)
    values = _typed(values)
    with _opened(replace(opening, backend=names[0])) as session:
        passport = session.record(values)
    done = []
    for name in names[1:]:
        with _opened(replace(opening, backend=name, precision=passport.precision)) as session:
            networks = {one.network for one in values["control"]}
            done.append(session.check(passport, values["lora"], sorted(networks), values["embedding"], picture=True))
        passport = done[-1].passport
    if output is not None:
        passport_file.write(output, passport, overwrite=overwrite)
    return _print_results(done, as_json, passport)


@parity.command("report")
@click.argument("passports", nargs=-1, required=True, type=FILE, metavar="PASSPORT...")
@click.option("-o", "--output", type=FILE, metavar="PAGE.html", help="The page; default by the first passport's name.")
@click.option("--overwrite", is_flag=True, help="Replace both if they exist.")
def report(passports: tuple[Path, ...], output: Path | None, overwrite: bool) -> int:
    """Draw passports side by side: a heat map of blocks by precisions and backends, with every error and verdict.

    Writes a page of HTML, and an SVG beside it."""
    from qwenimg.common.base import atomic_files
    from qwenimg.common.parity import report as reporting
    from qwenimg.common.parity.passport import passport_file

    output = output or passports[0].with_suffix(".html")
    if output.suffix.lower() != ".html":
        raise UsageError(f"-o {clean(output, 120)}: the report is a page of HTML; let the name end in .html")
    page = output.absolute()
    picture = page.with_suffix(".svg")
    for path in (page, picture):
        atomic_files.check_output(path, overwrite=overwrite)
    read = [passport_file.read(path) for path in passports]
    for path, passport in zip(passports, read, strict=True):
        if passport.training is not None:
            raise UsageError(f"{clean(path, 120)}: is of a training, and has no blocks to draw; leave it out")
    data = reporting.gathered(read)
    atomic_files.write_atomic(page, reporting.page(data).encode(), overwrite=overwrite)
    atomic_files.write_atomic(picture, reporting.picture(data).encode(), overwrite=overwrite)
    streams.put(bytes(page) + b"\n" + bytes(picture) + b"\n")
    return 0


# Sessions


@dataclass(frozen=True)
class Checked:
    """A passport with the figures of a check, and its verdict."""

    passport: Passport
    engine: Engine
    judged: list[Any]
    drawn: Any
    changed: list[str]
    trained: tuple[Compared, ...] = ()

    def verdict(self) -> str:
        """The reason of a failure; "" for a check that passed."""
        from qwenimg.common.parity import summary, training_step

        why = training_step.verdict(self.trained) or summary.verdict(self.judged, self.drawn)
        if why and self.changed:
            why = f"{why} (the files of {clean(', '.join(self.changed), 60)} are not those that were recorded)"
        return why


@dataclass(frozen=True)
class Session:
    """A model opened on a backend."""

    pipe: Pipeline

    def record(self, values: dict[str, Any]) -> Passport:
        from qwenimg import backends
        from qwenimg.common.parity import inputs
        from qwenimg.common.parity import record as recording

        if values["training"]:
            return self._record_training(values)
        pipe, exact = self.pipe, None
        if pipe.backend == "cpu":
            exact = pipe.engine
        elif backends.installed("cpu"):
            exact = backends.load("cpu")
        else:
            streams.say(
                "qwenimg: warning: torch is not installed, so float64 is not recorded and nothing can be judged"
            )
        width, height = self._size(values)
        request = {"prompt": values["prompt"], "width": width, "height": height}
        request |= {"steps": values["steps"], "seed": values["seed"]}
        guided = {} if values["true_cfg"] is None else {"true_cfg": values["true_cfg"]}
        if self.pipe.defaults.negative_prompt or guided:
            request["negative_prompt"] = self.pipe.defaults.negative_prompt
        request |= {"guidance": self.pipe.defaults.guidance} | self.pipe.model.guidance.resolve(guided)
        pictures, notes = inputs.read(values["control"], values["mask"], width, height)
        for note in notes:
            streams.say(f"qwenimg: {note}")
        request |= pictures
        request |= {"control_mode": values["control_mode"]} if values["control_mode"] else {}
        request |= {"embedding": values["embedding"]} if values["embedding"] else {}
        if pipe.model.inputs.fewest:
            request.pop("pictures", None)  # a model that needs pictures sees all that it can
        request |= {"pictures": values["pictures"]} if values["pictures"] else {}
        if values["lora"]:
            request |= {"lora": values["lora"], "lora_mode": values["lora_mode"] or "auto"}
        return recording.record(pipe, request, exact=exact, sampled=bool(values["sampled"]), notify=_quietly)

    def _size(self, values: dict[str, Any]) -> tuple[int, int]:
        from qwenimg.common.numbers.sizes import parse_size

        assert self.pipe.checkpoint is not None
        return parse_size(values["size"] or (SMALL if self.pipe.checkpoint.parameters < FEW else USUAL))

    def _record_training(self, values: dict[str, Any]) -> Passport:
        from qwenimg.common.parity import training_step

        for name in ("control", "control_mode", "mask", "embedding", "pictures", "true_cfg", "sampled"):
            if values[name]:
                raise UsageError(f"--{name.replace('_', '-')} has no effect on --training; leave it out")
        width, height = self._size(values)
        asked = {name: values[name] for name in ("prompt", "steps", "seed", "lora")}
        return training_step.record(self.pipe, asked | {"width": width, "height": height})

    def check(
        self,
        passport: Passport,
        loras: tuple[Lora, ...],
        networks: Sequence[str],
        embeddings: tuple[Embedding, ...],
        *,
        picture: bool,
    ) -> Checked:
        from qwenimg.common.hub.network_search import named_control
        from qwenimg.common.parity import check as checking
        from qwenimg.common.parity import recorded_inputs, training_step

        changed = checking.check_model(passport, self.pipe, loras)
        if passport.training is not None and (networks or embeddings):
            raise UsageError("the passport is of a training, without controls and embeddings; leave them out")
        controls = () if passport.picture is None else passport.picture.controls
        networks = recorded_inputs.networks(controls, networks, self.pipe.controls, named_control)
        here = loras, networks, embeddings
        checking.check_run(passport, self.pipe, *here)
        for name in changed:
            streams.say(f"qwenimg: warning: the files of the {clean(name, 30)} are not those that were recorded")
        engine = self.pipe.engine
        if passport.training is not None:
            trained = tuple(training_step.check(passport, self.pipe, loras))
            return Checked(checking.stamped(passport, engine, self.pipe.tf32, []), engine, [], None, changed, trained)
        judged = list(checking.blocks(passport, self.pipe, *here))
        drawn = checking.picture(passport, self.pipe, *here) if picture and passport.picture else None
        stamped = checking.stamped(passport, engine, self.pipe.tf32, judged)
        if picture:
            judged += checking.written(passport, self.pipe, *here)
        return Checked(stamped, engine, judged, drawn, changed)


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a recording as typed values, IP-Adapters among the controls. Raises UsageError."""
    return values | with_adapters({name: value for name, value in typed(values).items() if value not in (None, ())})


@contextmanager
def _opened(opening: LoadOptions) -> Iterator[Session]:
    """Open the model; the built-in one if none is named."""
    import qwenimg
    from qwenimg.common.shapes.builtin import NAME

    with closing(qwenimg.open_pipeline(replace(opening, model=opening.model or NAME))) as pipe:
        yield Session(pipe)


def _quietly(text: str) -> None:
    """Print messages, but no stages: they are many and short."""


# Results


def _print_results(done: list[Checked], as_json: bool, passport: Passport | None = None) -> int:
    """Print the results. Raises NumericsError if a block fails."""
    for checked in done:
        verdict = checked.verdict()
        if as_json:
            streams.put(json.dumps(_as_json(checked, verdict)).encode() + b"\n")
            continue
        text = [_headline(checked.passport), f"on {checked.engine.device}:", *_lines(checked)]
        streams.put("".join(f"{line}\n" for line in text).encode())
    if passport is not None:
        _check_own(passport)
    for checked in done:
        if verdict := checked.verdict():
            raise NumericsError(f"parity on {checked.engine.name}: {verdict}")
    return 0


def _headline(passport: Passport) -> str:
    from qwenimg.common.parity import summary, training_step

    return summary.headline(passport) if passport.training is None else training_step.headline(passport)


def _lines(checked: Checked) -> list[str]:
    from qwenimg.common.parity import summary, training_step

    if checked.trained:
        return training_step.lines(checked.trained)
    left_out = summary.not_looked_at(checked.passport, checked.drawn)
    return [*summary.lines(checked.judged, checked.drawn), *(f"not looked at: {what}" for what in left_out)]


def _as_json(checked: Checked, verdict: str) -> dict[str, Any]:
    from qwenimg.common.parity import summary

    drawn = checked.drawn
    picture: dict[str, Any] | None = None
    if drawn is not None:
        picture = {"latents": _number(drawn.latents), "pixels": drawn.pixels, "failures": list(drawn.failures)}
        picture["stations"] = [_station(one) for one in drawn.stations]
    return {
        "ok": not verdict,
        "verdict": verdict,
        "backend": checked.engine.name,
        "device": checked.engine.device,
        "precision": checked.passport.precision,
        "changed": checked.changed,
        "blocks": [one.as_json() for one in checked.judged],
        "picture": picture,
        "training": [_training(one) for one in checked.trained],
        "not_looked_at": [] if checked.trained else summary.not_looked_at(checked.passport, drawn),
    }


def _training(one: Compared) -> dict[str, Any]:
    return {"name": one.name, "error": _number(one.error), "allowed": one.allowed, "ok": not one.failure}


def _station(one: Passed) -> dict[str, Any]:
    numbers = {"given": one.input_error, "made": one.output_error, "allowed": one.allowed}
    return {"name": one.name, **{key: _number(value) for key, value in numbers.items()}, "ok": not one.failures}


def _number(value: float | None) -> float | None:
    """Return `value`, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def _check_own(passport: Passport) -> None:
    """Raise NumericsError if a recorded result fails itself."""
    side = passport.sides[0]
    for block, figures in zip(passport.blocks, side.figures, strict=True):
        for figure in figures:
            if figure.failures:
                raise NumericsError(
                    f"recorded on {side.backend}, {clean(block.name, 80)} falls short: {figure.failures[0]}"
                )
    if passport.writing is not None and (failures := passport.writing.figure.failures):
        raise NumericsError(f"recorded on {side.backend}, the text that is written falls short: {failures[0]}")


def _named(output: Path) -> Path:
    if output.suffix.lower() != ".safetensors":
        raise UsageError(f"-o {clean(output, 120)}: a passport is a safetensors file; let the name end in .safetensors")
    return output.absolute()


def _local_backends() -> list[str]:
    """Return and print the backends of this machine. Raises UsageError if there is only one."""
    from qwenimg.backends import MISSING, available

    names = [name for name, device in available().items() if not device.startswith(MISSING)]
    if len(names) < 2:
        raise UsageError(
            f"this machine has {', '.join(names) or 'no backend'}, and a comparison takes two: record here"
        )
    streams.say(f"comparing {', '.join(names)}")
    return names


def _several(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name == "auto" or not (known(name) or name in PLACED):
            raise UsageError(
                f"--backends {clean(text, 40)!r}: {clean(name, 20)!r} is not one of {', '.join(_BACKENDS[1:])}"
            )
    if len(names) < 2:
        raise UsageError(f"--backends {clean(text, 40)!r}: name two or more, as in --backends mlx,cpu")
    return names
