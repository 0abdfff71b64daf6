"""Time qwenimg and another program on the same files, noise, prompt and dtype.

python tools/bench_against.py diffusers MODEL
python tools/bench_against.py mflux FOLDER --peer-python mflux-env/bin/python

Each program runs in a process of its own. Where the latents differ, the ratio is INVALID.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from against import peers

import qwenimg
from qwenimg import backends
from qwenimg.backends import NAMES
from qwenimg.cli import failures
from qwenimg.common.base.errors import QwenimgError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.hub.resolve import resolve
from qwenimg.common.measure import bench
from qwenimg.common.networks.vaes.flux2_vae import PATCH, Flux2VAEConfig
from qwenimg.common.precision.precision import parse

FEW = 2  # steps of the shorter run
SIDE = click.IntRange(16, 4096)
HERE = Path(__file__).resolve()


class Peer(NamedTuple):
    """Another program that draws the same model."""

    file: str  # the script that times it, in tools/against/
    needs: tuple[str, ...]  # the packages that the script imports
    install: str
    backend: str = ""  # ours that it is compared with; "" for any
    takes_states: bool = False  # it takes text states and noise levels from our arm


PEERS = {
    "diffusers": Peer("diffusers_arm.py", ("qwenimg", "torch", "diffusers"), "pip install diffusers transformers"),
    "mflux": Peer("mflux_arm.py", ("numpy", "mlx", "mflux"), "pip install mflux==0.24.0", "mlx", takes_states=True),
}


@click.command("bench_against")
@click.argument("peer", type=click.Choice([*PEERS]))
@click.argument("model", required=False)
@click.option("-W", "--width", type=SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("-H", "--height", type=SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("--steps", type=click.IntRange(FEW + 1, 1000), default=6, metavar="N", help="Of the longer run.")
@click.option("--guidance", type=click.FloatRange(0, 100), metavar="X", help="Default the model's.")
@click.option("--backend", type=click.Choice(NAMES), default="auto", help="Of qwenimg.")
@click.option("--precision", default="auto", metavar="POLICY", help="Of qwenimg; the peer computes in the same dtype.")
@click.option("--compile", type=click.Choice(("off", "on")), default="off", help="Of qwenimg.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, metavar="N", help="Medians are shown.")
@click.option("--peer-python", type=click.Path(exists=True, dir_okay=False), metavar="PATH", help="Default this one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    peer: str,
    model: str | None,
    width: int | None,
    height: int | None,
    steps: int,
    guidance: float | None,
    backend: str,
    precision: str,
    compile: str,
    rounds: int,
    peer_python: str | None,
    as_json: bool,
) -> None:
    """Time qwenimg and PEER on MODEL (a name, folder or file), each in a process of its own."""
    row, python = PEERS[peer], peer_python or sys.executable
    if backend not in ("auto", row.backend or backend):
        raise UsageError(f"{peer} is compared with --backend {row.backend}, not {backend}")
    resolved = resolve(model)
    opened = registry.open_model(resolved.folder)
    with closing(opened.checkpoint):
        peers.check_files(peer, resolved.folder, opened.checkpoint)
        vae, usual = opened.checkpoint.components["vae"].config, replace(opened, path=resolved).defaults()
    peers.check_python(peer, python, row.needs, row.install)
    engine = backends.load(row.backend or backend)
    policy = parse(precision, on_gpu=engine.on_gpu, kind=opened.family.precision)
    channels, scale = latents_of(vae)
    columns, rows = (-(-side // 16) * 16 // scale for side in (width or usual.width, height or usual.height))
    job = peers.Job(
        folder=str(resolved.folder),
        backend=engine.name,
        device="cuda" if engine.name == "cuda" else "cpu",
        policy=precision,
        compile=compile,
        dtype=policy.compute_dtype("transformer"),
        vae_dtype=policy.compute_dtype("vae"),
        prompt=bench.PROMPT,
        negative_prompt=usual.negative_prompt,
        guidance=usual.guidance if guidance is None else guidance,
        few=FEW,
        many=steps,
        rounds=rounds,
        scale=scale,
        given="given.npz" if row.takes_states else "",
    )
    arms = {
        "qwenimg": [sys.executable, str(HERE), "--arm"],
        peer: [python, str(HERE.parent / "against" / row.file)],
    }
    compared, work = peers.compare(job, arms, (1, channels, rows, columns))
    click.echo(json.dumps(compared.as_json(work)) if as_json else "\n".join(peers.shown(compared, work)))


def latents_of(vae: Any) -> tuple[int, int]:
    """Return the channels and the scale of the latents that a sampler has, for the configuration of a VAE."""
    if isinstance(vae, Flux2VAEConfig):
        return vae.patch_channels, PATCH * vae.scale
    return getattr(vae, "z_dim", None) or vae.latent_channels, vae.scale


def our_arm(file: str) -> str:
    """Run the job in `file` with qwenimg; return its timings as JSON."""
    begun = time.perf_counter()
    job = peers.read(Path(file))
    backends.load(job.backend)
    imported = time.perf_counter() - begun
    with ExitStack() as stack:

        def open_pipeline() -> Any:
            pipe = qwenimg.load(job.folder, job.backend, job.policy)
            stack.callback(pipe.close)
            pipe.compile(job.compile)
            return pipe

        timings, last, pipe = bench.measure(open_pipeline, job.workload(), imported, begun)
        job.keep(last.latents)
        if job.given:
            job.give(pipe)
    return json.dumps(asdict(timings))


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code; an error is one line."""
    try:
        if arguments[:1] == ["--arm"]:
            print(our_arm(arguments[1]))
        else:
            command(arguments, standalone_mode=False)
    except (QwenimgError, click.ClickException) as error:
        return failures.report(error)[0]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
