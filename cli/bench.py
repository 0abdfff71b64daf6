"""How long a picture takes: measured here, or on paper for machines that are not here."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from qwenimg.backends import PEERS
from qwenimg.cli import places
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.opening import Opening

if TYPE_CHECKING:
    from qwenimg.common.measure.published import Subject

_SIDE = click.IntRange(16, 4096)  # beyond, counting takes long itself
_FEW = 2  # steps of the shorter run


@click.command("bench")
@click.argument("model", required=False)
@click.option(
    "--on-paper", metavar="MACHINE", help="Count a known model's kernels for h100, 4090, m4-max, ...; run nothing."
)
@click.option("-W", "--width", type=_SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("-H", "--height", type=_SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("--steps", type=click.IntRange(1, 1000), metavar="N", help="Default the model's; measured, 6.")
@click.option("--guidance", type=click.FloatRange(0, 100), metavar="X", help="Default the model's; at 1 one branch.")
@places.declared("backend")
@places.declared("precision", help="As of generate. On paper default that of a GPU.")
@places.declared("compile", type=click.Choice(("off", "on")), default="off", metavar="off|on", help="Default off.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, metavar="N", help="Default 3; medians are shown.")
@click.option("--against", type=click.Choice([*PEERS]), metavar="|".join(PEERS), help="Time it as well.")
@click.option(
    "--peer-python", type=click.Path(exists=True, dir_okay=False), metavar="PATH", help="Python of --against; this one."
)
@click.option("--job", type=click.Path(), hidden=True, help="One arm of --against.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@places.found
def bench(
    opening: Opening,
    on_paper: str | None,
    as_json: bool,
    against: str | None,
    peer_python: str | None,
    job: str | None,
    **given: Any,
) -> None:
    """Measures what a picture of MODEL (a name, folder or file) takes here, stage by stage.

    The steady step is the slope between two numbers of steps, so that what comes once is not in it. With --on-
    paper nothing is run: kernels are counted for the program as it is, compiled, and the limit that no program
    passes, and given their time on a machine that `qwenimg plan --on list` lists. Known names need no files for
    that. --against diffusers runs its pipeline on the same files, noise, prompt and dtype, and --against mflux its
    transformer on MLX, with the text states and noise levels of ours; each arm is a process of its own, the peer's
    of --peer-python. Where the latents differ, the ratio is INVALID.
    """
    from qwenimg.cli import streams

    model = opening.model
    given |= {name: opening.value(name) for name in ("backend", "precision", "compile")}
    if job is not None:
        text = _arm(job)
    elif against is not None:
        if on_paper is not None:
            raise UsageError("--on-paper runs nothing and --against measures; give one")
        text = _against(model, against, peer_python or sys.executable, as_json, **given)
    elif peer_python is not None:
        raise UsageError("--peer-python is for --against")
    else:
        text = _on_paper(model, on_paper, as_json, **given) if on_paper else _measured(opening, as_json, **given)
    streams.put(text.encode() + b"\n")


def _measured(opening: Opening, as_json: bool, **given: Any) -> str:
    begun = time.perf_counter()
    from qwenimg import backends, open_pipeline
    from qwenimg.common.measure import bench as measuring

    backends.load(opening.backend)
    imported = time.perf_counter() - begun
    many = _many(given["steps"])
    with ExitStack() as stack:

        def opened() -> Any:
            pipe = open_pipeline(opening)
            stack.callback(pipe.close)
            return pipe

        with ExitStack() as files:
            subject = _subject(opening.model, files)
            usual = subject.defaults
        guidance = usual.guidance if given["guidance"] is None else given["guidance"]
        size = (given["width"] or usual.width, given["height"] or usual.height)
        ask = measuring.Ask(
            width=size[0], height=size[1], guidance=guidance, few=_FEW, many=many, rounds=given["rounds"]
        )
        made, _, pipe = measuring.measure(opened, ask, imported, begun)
        made = _with_share(made, pipe, subject, ask)
    return measuring.as_json([made], ask) if as_json else "\n".join(measuring.lines([made], ask))


def _with_share(made: Any, pipe: Any, subject: Subject, ask: Any) -> Any:
    """With the share of its products, but of no step that was too short to measure."""
    from qwenimg import backends
    from qwenimg.common.measure.bench import cases, share_of_products

    step = made.stages["steady step"]
    if step <= 0:
        return made
    count = backends.counter(apple=pipe.engine.name == "mlx")
    counted = (count(*subject.denoiser, pipe.precision, case) for case in cases(pipe, subject, ask))
    kernels = [kernel for kernels in counted for kernel in kernels]
    share, rate = share_of_products(pipe.engine, kernels, subject.parameters, step)
    return replace(made, share=share, rate=rate)


def _many(steps: int | None) -> int:
    """Steps of the longer run. Raises UsageError."""
    many = steps or 6
    if many <= _FEW:
        raise UsageError(f"--steps {many}: the slope is taken from {_FEW} steps on; give more")
    return many


_OURS = "import sys; from qwenimg.cli.main import run; sys.exit(run(['bench', '--job', sys.argv[1]]))"


def _against(model: str | None, name: str, python: str, as_json: bool, **given: Any) -> str:
    """Both arms, each in a process of its own."""
    from qwenimg import backends
    from qwenimg.common.families import registry
    from qwenimg.common.hub.resolve import resolve
    from qwenimg.common.measure import bench as measuring
    from qwenimg.common.measure import peers
    from qwenimg.common.measure.published import opened
    from qwenimg.common.precision.precision import parse

    peer, many = backends.PEERS[name], _many(given["steps"])
    if given["backend"] not in ("auto", peer.backend or given["backend"]):
        raise UsageError(f"--against {name}: it is compared with --backend {peer.backend}, not {given['backend']}")
    resolved = resolve(model)
    found = registry.open_model(resolved.folder)
    with closing(found.checkpoint):
        peers.check_files(name, resolved.folder, found.checkpoint)
        subject = opened(resolved.name, resolved.known, found)
    peers.check_python(name, python, peer.needs, peer.install)
    engine, usual = backends.load(peer.backend or given["backend"]), subject.defaults
    precision = parse(given["precision"], on_gpu=engine.on_gpu, kind=subject.kind)
    width, height = (16 * -(-side // 16) for side in (given["width"] or usual.width, given["height"] or usual.height))
    guidance = usual.guidance if given["guidance"] is None else given["guidance"]
    ask = measuring.Ask(width=width, height=height, guidance=guidance, few=_FEW, many=many, rounds=given["rounds"])
    job = peers.Job(
        folder=str(resolved.folder),
        backend=engine.name,
        device="cuda" if engine.name == "cuda" else "cpu",
        policy=given["precision"],
        compile=given["compile"],
        dtype=precision.compute_dtype("transformer"),
        vae_dtype=precision.compute_dtype("vae"),
        negative_prompt=usual.negative_prompt,
        prompt=ask.prompt,
        guidance=guidance,
        few=ask.few,
        many=many,
        rounds=ask.rounds,
        given="given.npz" if peer.given else "",
    )
    shape = (1, subject.latent_channels, height // subject.scale, width // subject.scale)
    arms = {"qwenimg": [sys.executable, "-c", _OURS], name: peer.command(python)}
    made = peers.compare(job, arms, shape, ask.seed)
    return json.dumps(made.as_json(ask)) if as_json else "\n".join(peers.shown(made, ask))


def _arm(file: str) -> str:
    """Ours, for `peers.compare`."""
    begun = time.perf_counter()
    from dataclasses import asdict
    from pathlib import Path

    import qwenimg
    from qwenimg import backends
    from qwenimg.common.measure import bench as measuring
    from qwenimg.common.measure import peers

    job = peers.read(Path(file))
    backends.load(job.backend)
    imported = time.perf_counter() - begun
    with ExitStack() as stack:

        def opened() -> Any:
            pipe = qwenimg.load(job.folder, job.backend, job.policy)
            stack.callback(pipe.close)
            pipe.compile(job.compile)
            return pipe

        made, last, pipe = measuring.measure(opened, job.ask(), imported, begun)
        job.keep(last.latents)
        if job.given:
            job.give(pipe)
        with ExitStack() as files:
            made = _with_share(made, pipe, _subject(job.folder, files), job.ask())
    return json.dumps(asdict(made))


def _on_paper(model: str | None, machine_name: str, as_json: bool, **given: Any) -> str:
    from qwenimg import backends
    from qwenimg.backends.paper import backend_of
    from qwenimg.common.measure import on_paper as paper
    from qwenimg.common.measure.machines import machine
    from qwenimg.common.numbers.sizes import render_size
    from qwenimg.common.precision.precision import parse

    found = machine(machine_name)
    backend_of(found.title, given["backend"])  # or it is refused
    with ExitStack() as stack:
        subject = _subject(model, stack, published_alone=True)
        usual = subject.defaults
        made = paper.on_paper(
            backends.counter(found.is_apple),
            subject,
            found,
            parse(given["precision"], on_gpu=True, kind=subject.kind),
            size=render_size(given["width"] or usual.width, given["height"] or usual.height),
            steps=given["steps"] or usual.steps,
            guided=(usual.guidance if given["guidance"] is None else given["guidance"]) > 1,
        )
    return json.dumps(made.as_json()) if as_json else "\n".join(paper.lines(made))


def _subject(model: str | None, stack: ExitStack, *, published_alone: bool = False) -> Subject:
    """By name without files where that is known and enough, else of the files. Raises QwenimgError."""
    from qwenimg.common.families import registry
    from qwenimg.common.families.catalog import DEFAULT
    from qwenimg.common.hub.resolve import resolve
    from qwenimg.common.measure.published import opened, published

    known = published(DEFAULT if model is None else model)
    if published_alone and known is not None:
        return known
    resolved = resolve(model)
    found = registry.open_model(resolved.folder)
    stack.callback(found.checkpoint.close)
    return opened(resolved.name, resolved.known, found)
