"""The command that makes pictures. It runs when the first word of the command line is no other command's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from qwenimg.backends import NAMES
from qwenimg.cli import options, streams
from qwenimg.cli.help import HELP_NAMES, Sectioned, complete_prompt, show_version
from qwenimg.cli.signals import Stop
from qwenimg.common.base.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path, readable=False)  # what cannot be read is told as that, with the code for it
_SETTINGS = {
    "auto_envvar_prefix": "QWENIMG",
    "token_normalize_func": options.known_name,
    "max_content_width": 110,
    "help_option_names": HELP_NAMES,
}


def _reserved(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None or ctx.resilient_parsing:
        return
    for what, names in NOT_BUILT.items():
        if param.opts[0] in names:
            hint = " (-q stays free for it; for less output: --quiet)" if "-q" in names else ""
            raise UsageError(f"{names[0]}: {what} is not built yet{hint}; draw without it")
    raise UsageError(
        "--scheduler means two things: the solver is --sampler and the noise levels are --schedule; "
        "qwenimg samplers lists both"
    )


def _refused(*names: str) -> Callable[[_F], _F]:
    """An option, with a value or without, that is not in the help and ends in a line of its own."""
    return click.option(
        *names,
        is_flag=False,
        flag_value="",
        default=None,
        hidden=True,
        is_eager=True,
        expose_value=False,
        allow_from_autoenv=False,
        callback=_reserved,
    )


# What is not built, and the options by which other programs ask for it.
NOT_BUILT = {
    "quantising": ("-q", "--quantize", "--quantise", "--quantization"),
    "LoRA": ("--lora", "--loras", "--lora-path", "--lora-paths", "--lora-scale", "--lora-scales", "--lora-style"),
    "Lightning, a distilled model or LoRA for few steps,": ("--lightning", "--turbo", "--lcm"),
    "ControlNet": ("--controlnet", "--control-net", "--control-image", "--controlnet-image-path"),
    "the IP-adapter": ("--ip-adapter",),
    "textual inversion": ("--embedding", "--embeddings", "--textual-inversion"),
    "Qwen-Image-Edit": ("--edit",),
    "upscaling": ("--upscale", "--upscaler", "--hires", "--hires-fix"),
}


def _not_built(command: _F) -> _F:
    for names in NOT_BUILT.values():
        command = _refused(*names)(command)
    return command


@click.command("generate", cls=Sectioned, context_settings=_SETTINGS)
@click.argument("words", nargs=-1, metavar="PROMPT", shell_complete=complete_prompt)
# Prompt
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt, whatever it looks like.")
@click.option("-n", "--negative-prompt", metavar="TEXT", help="What to steer away from; needs guidance above 1.")
@click.option("--prompt-file", metavar="FILE|-", help="On each line a prompt, a JSON object or a # comment.")
@click.option("--keep-going", is_flag=True, help="Leave out the lines of a prompt file that are at fault; exit code 7.")
@click.option(
    "--from",
    "replay",
    type=_FILE,
    metavar="IMAGE",
    envvar="QWENIMG_FROM",
    allow_from_autoenv=False,
    help="Make IMAGE again; other options override.",
)
# Picture
@click.option("--size", metavar="WxH", help="Width and height in pixels, such as 1664x928.")
@click.option("--aspect", metavar="W:H", help="A shape such as 16:9: the model's own size of it, else about its area.")
@click.option("-W", "--width", type=int, metavar="PIXELS", help="Width; the model's unless given.")
@click.option("-H", "--height", type=int, metavar="PIXELS", help="Height; the model's unless given.")
@click.option("--steps", type=int, metavar="N", help="1 to 1000; the model's unless given.")
@click.option(
    "--guidance", "--cfg", "--cfg-scale", type=float, metavar="X", help="0 to 100; 1: one pass, no negative prompt."
)
@click.option("--guidance-rescale", type=float, metavar="X", help="0 to 1: against pictures that guidance overexposes.")
@click.option("--sampler", metavar="NAME", help="The model's unless given; `qwenimg samplers` lists them.")
@click.option("--schedule", metavar="NAME", help="Noise levels: model, karras, exponential, beta, ays, ...")
@click.option("-s", "--seed", metavar="SEEDS", help="7, a list 1,2,3 or a range 1-4; -1, the default: random.")
@click.option("-N", "--num-images", type=int, metavar="N", help="N pictures, counting up from the seed.")
# Picture to start from
@click.option("-i", "--image", type=_FILE, metavar="FILE", help="Start from this PNG, JPEG or WebP.")
@click.option("--strength", type=float, metavar="X", help="0 to 1, the share of the schedule that is run on it.")
@click.option("--mask", type=_FILE, metavar="FILE", help="Of its size: white is made anew, black is kept.")
# Model
@click.option("-m", "--model", metavar="MODEL", help="A folder or file, a pulled name or hub id; shapes is built in.")
@click.option("--refiner", metavar="MODEL", help="An SDXL refiner that ends each picture.")
@click.option("--refine-at", type=float, metavar="X", help="Where it takes over. Default 0.8.")
@click.option("--vae", type=_FILE, metavar="FILE", help="Another VAE for Stable Diffusion.")
@click.option("--tokenizer", type=_FILE, metavar="FOLDER", help="CLIP's, for a Stable Diffusion file; else found.")
@click.option("--clip-skip", type=int, metavar="N", help="Leave out the last N layers of CLIP.")
@click.option("--prediction", type=click.Choice(("eps", "v")), metavar="eps|v", help="What the UNet predicts.")
@click.option("--backend", type=click.Choice(NAMES), default="auto", metavar="|".join(NAMES), help="Default auto.")
@click.option(
    "--precision", metavar="POLICY", help="auto, bf16, fp32; fp16 for Stable Diffusion only; parts: bf16,vae=bf16."
)
@click.option("--offline", is_flag=True, help="Use no network.")
@click.option("--latents", type=_FILE, metavar="FILE", help="Noise from .npy or .safetensors, not from the seed.")
# Output
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    help="Name.png, .jpg or .webp, with {seed} {index} {prompt} {date}; folder/, or -.",
)
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@click.option("--save-latents", type=_FILE, metavar="FILE", help="Also write the latents that are decoded.")
@click.option("--no-metadata", is_flag=True, help="Write no recipe into the picture.")
@click.option("--json", is_flag=True, help="Print events, a JSON object a line, instead of paths.")
@click.option("--quiet", is_flag=True, help="Print warnings and errors only, besides paths.")
@click.option("--debug", metavar="WHAT", help="Print timing, shapes or timing,shapes.")
# Other
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=show_version,
    help="Show the version.",
)
@_refused("--scheduler")
@_not_built
@click.pass_context
def generate(ctx: click.Context, /, **given: Any) -> int:
    """Makes pictures from text and prints their paths."""
    from qwenimg.cli import config, environment
    from qwenimg.cli.drawing import Flags, draw

    if not given["words"] and all(given[name] is None for name in ("prompt", "prompt_file", "replay")):
        streams.show(ctx.get_help())
        raise UsageError('no prompt; give one, as in: qwenimg "a red circle"')
    config.settle(ctx, given)
    environment.check(ctx, given)
    return draw(Flags(**given), ctx.obj if isinstance(ctx.obj, Stop) else Stop())
