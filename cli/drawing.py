"""Checks what was asked for, opens the model, makes each picture and writes it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import qwenimg
from qwenimg.cli import environment, failures, writing
from qwenimg.cli.faults import kept, report_faults
from qwenimg.cli.options import parse_debug
from qwenimg.cli.progress import Report
from qwenimg.cli.signals import Stop
from qwenimg.common.base import atomic_files
from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import DoesNotFit, ModelError, NumericsError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.fields import Fields, fields, merged
from qwenimg.common.jobs.pictures import Picture, pictures
from qwenimg.common.jobs.prompt_file import read_prompts
from qwenimg.common.jobs.replay import NAMES, Replay, check_model, read_replay
from qwenimg.common.pictures import latents as latents_

if TYPE_CHECKING:
    from qwenimg import Pipeline, Result

LATENTS = (".npy", ".safetensors")


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
    vae: Path | None
    tokenizer: Path | None
    prediction: Literal["eps", "v"] | None
    model: str | None
    backend: str
    precision: str | None
    offline: bool
    latents: Path | None
    output: str | None
    overwrite: bool
    save_latents: Path | None
    no_metadata: bool
    json: bool
    quiet: bool
    debug: str | None


def draw(flags: Flags, stop: Stop) -> int:
    """The whole run; its exit code. Raises QwenimgError, before any model is opened where that is possible."""
    from qwenimg.common.hub import resolve
    from qwenimg.common.shapes import builtin

    report = Report(as_json=flags.json, quiet=flags.quiet, debug=parse_debug(flags.debug))
    for line in environment.unknown():
        report.notify("warning", line)
    replay = None if flags.replay is None else read_replay(flags.replay)
    for line in () if replay is None else replay.messages:
        report.notify("warning", line)
    wanted, failed = _wanted(flags, replay, report)
    _check_files(flags, replay, wanted)
    noise = None if flags.latents is None else _read_noise(flags.latents, wanted)
    given = _read_pictures(flags, report)
    model = flags.model or (None if replay is None else replay.model)
    built_in = resolve.is_built_in(model)
    if built_in and model is None:
        wanted = kept(wanted, lambda p: builtin.check_prompts([p.prompt]), report, failed, keep_going=flags.keep_going)
    unknown = _unknown_words(wanted) if built_in else []
    for folder in {picture.path.parent for picture in wanted if picture.path is not None}:
        atomic_files.sweep(folder)
    try:
        pipe = _open(flags, replay, report)
        for words in unknown:
            report.notify("warning", words)
        wanted = [_completed(picture, pipe, given) for picture in wanted]
        sizes = dict.fromkeys((picture.said("width"), picture.said("height")) for picture in wanted)
        if built_in and (other := builtin.other_sizes(sizes)):
            report.notify("warning", other)
        if flags.save_latents is not None and len(sizes) > 1:
            raise UsageError("--save-latents: one file takes pictures of one size; this run makes several sizes")
        expected = []

        def check(picture: Picture) -> None:
            writing.check(picture, no_metadata=flags.no_metadata)
            expected.append(pipe.estimate(**_asked(picture, noise, given)))

        wanted = kept(wanted, check, report, failed, keep_going=flags.keep_going)
        report.headline(pipe.headline(), expected)
        report.plan(pipe, wanted)
        skips = {picture.said("clip_skip") or 0 for picture in wanted}
        pipe.prepare(_texts(wanted, pipe), max(skips) if len(skips) == 1 else 0)
        with stop.waits():
            return _draw_all(pipe, wanted, noise, given, flags, replay, report, stop, failed)
    finally:
        report.give_up()


# Before the model is opened


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


def _prompt(flags: Flags) -> str | None:
    """The one prompt of the command line. Raises UsageError if there are two."""
    if len(flags.words) > 1:
        shown = clean(" ".join(flags.words), 80)
        raise UsageError(f'{len(flags.words)} words where one prompt is expected; quote the prompt: "{shown}"')
    if flags.words and flags.said["prompt"] is not None:
        raise UsageError(f"two prompts: {clean(flags.words[0], 60)!r} and that of -p; give one")
    return flags.words[0] if flags.words else flags.said["prompt"]


def _check_files(flags: Flags, replay: Replay | None, wanted: Sequence[Picture]) -> None:
    """What can be refused about files and precision without a model. Raises UsageError."""
    from qwenimg.common.families import registry

    registry.check_precision(flags.precision or "auto")
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
        if flags.save_latents.suffix.lower() not in LATENTS:
            raise UsageError(
                f"--save-latents {clean(flags.save_latents, 120)}: let the name end in .npy or .safetensors"
            )
        atomic_files.check_output(flags.save_latents, overwrite=flags.overwrite)


def _check_same(flags: Flags, used: Mapping[str, str]) -> None:
    """Raises UsageError unless all that a recipe names and does not hold is given."""
    for key, option, value in (
        ("image_sha256", "-i", flags.image),
        ("mask_sha256", "--mask", flags.mask),
        ("vae", "--vae", _vae(flags, used)),
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


@dataclass(frozen=True, kw_only=True)
class Given:
    """The picture to start from, uint8 [H, W, 3], and what of it is to be made anew, uint8 [H, W]."""

    image: Any = None
    mask: Any = None


def _read_pictures(flags: Flags, report: Report) -> Given:
    """Raises UsageError and ModelError."""
    if flags.image is None:
        for option, value in (("--mask", flags.mask), ("--strength", flags.said["strength"])):
            if value is not None:
                raise UsageError(f"{option} needs the picture that it is for; give it with -i")
        return Given()
    from qwenimg.common.pictures import input

    image, notes = input.read_image(flags.image)
    mask, more = (None, []) if flags.mask is None else input.read_mask(flags.mask, image)
    for line in notes + more:
        report.notify("warning", line)
    return Given(image=image, mask=mask)


def _unknown_words(wanted: Sequence[Picture]) -> list[str]:
    """What the built-in model would not understand."""
    from qwenimg.common.shapes import builtin

    prompts = [picture.prompt for picture in wanted]
    negative = (picture.said("negative_prompt") or "" for picture in wanted)
    found = (builtin.unknown_words(prompts), builtin.unknown_words(negative, " of the negative prompt"))
    return [words for words in found if words]


def _open(flags: Flags, replay: Replay | None, report: Report) -> Pipeline:
    model, refiner, precision, prediction = flags.model, flags.refiner, flags.precision, flags.prediction
    if replay is not None:
        model = model or (None if replay.model is None else _named(replay.model, "-m", flags))
        if refiner is None and "refiner" in replay.used:
            refiner = _named(replay.used["refiner"], "--refiner", flags)
        precision = precision or replay.precision
        prediction = prediction or cast(Any, replay.used.get("prediction"))
    return qwenimg.load(
        model,
        flags.backend,
        precision or "auto",
        offline=flags.offline,
        refiner=refiner,
        vae=flags.vae if replay is None else _vae(flags, replay.used),
        tokenizer=flags.tokenizer,
        prediction=prediction,
        notify=report.notify,
    )


def _vae(flags: Flags, used: Mapping[str, str]) -> Path | None:
    """The VAE that was asked for, or that a replayed recipe names by a hub id."""
    from qwenimg.common.hub import resolve

    return flags.vae if flags.vae is not None or "vae" not in used else resolve.named_vae(used["vae"])


def _named(name: str, option: str, flags: Flags) -> str:
    """What to open for a model that the replayed recipe names. Raises ModelError that asks for `option`."""
    from qwenimg.common.hub import resolve

    try:
        return resolve.named(name, offline=flags.offline)
    except ModelError as error:
        where = clean(flags.replay, 60)
        raise ModelError(f"{error} (the model that {where} was made with; give it with {option})") from None


# With it


def _completed(picture: Picture, pipe: Pipeline, given: Given) -> Picture:
    """`picture` with the model's defaults where nothing was said, but for the negative prompt."""
    d = pipe.defaults
    if picture.aspect is not None:
        width, height = d.size(picture.aspect)
    else:
        width, height = d.sides(picture.said("width"), picture.said("height"), given.image)
    usual = {"steps": d.steps, "guidance": d.guidance}
    return replace(picture, asked=usual | picture.asked | {"width": width, "height": height})


def _texts(wanted: Sequence[Picture], pipe: Pipeline) -> list[str]:
    """Every text to encode, once."""
    texts: dict[str, None] = {}
    for picture in wanted:
        texts[picture.prompt] = None
        if picture.said("guidance") > 1:
            negative = picture.said("negative_prompt")
            texts[pipe.defaults.negative_prompt if negative is None else negative] = None
    return list(texts)


def _draw_all(
    pipe: Pipeline,
    wanted: Sequence[Picture],
    noise: Any,
    given: Given,
    flags: Flags,
    replay: Replay | None,
    report: Report,
    stop: Stop,
    failed: list[int],
) -> int:
    """Its exit code. `failed`: exit codes of what is not drawn at all. Each failure is reported with its picture, and
    `done` comes last, also where an error ends the run."""
    made, fatal, latents = 0, 0, list[Any]()
    for picture in wanted:
        stop.picture()
        report.begin(picture)
        start, drawn = time.monotonic(), False
        try:
            result = _draw_one(pipe, picture, _asked(picture, noise, given), report, stop)
            drawn = True
            _compare_noise(result, picture, replay, report)
            writing.write(picture, result, flags)
            report.image(picture, result, time.monotonic() - start)
            made += 1
            latents += [result.latents] if flags.save_latents is not None else []
            if flags.save_latents is not None and len(latents) == len(wanted):
                latents_.write_latents(flags.save_latents, latents_.join_latents(latents), overwrite=flags.overwrite)
        except Exception as error:
            stop.check()
            failed.append(report.failure(picture, error))
            if _ran_out(error):
                if drawn or not made:  # a disk that is full stays full, memory that never sufficed will not suffice
                    break
            elif not isinstance(error, (UsageError, NumericsError)):
                fatal = failed[-1]
                break
    stop.check()
    code = fatal or (0 if not failed else failures.PARTIAL if made else failed[0])
    report.done(made, len(failed), code)
    return code


def _asked(picture: Picture, noise: Any, given: Given) -> dict[str, Any]:
    """What `Pipeline.stream` takes for `picture`, with its own row of `noise` where there is one for each."""
    i = picture.index - 1
    arrays = {
        "image": given.image,
        "mask": given.mask,
        "latents": noise if noise is None or len(noise) == 1 else noise[i : i + 1],
    }
    return picture.asked | arrays


def _draw_one(pipe: Pipeline, picture: Picture, asked: dict[str, Any], report: Report, stop: Stop) -> Result:
    events = pipe.stream(**asked)
    for event in events:
        if isinstance(event, qwenimg.Result):
            return event
        stop.step(event.index, event.total, event.seconds)
        report.step(picture, event)
        stop.check_step()
    raise AssertionError("the stream ended without a picture")


def _ran_out(error: Exception) -> bool:
    """Whether `error` says that memory or disk did not suffice."""
    return isinstance(error, DoesNotFit) or failures.out_of_memory(error) or failures.disk_full(error)


def _compare_noise(result: Result, picture: Picture, replay: Replay | None, report: Report) -> None:
    """Warns where a picture that is made again starts from other noise, so that it must come out different."""
    if replay is None or replay.noise_sha256 is None or replay.fields.get("seed") != str(picture.seed):
        return
    same_size = all(replay.fields.get(side) == picture.said(side) for side in ("width", "height"))
    if same_size and result.recipe["noise_sha256"] != replay.noise_sha256:
        report.notify("warning", "the noise is not that of the picture given to --from")
    prints = result.recipe.get("fingerprints", {})
    for key, option in zip(NAMES, ("-m", "--refiner", "--vae"), strict=True):
        if key in prints and replay.fingerprints.get(key, prints[key]) != prints[key]:
            report.notify("warning", f"the weights given to {option} are not those of the picture given to --from")
    for key, option in (("image_sha256", "-i"), ("mask_sha256", "--mask")):
        if replay.used.get(key, result.recipe.get(key)) != result.recipe.get(key):
            report.notify("warning", f"the picture given to {option} is not that of the picture given to --from")
