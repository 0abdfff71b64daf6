"""Checks what was asked for, opens the model, makes each picture and writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import qwenimg
from qwenimg.cli import elsewhere, failures, streams
from qwenimg.cli.faults import kept, report_faults
from qwenimg.cli.options import parse_debug
from qwenimg.cli.progress import Report
from qwenimg.cli.signals import Stop
from qwenimg.common.base import atomic_files
from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.choices import PARTS
from qwenimg.common.jobs.fields import Fields, check, fields, merged, option_in, seeds
from qwenimg.common.jobs.naming import output_path
from qwenimg.common.jobs.pictures import Picture, makes_folder, pictures
from qwenimg.common.jobs.prompt_file import read_prompts
from qwenimg.common.jobs.replay import Replay, check_model, read_replay
from qwenimg.common.jobs.run import Job, Outcome, completed, estimated, prepare, run
from qwenimg.common.pictures import latents as latents_

if TYPE_CHECKING:
    from qwenimg import Pipeline, Step
    from qwenimg.common.families.choices import Prediction
    from qwenimg.common.memory.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The options, by click's names for them. What was not given is None."""

    words: tuple[str, ...]
    said: Fields  # of the options in `jobs.fields.SAID`, None where it was not given
    prompt_file: str | None
    keep_going: bool
    replay: Path | None
    image: Path | None
    mask: Path | None
    refiner: str | None
    transformer: Path | None
    text_encoder: Path | None
    text_encoder_2: Path | None
    vae: Path | None
    models_dir: tuple[Path, ...]
    tokenizer: Path | None
    prediction: Prediction | None
    quantize: str | None
    max_memory: str | None
    model: str | None
    backend: str
    compile: str
    preset: str | None
    precision: str | None
    step_cache_check: bool
    fallback: bool
    cache_prompts: bool
    offline: bool
    latents: Path | None
    output: str | None
    overwrite: bool
    save_latents: Path | None
    no_metadata: bool
    json: bool
    quiet: bool
    debug: str | None


def draw(flags: Flags, stop: Stop, warnings: Iterable[str] = ()) -> int:
    """The whole run; its exit code. Raises QwenimgError, before any model is opened where that is possible.

    warnings: of what was given."""
    from qwenimg.common.hub import resolve

    report = Report(as_json=flags.json, quiet=flags.quiet, debug=parse_debug(flags.debug))
    for line in warnings:
        report.notify("warning", line)
    _check_forms(flags)
    replay = None if flags.replay is None else read_replay(flags.replay)
    for line in () if replay is None else replay.messages:
        report.notify("warning", line)
    replay = _with_loras(flags, replay, report)
    wanted, failed = _wanted(flags, replay, report)
    flags, wanted = _located(flags, wanted)
    _check_files(flags, replay, wanted)
    job = _job(flags, replay, wanted, report)
    advice = None if _given(flags) else resolve.advice(flags.model or (None if replay is None else replay.model))
    notes = list[str]()
    if advice is not None:
        wanted = kept(
            wanted, lambda p: advice.check(p.prompt, p.said("few_steps")), report, failed, keep_going=flags.keep_going
        )
        notes = advice.texts([p.prompt for p in wanted], [p.said("negative_prompt") or "" for p in wanted])
    for folder in {picture.path.parent for picture in wanted if picture.path is not None}:
        atomic_files.sweep(folder)
    try:
        pipe = _open(flags, replay, report)
        wanted = [completed(picture, pipe, job) for picture in wanted]
        sizes = dict.fromkeys((picture.said("width"), picture.said("height")) for picture in wanted)
        for line in notes if advice is None else [*notes, *advice.sizes(sizes)]:
            report.notify("warning", line)
        if flags.save_latents is not None and len(sizes) > 1:
            raise UsageError("--save-latents: one file takes pictures of one size; this run makes several sizes")
        expected: list[Estimate] = []
        wanted = kept(
            wanted,
            lambda p: expected.append(estimated(pipe, job, p)),
            report,
            failed,
            keep_going=flags.keep_going,
        )
        compiled = pipe.compile(flags.compile, sum(one.seconds for one in expected))
        step = max(one.step for one in expected)
        report.headline(pipe.headline(), expected)
        report.decided(flags.compile, compiled)
        report.plan(pipe, wanted)
        prepare(pipe, wanted)
        with stop.waits(step):
            listener = RunReport(report, stop, failed)
            return listener.code(run(pipe, job, wanted, listener))
    finally:
        report.give_up()


class RunReport:
    """Reports a run, and ends it where a signal came. `codes`: exit codes of what is not made."""

    def __init__(self, report: Report, stop: Stop, codes: list[int]) -> None:
        self.report, self.stop, self.codes = report, stop, codes
        self.notify, self.image = report.notify, report.image

    def begin(self, picture: Picture) -> None:
        self.stop.picture()
        self.report.begin(picture)

    def step(self, picture: Picture, step: Step) -> None:
        self.stop.step(step.index, step.total, step.seconds)
        self.report.step(picture, step)
        self.stop.check_step()

    def failure(self, picture: Picture, error: Exception) -> None:
        self.stop.check()
        self.codes.append(self.report.failure(picture, error))

    def code(self, outcome: Outcome) -> int:
        """The exit code. `done` comes last, also where an error ended the run."""
        self.stop.check()
        codes = self.codes
        fatal = codes[-1] if outcome.fatal else 0
        code = fatal or (0 if not codes else failures.PARTIAL if outcome.made else codes[0])
        self.report.done(outcome.made, len(codes), code)
        return code


# Before the model is opened


def _check_forms(flags: Flags) -> None:
    """Raises UsageError for a value of a wrong form, before any file is opened."""
    from qwenimg.common.families.running import Running

    Running(
        precision=flags.precision or "auto",
        preset=flags.preset or "auto",
        quantize=flags.quantize,
        max_memory=flags.max_memory,
    )
    said = fields(flags.said)
    check(said)
    seeds(said, 0)
    if flags.output != "-":
        output_path(flags.output, seed=0, index=1, prompt="", now=datetime.now(UTC), several=False, same_seeds=False)
    if flags.latents is not None:
        latents_.kind_of(flags.latents)
    if flags.save_latents is not None and flags.save_latents.suffix.lower() not in latents_.SUFFIXES:
        raise UsageError(f"--save-latents {clean(flags.save_latents, 120)}: let the name end in .npy or .safetensors")


def _wanted(flags: Flags, replay: Replay | None, report: Report) -> tuple[list[Picture], list[int]]:
    """The pictures to make, and the exit codes of those that cannot be; those are reported. Raises QwenimgError."""
    prompt = _prompt(flags)
    if prompt is not None and flags.prompt_file is not None:
        raise UsageError("a prompt and --prompt-file; give one of them")
    said = flags.said if prompt is None else flags.said | {"prompt": prompt}
    base = merged({} if replay is None else replay.fields, fields(said))
    lines = None if flags.prompt_file is None else read_prompts(flags.prompt_file)
    wanted, faults = pictures(base, lines, flags.output, overwrite=flags.overwrite)
    return wanted, report_faults(faults, report, left=len(wanted), keep_going=flags.keep_going)


def _with_loras(flags: Flags, replay: Replay | None, report: Report) -> Replay | None:
    """`replay` with the LoRAs of its recipe that are in the folders of --models-dir. Raises UsageError where one is
    not."""
    if replay is None or "lora" not in replay.used or flags.said["lora"] is not None or not flags.models_dir:
        return replay
    from qwenimg.common.hub.lora_search import located
    from qwenimg.common.hub.model_folders import read_folders

    text, lines = located(read_folders(flags.models_dir), replay.used["lora"], replay.lora_fingerprints)
    for line in lines:
        report.notify("stage", line)
    used = {name: value for name, value in replay.used.items() if name != "lora"}
    return replace(replay, fields=replay.fields | {"lora": text}, used=used)


def _located(flags: Flags, wanted: list[Picture]) -> tuple[Flags, list[Picture]]:
    """With the paths of what is found by name in the folders of --models-dir. Raises UsageError and ModelError."""
    if not flags.models_dir:
        return flags, wanted
    from qwenimg.common.hub.model_folders import read_folders
    from qwenimg.common.hub.part_files import located

    folders = read_folders(flags.models_dir)
    found = located(folders, {name: getattr(flags, name) for name in ("model", "refiner", *PARTS)})
    changed = [replace(one, asked=one.asked | folders.options({"lora": one.said("lora")})) for one in wanted]
    return replace(flags, **found), changed


def _prompt(flags: Flags) -> str | None:
    """The one prompt of the command line. Raises UsageError if there are two."""
    if len(flags.words) > 1:
        shown = clean(" ".join(flags.words), 80)
        if flags.said["lora"] and _is_number(flags.words[-1]):
            lora = clean(flags.said["lora"][-1], 60)
            raise UsageError(f"--lora takes its strength behind a colon: --lora {lora}:{flags.words[-1]}")
        raise UsageError(f'{len(flags.words)} words where one prompt is expected; quote the prompt: "{shown}"')
    if flags.words and flags.said["prompt"] is not None:
        raise UsageError(f"two prompts: {clean(flags.words[0], 60)!r} and that of -p; give one")
    if flags.words and (option := option_in(flags.words[0], elsewhere.OPTIONS)):
        ours = elsewhere.OPTIONS.get(option)
        what = f", and no option here: {ours}" if ours else "; close them before it"
        raise UsageError(f"{option} is inside the quotes of the prompt{what}. To draw it as words: -p")
    return flags.words[0] if flags.words else flags.said["prompt"]


def _check_files(flags: Flags, replay: Replay | None, wanted: Sequence[Picture]) -> None:
    """What can be refused about files without a model. Raises UsageError."""
    if flags.step_cache_check and not any(one.said("step_cache") or one.said("cached_calls") for one in wanted):
        raise UsageError("--step-cache-check compares what --step-cache draws; give both")
    if flags.output == "-":
        if len(wanted) > 1:
            raise UsageError(f"-o -: standard output takes one picture, this run makes {len(wanted)}")
        if flags.json:
            raise UsageError("-o - and --json both write to standard output; give one of them")
        if sys.stdout is not None and sys.stdout.isatty():
            raise UsageError("-o -: a terminal cannot take a PNG; send the output to a file or a program")
    if replay is not None and replay.noise_given and flags.latents is None and flags.said["seed"] is None:
        raise UsageError("--from: the noise of that picture was given with --latents; give the same file, or a seed")
    if replay is not None:
        _check_same(flags, replay.used)
        check_model(replay, flags.model)
    if flags.save_latents is not None:
        atomic_files.check_output(flags.save_latents, overwrite=flags.overwrite)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_same(flags: Flags, used: Mapping[str, str]) -> None:
    """Raises UsageError unless all that a recipe names and does not hold is given."""
    for key, option, value in (
        ("image_sha256", "-i", flags.image),
        ("mask_sha256", "--mask", flags.mask),
        *((part, f"--{part.replace('_', '-')}", _part(part, flags, used)) for part in PARTS),
        ("lora", "--lora", flags.said["lora"]),
    ):
        if key in used and value is None:
            what = "" if key.endswith("sha256") else f" ({clean(used[key], 60)})"
            raise UsageError(f"--from: that picture was made with {option}{what}; give the same")


def _read_noise(path: Path, wanted: Sequence[Picture]) -> Any:
    """Latents [N, C, h, w], one for each picture or one for all prompts. Raises UsageError."""
    noise = latents_.read_latents(path)
    if len(noise) not in (1, len(wanted)):
        raise UsageError(
            f"--latents {clean(path, 120)}: has {counted(len(noise), 'row')} of latents, "
            f"this run makes {counted(len(wanted), 'picture')}"
        )
    # Another sampler may draw noise in its steps, from the seed.
    drawn = any(picture.said("sampler") for picture in wanted)
    if len(noise) < len(wanted) and len({picture.prompt for picture in wanted}) < len(wanted) and not drawn:
        raise UsageError("--latents takes the place of the seed: several seeds would make one picture; give one")
    return noise


def _job(flags: Flags, replay: Replay | None, wanted: Sequence[Picture], report: Report) -> Job:
    """The arrays that were given, and how pictures are written. Raises UsageError and ModelError."""
    noise = None if flags.latents is None else _read_noise(flags.latents, wanted)
    image, mask = _read_pictures(flags, report)
    return Job(
        image=image,
        mask=mask,
        noise=noise,
        replay=replay,
        overwrite=flags.overwrite,
        metadata=not flags.no_metadata,
        check_cache=flags.step_cache_check,
        new_folder=makes_folder(flags.output),
        save_latents=flags.save_latents,
        put=streams.put,
    )


def _read_pictures(flags: Flags, report: Report) -> tuple[Any, Any]:
    """The picture to start from, and its mask. Raises UsageError and ModelError."""
    if flags.image is None:
        for option, value in (("--mask", flags.mask), ("--strength", flags.said["strength"])):
            if value is not None:
                raise UsageError(f"{option} needs the picture that it is for; give it with -i")
        return None, None
    from qwenimg.common.pictures import input

    image, notes = input.read_image(flags.image)
    mask, more = (None, []) if flags.mask is None else input.read_mask(flags.mask, image)
    for line in notes + more:
        report.notify("warning", line)
    return image, mask


def _open(flags: Flags, replay: Replay | None, report: Report) -> Pipeline:
    from qwenimg.common.families.choices import components_of
    from qwenimg.common.hub.resolve import TOKENIZER

    model, refiner, precision, prediction = flags.model, flags.refiner, flags.precision, flags.prediction
    quantize, used = flags.quantize, {} if replay is None else replay.used
    parts: dict[str, Any] = {part: _part(part, flags, used) for part in PARTS}
    if replay is not None:
        without = components_of(part for part, path in parts.items() if path is not None)
        without |= set() if flags.tokenizer is None else {TOKENIZER}
        model = model or (None if replay.model is None else _named(replay.model, "-m", flags, without))
        if refiner is None and "refiner" in replay.used:
            refiner = _named(replay.used["refiner"], "--refiner", flags, frozenset())
        precision = precision or (replay.precision if flags.preset is None else None)
        prediction = prediction or cast(Any, replay.used.get("prediction"))
        quantize = quantize or replay.used.get("quantize")
    return qwenimg.load(
        model,
        flags.backend,
        precision or "auto",
        preset=flags.preset or "auto",
        offline=flags.offline,
        refiner=refiner,
        **parts,
        tokenizer=flags.tokenizer,
        prediction=prediction,
        quantize=quantize,
        max_memory=flags.max_memory,
        fallback=flags.fallback,
        cache_prompts=flags.cache_prompts,
        notify=report.notify,
    )


def _given(flags: Flags) -> list[str]:
    """The parts that were given with options."""
    return [part for part in PARTS if getattr(flags, part) is not None]


def _part(part: str, flags: Flags, used: Mapping[str, str]) -> Path | None:
    """The folder or file of a part that was asked for, or that a replayed recipe names by a hub id."""
    from qwenimg.common.hub import resolve

    given: Path | None = getattr(flags, part)
    return given if given is not None or part not in used else resolve.named_part(used[part])


def _named(name: str, option: str, flags: Flags, without: frozenset[str]) -> str:
    """What to open for a model that the replayed recipe names. Raises ModelError that asks for `option`."""
    from qwenimg.common.hub import resolve

    try:
        return resolve.named(name, offline=flags.offline, without=without)
    except ModelError as error:
        where = clean(flags.replay, 60)
        raise ModelError(f"{error} (the model that {where} was made with; give it with {option})") from None
