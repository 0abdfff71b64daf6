"""The run of `generate`: check the options, open the model, and generate and write each image."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qwenimg
from qwenimg.cli import failures, foreign_words, streams
from qwenimg.cli.options import parse_debug
from qwenimg.cli.progress import RunPrinter
from qwenimg.cli.signals import Stop
from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.opening import Opening, opening_of
from qwenimg.common.jobs.fields import Fields, merged, option_in
from qwenimg.common.jobs.legal import check_cache, check_forms, check_replay, read_noise, read_pictures
from qwenimg.common.jobs.pictures import Picture, makes_folder, pictures
from qwenimg.common.jobs.prompt_file import read_prompts
from qwenimg.common.jobs.replay import Replay, read_replay
from qwenimg.common.jobs.run import (
    Job,
    Outcome,
    check_files,
    completed,
    estimated,
    kept_controls,
    passing,
    prepare,
    run,
)
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.parts import PARTS

if TYPE_CHECKING:
    from qwenimg import Step
    from qwenimg.cli.ranks.lead import Leader
    from qwenimg.common.hub.model_folders import ModelFolders
    from qwenimg.common.memory.estimate import Estimate

MOST = 20  # the most faults of a prompt file that are reported one by one if they end the run


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The options, by click's names for them. An option that was not given is None."""

    words: tuple[str, ...]
    options: Fields  # the options in `jobs.fields.SAID`
    opening: Mapping[str, Any]  # the options in `families.opening.OPENING`
    prompt_file: str | None
    keep_going: bool
    replay: Path | None
    image: tuple[Path, ...]
    mask: Path | None
    devices: int
    step_cache_check: bool
    latents: Path | None
    output: str | None
    overwrite: bool
    save_latents: Path | None
    keep_control: bool
    no_metadata: bool
    stack: bool
    sheet: bool
    json: bool
    quiet: bool
    debug: str | None
    preview: bool


def draw(flags: Flags, stop: Stop, warnings: Iterable[str] = ()) -> int:
    """Generate all images that `flags` ask for and return the exit code. Raises QwenimgError, if possible before a
    model is opened.

    warnings: about the options."""
    report = RunPrinter(as_json=flags.json, quiet=flags.quiet, debug=parse_debug(flags.debug))
    for line in warnings:
        report.notify("warning", line)
    opening = opening_of(flags.opening)
    leader = None if flags.devices == 1 else _leader(flags.devices, opening, stop)
    try:
        return _draw(flags, opening, leader, stop, report)
    finally:
        if leader is not None:
            leader.leave()


def _leader(devices: int, opening: Opening, stop: Stop) -> Leader:
    """Return rank 0 of several devices. Never returns on another rank, which follows that one. Raises QwenimgError."""
    from qwenimg.backends import ranks
    from qwenimg.cli.ranks import follow
    from qwenimg.cli.ranks.lead import Leader, check

    place = ranks.place(devices)
    if place is not None and place.rank:
        check(opening)
        follow.follow(place, ranks.check_backend(opening.backend, launched_by_mlx=ranks.by_mlx()), tuple(sys.argv[1:]))
    return Leader(devices, place, opening, stop)


def _draw(flags: Flags, opening: Opening, leader: Leader | None, stop: Stop, report: RunPrinter) -> int:
    """Generate all images, with other ranks if there is a leader; return the exit code."""
    from qwenimg.common.hub import resolve

    asked = check_forms(flags.options, flags.output, flags.latents, flags.save_latents)
    replay = None if flags.replay is None else read_replay(flags.replay)
    for line in () if replay is None else replay.messages:
        report.notify("warning", line)
    replay = _with_loras(flags, opening, replay, report)
    folders, opening = _located(opening)
    wanted, failed = _wanted(flags, asked, replay, Wildcards(opening.wildcards), report)
    wanted = wanted if folders is None else [_with_paths(picture, folders) for picture in wanted]
    _check_files(flags, opening, replay, wanted)
    job = _job(flags, replay, wanted, report)
    advice = None if opening.parts else resolve.advice(opening.model or (None if replay is None else replay.model))
    if advice is not None:
        wanted = kept(
            wanted, lambda p: advice.check(p.prompt, p.said("few_steps")), report, failed, keep_going=flags.keep_going
        )
    for folder in {picture.path.parent for picture in wanted if picture.path is not None}:
        atomic_files.sweep(folder)
    try:
        opens = qwenimg.open_pipeline if leader is None else leader.open_pipeline
        pipe = opens(replace(_replayed(flags, opening, replay), compile="auto"), report.notify)
        wanted = [completed(picture, pipe, job) for picture in wanted]
        check_files(job, wanted)
        sizes = {(picture.said("width"), picture.said("height")) for picture in wanted}
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
        compiled = pipe.compile(opening.compile, sum(one.seconds for one in expected))
        step = max(one.step for one in expected)
        report.headline(pipe.headline(), expected)
        report.decided(opening.compile, compiled)
        report.plan(pipe, wanted)
        if flags.preview:
            report.previews(pipe)
        prepare(pipe, wanted, job)
        pipe.runtime.interrupt = stop.check
        with stop.waits(step):
            listener = RunReport(report, stop, failed, alone=leader is None)
            return listener.code(run(pipe, job, wanted, listener))
    finally:
        report.give_up()


class RunReport:
    """A listener that prints reports, and ends the run after a signal. `codes`: exit codes of failed images. alone:
    no other ranks draw with this process."""

    def __init__(self, report: RunPrinter, stop: Stop, codes: list[int], *, alone: bool = True) -> None:
        self.report, self.stop, self.codes, self.alone = report, stop, codes, alone
        self.notify, self.image = report.notify, report.image

    def begin(self, picture: Picture) -> None:
        self.stop.picture()
        self.report.begin(picture)

    def step(self, picture: Picture, step: Step) -> None:
        self.report.step(picture, step)
        self.stop.step(step.index, step.total, step.seconds)

    def failure(self, picture: Picture, error: Exception) -> None:
        self.stop.check()
        if not self.alone:
            self.stop.claim()  # a signal that ends all ranks is reported once
        self.codes.append(self.report.failure(picture, error))

    def code(self, outcome: Outcome) -> int:
        """Return the exit code. `done` is the last event, even if an error ended the run."""
        self.stop.check()
        codes = self.codes
        fatal = codes[-1] if outcome.fatal else 0
        code = fatal or (0 if not codes else failures.PARTIAL if outcome.written else codes[0])
        self.report.done(outcome.written, len(codes), code)
        return code


# Checks before the model is opened


def _wanted(
    flags: Flags, asked: Fields, replay: Replay | None, wildcards: Wildcards, report: RunPrinter
) -> tuple[list[Picture], list[int]]:
    """Return the images to generate, by the options `asked` among others, and the exit codes of images that cannot be
    generated, whose faults are reported here. Raises QwenimgError."""
    prompt = _prompt(flags)
    if prompt is not None and flags.prompt_file is not None:
        raise UsageError("a prompt and --prompt-file; give one of them")
    options = asked if prompt is None else asked | {"prompt": prompt}
    base = merged({} if replay is None else replay.fields, options)
    lines = None if flags.prompt_file is None else read_prompts(flags.prompt_file)
    described = bool(flags.image)  # some models describe a picture
    wanted, faults = pictures(base, lines, flags.output, wildcards, overwrite=flags.overwrite, unsaid=described)
    return wanted, report_faults(faults, report, left=len(wanted), keep_going=flags.keep_going)


def _with_loras(flags: Flags, opening: Opening, replay: Replay | None, report: RunPrinter) -> Replay | None:
    """Return `replay` with the LoRAs of its recipe that are in the folders of --models-dir. Raises UsageError for one
    that is not there."""
    if replay is None or "lora" not in replay.used or flags.options["lora"] is not None or not opening.models_dir:
        return replay
    from qwenimg.common.hub.lora_search import located
    from qwenimg.common.hub.model_folders import read_folders

    loras, lines = located(read_folders(opening.models_dir), replay.loras, replay.lora_fingerprints)
    for line in lines:
        report.notify("stage", line)
    used = {name: value for name, value in replay.used.items() if name != "lora"}
    return replace(replay, fields=replay.fields | {"lora": loras}, used=used)


def _located(opening: Opening) -> tuple[ModelFolders | None, Opening]:
    """Return the folders of --models-dir, if there are any, and `opening` with the paths of files that are found there
    by name. Raises UsageError and ModelError."""
    if not opening.models_dir:
        return None, opening
    from qwenimg.common.hub.part_files import located

    return located(opening)


def _with_paths(picture: Picture, folders: ModelFolders) -> Picture:
    """Return `picture` with the paths of LoRAs that are found by name. Raises ModelError."""
    loras = picture.said("lora")
    return replace(picture, asked=picture.asked | {"lora": folders.loras(loras)}) if loras else picture


def _prompt(flags: Flags) -> str | None:
    """Return the one prompt of the command line, or None. Raises UsageError if there are two."""
    if len(flags.words) > 1:
        shown = clean(" ".join(flags.words), 80)
        if flags.options["lora"] and _is_number(flags.words[-1]):
            lora = clean(flags.options["lora"][-1], 60)
            raise UsageError(f"--lora takes its strength behind a colon: --lora {lora}:{flags.words[-1]}")
        raise UsageError(f'{len(flags.words)} words where one prompt is expected; quote the prompt: "{shown}"')
    if flags.words and flags.options["prompt"] is not None:
        raise UsageError(f"two prompts: {clean(flags.words[0], 60)!r} and that of -p; give one")
    if flags.words and (option := option_in(flags.words[0], foreign_words.OPTIONS)):
        ours = foreign_words.OPTIONS.get(option)
        what = f", and no option here: {ours}" if ours else "; close them before it"
        raise UsageError(f"{option} is inside the quotes of the prompt{what}. To draw it as words: -p")
    return flags.words[0] if flags.words else flags.options["prompt"]


def _check_files(flags: Flags, opening: Opening, replay: Replay | None, wanted: Sequence[Picture]) -> None:
    """Check everything about files that needs no model. Raises UsageError."""
    if flags.step_cache_check:
        check_cache(wanted)
    if flags.output == "-":
        if flags.keep_control:
            raise UsageError("--keep-control writes beside the picture's file; give one with -o")
        if len(wanted) > 1:
            raise UsageError(f"-o -: standard output takes one picture, this run makes {len(wanted)}")
        if flags.json:
            raise UsageError("-o - and --json both write to standard output; give one of them")
        if sys.stdout is not None and sys.stdout.isatty():
            raise UsageError("-o -: a terminal cannot take a PNG; send the output to a file or a program")
    if replay is not None:
        from qwenimg.common.hub.origin import with_recorded_parts

        completed_opening = with_recorded_parts(opening, replay)
        given: dict[str, object] = {"mask_sha256": flags.mask, "latents": flags.latents}
        given |= {"image_sha256": flags.image or None, "more_images_sha256": flags.image[1:] or None}
        parts = {part: completed_opening.value(part) for part in PARTS}
        check_replay(
            replay, given | parts | {name: flags.options[name] for name in ("lora", "control", "seed")}, opening.model
        )
    if flags.save_latents is not None:
        atomic_files.check_output(flags.save_latents, overwrite=flags.overwrite)
    for path in (path for one in wanted for path in (kept_controls(one) if flags.keep_control else ())):
        if path is not None:
            atomic_files.check_output(path, overwrite=flags.overwrite, new_folder=makes_folder(flags.output))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _job(flags: Flags, replay: Replay | None, wanted: Sequence[Picture], report: RunPrinter) -> Job:
    """Read the arrays that were given, and collect how images are written. Raises UsageError and ModelError."""
    noise = None if flags.latents is None else read_noise(flags.latents, wanted)
    controlled = any(one.said("control") for one in wanted)
    only_masked = flags.options["only_masked"] is not None
    strength = flags.options["strength"]
    images, mask, notes = read_pictures(
        flags.image, flags.mask, strength, controlled=controlled, only_masked=only_masked
    )
    for line in notes:
        report.notify("warning", line)
    return Job(
        images=images,
        mask=mask,
        noise=noise,
        noise_rows=1 if noise is None else max(1, len(noise) // len(wanted)),
        replay=replay,
        notes=(*(() if replay is None else replay.messages), *notes),
        overwrite=flags.overwrite,
        metadata=not flags.no_metadata,
        check_cache=flags.step_cache_check,
        new_folder=makes_folder(flags.output),
        save_latents=flags.save_latents,
        keep_control=flags.keep_control,
        put=streams.put,
        views=tuple(name for name in ("stack", "sheet") if getattr(flags, name)),
    )


def _replayed(flags: Flags, opening: Opening, replay: Replay | None) -> Opening:
    """Return `opening` completed from the recipe of a repeated image. Raises ModelError."""
    if replay is None or flags.replay is None:
        return opening
    from qwenimg.common.hub.origin import replayed

    says_policy = any(flags.opening[name] is not None for name in ("preset", "precision"))
    return replayed(opening, replay, flags.replay, keep_policy=not says_policy)


# Lines of a prompt file that cannot be generated: each is reported, and ends the run or is skipped


def report_faults(faults: Sequence[ModelError], report: RunPrinter, *, left: int, keep_going: bool) -> list[int]:
    """Report `faults` and return their exit codes. Raises the last if they end the run: without `keep_going`, or if no
    image is `left`."""
    if not faults or (keep_going and left):
        return [report.fault(error) for error in faults]
    *others, last = faults[:MOST]
    for error in others:
        report.fault(error)
    if len(faults) > MOST:
        report.fault(last)
        last = ModelError(f"{len(faults) - MOST} more lines of the prompt file are at fault, after those above")
    raise last


def kept(
    wanted: list[Picture],
    check: Callable[[Picture], object],
    report: RunPrinter,
    failed: list[int],
    *,
    keep_going: bool,
) -> list[Picture]:
    """Return the images of `wanted` that pass `check`. A fault of a prompt file is reported with its line, and its
    exit code is added to `failed`. Raises QwenimgError."""
    passed, faults = passing(wanted, check)
    failed += report_faults(faults, report, left=len(passed), keep_going=keep_going)
    return passed
