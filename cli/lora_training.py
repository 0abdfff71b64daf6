"""The run of `train lora`: checks, plan, pictures, steps, and the file; on a terminal, or watched by another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qwenimg.cli import streams
from qwenimg.cli.signals import Stop
from qwenimg.common.base.atomic_files import check_output, make_folder
from qwenimg.common.base.errors import DoesNotFit, UsageError
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.families.load_options import LoadOptions

if TYPE_CHECKING:
    from qwenimg import Pipeline
    from qwenimg.common.training.encoded import DataOptions, EncodedPictures
    from qwenimg.common.training.folder import Folder
    from qwenimg.common.training.plan import TrainingPlan
    from qwenimg.common.training.session import Judged, LoraSession, Made

DISTILLED = (
    "is distilled to draw in few steps, which training through it undoes: the more it learns, the worse few steps get. "
    "Train its base model, or for Z-Image-Turbo load its training adapter by --lora"
)
FEW_STEPS = 8  # of a picture: a model that draws in no more is distilled
SUFFIX, AUTO = ".safetensors", "auto"
_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
LARGE = 1_000_000_000  # parameters from which checkpointing is on
KNOWN_FEWEST, KNOWN_MOST = 96, 200  # pictures that the model draws of what it knows
LINES = 40  # of steps, about, where standard error is no terminal


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of the command."""

    data: Path
    output: Path
    opening: LoadOptions
    word: str
    keep: str | None
    hold_out: int
    rank: int
    steps: int
    rate: float
    size: int | None
    batch: int
    accumulate: int
    optimizer: str
    seed: int
    dropout: float
    train_text_encoder: bool
    flips: bool
    alpha_mask: bool
    enlarge: bool
    products: str  # --precision
    phases: str | None
    lora: tuple[str, ...]
    checkpointing: bool | None
    sample: tuple[str, ...]
    sample_every: int
    save_every: int
    dtype: str
    keep_captions: bool
    resume: bool
    overwrite: bool
    only_plan: bool
    quiet: bool

    @property
    def folder(self) -> Path:
        """The folder of the run's own files."""
        return self.output.with_suffix(".run")

    @property
    def pictures(self) -> int:
        """The pictures of a step."""
        return self.batch * self.accumulate


class Watcher(Protocol):
    """Who follows a run, and may stop it."""

    @property
    def is_stopped(self) -> bool:
        """True: the run ends after the present step."""
        ...

    def check(self) -> None:
        """Raise to end a run before its first step."""
        ...

    def stepping(self) -> AbstractContextManager[object]:
        """Return the context of the steps."""
        ...

    def tell(self, line: str) -> None:
        """Show a line about the run."""
        ...

    def warn(self, text: str) -> None: ...

    def follow(self, event: Made | Judged) -> None:
        """Show a step, or losses on fixed noise."""
        ...


def run(wanted: Wanted, stop: Stop) -> int:
    """Train the LoRA, and print its path."""
    watcher = _Terminal(wanted, stop)
    if train(wanted, watcher):
        watcher.tell(f"results: {shown_path(wanted.folder / 'index.html')}")
        streams.put(bytes(wanted.output) + b"\n")
    return 0  # after a signal, its exit code comes with its message


def train(wanted: Wanted, watcher: Watcher) -> bool:
    """Train the LoRA and write it; return False if the run was stopped at a step, whose checkpoint is written then, or
    only planned. Raises QwenimgError."""
    import qwenimg
    from qwenimg.common.training.folder import read_folder, split, table

    _check_files(wanted)
    facts = _facts(wanted)
    if facts.distilled and not wanted.lora:
        watcher.warn(f"{clean(facts.name, 60)} {DISTILLED}")
    if facts.pairs and wanted.keep == AUTO:
        raise UsageError("--keep auto: this model edits pictures, and draws none alone; give a folder of pairs")
    folder, held_out = split(read_folder(wanted.data, wanted.word, pairs=facts.pairs), wanted.hold_out)
    side = wanted.size or facts.side
    sizes = _data(wanted, side).sizes(folder)
    for line in table(folder, sizes, wanted.word):
        watcher.tell(line)
    known = _known_folder(wanted, pairs=facts.pairs)
    chosen = _planned(wanted, watcher, facts, min(side, max(isqrt(width * height) for width, height in sizes.values())))
    options = _data(wanted, chosen.side if chosen.reduced else side)
    if known is not None:
        options.sizes(known)
    for line in chosen.lines(wanted.steps):
        watcher.tell(line)
    if wanted.only_plan:
        return False
    if not chosen.fits:
        raise DoesNotFit(f"the run takes about {_amounts(chosen)}: give --max-memory, which chooses what fits, or -q 4")
    watcher.check()
    with ExitStack() as stack:
        messages = _Messages(watcher)
        pipe = qwenimg.open_pipeline(replace(wanted.opening, quantize=chosen.bits), messages.notify)
        stack.callback(pipe.close)
        pipe.engine.expect(chosen.peak)
        session = _session(wanted, chosen, pipe, folder, held_out, known, options, watcher)
        messages.trains = True
        stack.callback(session.close)
        captions = [one.caption for one in folder.pictures] if wanted.keep_captions else []
        if not _steps(wanted, session, watcher):
            return False
        session.write(
            wanted.output,
            dtype=_DTYPES[wanted.dtype],
            word=wanted.word,
            captions=captions,
            overwrite=wanted.overwrite or wanted.resume,
        )
    return True


# Before anything is opened


def _check_files(wanted: Wanted) -> None:
    """Check what needs no model."""
    from qwenimg.common.request import lora_text
    from qwenimg.common.request.loras import find_file
    from qwenimg.common.training.config import plan_phases

    for one in lora_text.parse(wanted.lora):
        find_file(one.source)

    if wanted.output.suffix.lower() != SUFFIX:
        raise UsageError(f"-o {shown_path(wanted.output, 80)}: let the name end in {SUFFIX}")
    check_output(wanted.output, overwrite=wanted.overwrite or wanted.resume or wanted.only_plan)
    plan_phases("fp32" if wanted.products == AUTO else wanted.products, wanted.steps, wanted.phases)
    there = os.path.lexists(wanted.folder / f"lora{SUFFIX}")
    if wanted.resume and not there:
        raise UsageError(f"--resume: {shown_path(wanted.folder, 80)} has no checkpoint; start without --resume")
    if there and not wanted.resume and not wanted.only_plan:
        raise UsageError(
            f"{shown_path(wanted.folder, 80)}: a run is there already; go on with --resume, or move it away"
        )


def _data(wanted: Wanted, side: int) -> DataOptions:
    from qwenimg.common.training.encoded import DataOptions

    return DataOptions(
        side=side, dropout=wanted.dropout, flips=wanted.flips, alpha_mask=wanted.alpha_mask, enlarge=wanted.enlarge
    )


def _known_folder(wanted: Wanted, *, pairs: bool) -> Folder | None:
    """Return the pictures of --keep FOLDER."""
    from qwenimg.common.training.folder import read_folder

    return None if wanted.keep in (None, AUTO) else read_folder(Path(str(wanted.keep)), pairs=pairs)


# The plan


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """Facts about the model: its name, the side of its usual pictures, whether it is distilled to draw in few steps,
    whether it edits pictures, and whether it is large."""

    name: str
    side: int
    distilled: bool
    pairs: bool
    large: bool


def _facts(wanted: Wanted) -> _Facts:
    """Return facts about the model. Raises UsageError for one that is not trained, or not in this precision."""
    from qwenimg.common.training.config import plan_phases
    from qwenimg.common.training.lora import check_precision

    with _on_paper(wanted, wanted.opening.quantize) as pipe:
        defaults, model = pipe.defaults, pipe.model
        asked = "fp32" if wanted.products == AUTO else wanted.products
        check_precision(model, asked, plan_phases(asked, wanted.steps, wanted.phases))
        large = model.checkpoint.parameters > LARGE
        return _Facts(
            name=pipe.model_name,
            side=min(defaults.width, defaults.height),
            distilled=defaults.steps <= FEW_STEPS,
            pairs=bool(model.inputs.fewest),
            large=large,
        )


@contextmanager
def _on_paper(wanted: Wanted, bits: str | None) -> Iterator[Pipeline]:
    """Open the model on paper, in the dtype of the dearest phase."""
    from qwenimg.backends.paper import on_paper
    from qwenimg.common.hub.open_model import plan_pipeline
    from qwenimg.common.training.session import training_of

    limit = wanted.opening.limit if wanted.only_plan else None  # a plan is of a machine with so much
    engine = on_paper(wanted.opening.backend, limit)
    precision = "fp32" if _dearest(wanted, on_gpu=engine.on_gpu) == "float32" else "bf16"
    pipe, _ = plan_pipeline(replace(wanted.opening, quantize=bits, precision=precision), engine)
    with closing(pipe):
        training_of(pipe, texts=wanted.train_text_encoder)
        yield pipe


def _planned(wanted: Wanted, watcher: Watcher, facts: _Facts, side: int) -> TrainingPlan:
    """Return the plan of the run. With --max-memory it is the first that fits of checkpointing, fewer bits, and smaller
    sizes: a step computes its pictures one by one, so that accumulation saves nothing more."""
    from qwenimg.common.training.plan import SIDES, plan
    from qwenimg.common.training.session import training_of

    def planned(bits: str | None, checkpointing: bool, side: int) -> TrainingPlan:
        with _on_paper(wanted, bits) as pipe:
            return plan(
                pipe,
                training_of(pipe)[1],
                side=side,
                rank=wanted.rank,
                batch=wanted.pictures * (1 if wanted.keep is None else 2),
                checkpointing=checkpointing,
                dtype=_dearest(wanted, on_gpu=pipe.engine.on_gpu),
                bits=bits,
                optimizer=wanted.optimizer,
                texts=wanted.train_text_encoder,
            )

    bits, limit = wanted.opening.quantize, wanted.opening.max_memory
    first = planned(bits, facts.large if wanted.checkpointing is None else wanted.checkpointing, side)
    if limit is None or first.fits:
        return first
    fewer = [bits] if bits is not None else [None, "8", "4"]
    smaller = [one for one in SIDES if one < side] if wanted.size is None else []
    last = first
    for some_bits, some_side in [*((one, side) for one in fewer), *((fewer[-1], one) for one in smaller)]:
        last = replace(planned(some_bits, True, some_side), reduced=some_side < side)
        if last.fits:
            watcher.tell(f"--max-memory {clean(limit, 20)} chooses: {last.label}")
            return last
    smaller_too = " or --size" if wanted.size is not None else ""
    took = f"even with {last.label} the run takes about {_amounts(last)}"
    raise DoesNotFit(f"{took}; give a smaller --rank{smaller_too}")


def _amounts(plan: TrainingPlan) -> str:
    from qwenimg.common.base.amounts import size_text

    return f"{size_text(plan.peak)}, and {size_text(plan.budget)} are there"


def _dearest(wanted: Wanted, *, on_gpu: bool) -> str:
    """Return the widest dtype of the run's phases."""
    from qwenimg.common.training.config import plan_phases

    precision = ("bf16" if on_gpu else "fp32") if wanted.products == AUTO else wanted.products
    dtypes = {phase.dtype for phase in plan_phases(precision, wanted.steps, wanted.phases) if phase.steps}
    return "float32" if "float32" in dtypes else min(dtypes)


# The run


def _session(
    wanted: Wanted,
    chosen: TrainingPlan,
    pipe: Pipeline,
    folder: Folder,
    held_out: Folder,
    known: Folder | None,
    options: DataOptions,
    watcher: Watcher,
) -> LoraSession:
    """Encode pictures and captions, and return the run at its first step, or where it was left."""
    from qwenimg.common.request import lora_text
    from qwenimg.common.training.config import LoraConfig
    from qwenimg.common.training.encoded import EncodedPictures
    from qwenimg.common.training.session import LoraSession, Samples, base_hashes

    def encoded(some: Folder | None, what: str) -> EncodedPictures | None:
        if some is None or not some.pictures:
            return None

        def done(count: int, total: int) -> None:
            watcher.check()
            if count in (1, total) or count % 50 == 0:
                watcher.tell(f"encoding {what}: {count} of {total}")

        return EncodedPictures(pipe, some, options, done)

    loras = lora_text.parse(wanted.lora)
    pipe.loras.check(loras)
    make_folder(wanted.folder)
    if wanted.keep == AUTO:
        known = _draw_known(wanted, pipe, folder, chosen.side, watcher)
    learnt = encoded(folder, "pictures")
    assert learnt is not None
    kept, judged = encoded(known, "known pictures"), encoded(held_out, "held-out pictures")
    facts = base_hashes(pipe, texts=wanted.train_text_encoder)
    facts |= {"data_sha256": learnt.digest, "pictures": str(len(folder.pictures))}
    facts |= {"size": str(chosen.side), "dropout": f"{wanted.dropout:g}"}
    facts |= {} if kept is None else {"known_sha256": kept.digest}
    facts |= {name: str(value) for name, value in pipe.loras.recorded(loras).items()}
    config = LoraConfig(
        stem=wanted.folder / "lora",
        steps=wanted.steps,
        rank=wanted.rank,
        rate=wanted.rate,
        batch=wanted.pictures if kept is None else 2 * wanted.pictures,
        seed=wanted.seed,
        optimizer=wanted.optimizer,
        precision=wanted.products,
        shares=wanted.phases,
        save_every=wanted.save_every,
        checkpointing=chosen.checkpointing,
        text_encoder=wanted.train_text_encoder,
        resume=wanted.resume,
        facts=facts,
    )
    first = folder.pictures[0]
    samples = Samples(
        prompts=wanted.sample or ((wanted.word or first.caption),),
        every=wanted.sample_every,
        size=max(sizes := [*options.sizes(folder).values()], key=sizes.count),
    )
    return LoraSession(pipe, config, learnt, kept, judged, samples, watcher.tell, loras)


def _steps(wanted: Wanted, session: LoraSession, watcher: Watcher) -> bool:
    """Make the steps that are left; return False if the run was stopped, whose checkpoint is written then."""
    with watcher.stepping():
        for event in session.steps():
            watcher.follow(event)
            if watcher.is_stopped and session.step < wanted.steps:
                session.save()
                watcher.tell(f"step {session.step} is saved; the same command with --resume goes on")
                return False
    return True


class _Messages:
    """The messages of the model: all while it is prepared, then each warning once."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher, self.trains = watcher, False
        self._warned: set[str] = set()

    def notify(self, kind: str, text: str) -> None:
        if kind == "warning":
            if text not in self._warned:
                self._warned.add(text)
                self.watcher.warn(text)
        elif not self.trains:
            self.watcher.tell(text)


class _Terminal:
    """A run on a terminal: lines, of which that of the present step is written again and again, or lines of some steps.
    A signal stops it."""

    def __init__(self, wanted: Wanted, stop: Stop) -> None:
        self.wanted, self.stop, self._open = wanted, stop, False
        self._terminal = not wanted.quiet and streams.can_ask()
        self._every = max(1, wanted.steps // LINES)

    @property
    def is_stopped(self) -> bool:
        return self.stop.number is not None

    def check(self) -> None:
        self.stop.check()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        with self.stop.serving(lambda: None, "this step"):
            yield
        self._end()

    def tell(self, line: str) -> None:
        self._end()
        if not self.wanted.quiet:
            streams.say(line)

    def warn(self, text: str) -> None:
        streams.say(f"qwenimg: warning: {text}")

    def follow(self, event: Made | Judged) -> None:
        from qwenimg.common.base.amounts import duration
        from qwenimg.common.training.session import Judged

        if isinstance(event, Judged):
            held = "" if event.held_out is None else f", held out {event.held_out:.4f}"
            self.tell(f"step {event.step}: loss on fixed noise {event.learnt:.4f}{held}")
            return
        done, steps = event.done, self.wanted.steps
        text = f"step {done.step} of {steps}: loss {done.loss:.4f}, rate {done.rate:.2g}"
        left = f", {duration(event.left)} left" if done.step < steps else ""
        always = done.step % self._every == 0 or done.step == steps
        self._step(f"{text}, {event.seconds:.2g} s a step{left}", always=always)

    def _step(self, text: str, *, always: bool) -> None:
        if self._terminal:
            import sys

            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._open = True
        elif always:
            self.tell(text)

    def _end(self) -> None:
        if self._open:
            streams.say("")
            self._open = False


# What the model knows


def _draw_known(wanted: Wanted, pipe: Pipeline, folder: Folder, side: int, watcher: Watcher) -> Folder:
    """Draw pictures of what the model knows, with their prompts, into the run's folder; those that are there stay."""
    from qwenimg.common.base.atomic_files import write_atomic
    from qwenimg.common.pictures.png import encode_png
    from qwenimg.common.training.folder import read_folder

    place = wanted.folder / "known"
    make_folder(place)
    count = min(KNOWN_MOST, max(KNOWN_FEWEST, len(folder.pictures)))
    prompts = _known_prompts(wanted, folder, pipe.model_name)
    for i in range(count):
        path = place / f"{i:03d}.png"
        if path.exists():
            continue
        watcher.check()
        prompt = prompts[i % len(prompts)]
        if i % 10 == 0:
            watcher.tell(f"drawing what the model knows: {i + 1} of {count}")
        pixels = pipe(prompt, width=side, height=side, seed=wanted.seed + i).pixels
        write_atomic(path.with_suffix(".txt"), prompt.encode(), overwrite=True)
        write_atomic(path, encode_png(pixels, {}, None), overwrite=False)
    return read_folder(place)


def _known_prompts(wanted: Wanted, folder: Folder, model: str) -> list[str]:
    """Return prompts of what the model knows: of the built-in model, all that it knows; else the captions without the
    word."""
    from qwenimg.common.shapes import builtin

    if model == builtin.NAME:
        return builtin.known_prompts()
    texts = (one.caption.replace(wanted.word, " ") if wanted.word else one.caption for one in folder.pictures)
    found = list(dict.fromkeys(text for one in texts if (text := " ".join(one.split()).strip(" ,.;"))))
    if not found:
        raise UsageError("--keep auto: no caption has more than the word; write captions, or give --keep FOLDER")
    return found
