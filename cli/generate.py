"""The command that makes pictures. It runs when the first word of the command line is no other command's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from qwenimg.backends import NAMES
from qwenimg.cli import options, parts, places, streams
from qwenimg.cli.help import HELP_NAMES, Sectioned, complete_prompt, show_version
from qwenimg.cli.signals import Stop
from qwenimg.common.base.errors import UsageError
from qwenimg.common.jobs.fields import ALL, SAID
from qwenimg.common.runtime.compiling import MODES

_F = TypeVar("_F", bound=Callable[..., Any])
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
            raise UsageError(f"{names[0]}: {what} is not built yet; draw without it")
    if param.opts[0] in _FEW_STEPS:
        raise UsageError(f"{param.opts[0]}: is --few-steps {param.opts[0][2:]}, or {param.opts[0][2:]}:STEPS")
    if param.opts[0] in _LORA_LISTS:
        raise UsageError(f"{param.opts[0]}: a LoRA and its strength go together, as --lora FILE:SCALE, once for each")
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
    "ControlNet": ("--controlnet", "--control-net", "--control-image", "--controlnet-image-path"),
    "the IP-adapter": ("--ip-adapter",),
    "textual inversion": ("--embedding", "--embeddings", "--textual-inversion"),
    "Qwen-Image-Edit": ("--edit",),
    "upscaling": ("--upscale", "--upscaler", "--hires", "--hires-fix"),
}


# Of programs that take files in one list and strengths in another.
_FEW_STEPS = ("--turbo", "--lcm", "--hyper")
_LORA_LISTS = ("--loras", "--lora-paths", "--lora-scale", "--lora-scales", "--lora-style")


def _mode(name: str, help: str) -> Callable[[_F], _F]:
    return click.option(name, type=click.Choice(MODES), default="auto", metavar="|".join(MODES), help=help)


def _not_built(command: _F) -> _F:
    for names in (*NOT_BUILT.values(), *((name,) for name in (*_LORA_LISTS, *_FEW_STEPS))):
        command = _refused(*names)(command)
    return command


def _of_pictures(command: _F) -> _F:
    """The options that every picture has, each from what is known of it."""
    for one in reversed(ALL.values()):
        command = options.of_picture(one)(command)
    return command


@click.command("generate", cls=Sectioned, context_settings=_SETTINGS)
@click.argument("words", nargs=-1, metavar="PROMPT", shell_complete=complete_prompt)
@_of_pictures
# Prompt
@click.option("--prompt-file", metavar="FILE|-", help="On each line a prompt, a JSON object or a # comment.")
@click.option("--keep-going", is_flag=True, help="Leave out the lines of a prompt file that are at fault; exit code 7.")
@click.option(
    "--from",
    "replay",
    type=options.FILE,
    metavar="IMAGE",
    envvar="QWENIMG_FROM",
    allow_from_autoenv=False,
    help="Make IMAGE again; other options override.",
)
# Model
@click.option("-m", "--model", metavar="MODEL", help="A folder or file, a pulled name or hub id; shapes is built in.")
@click.option("--lightning", type=int, metavar="N", help="--few-steps lightning:N, 4 or 8 steps for Qwen-Image.")
@click.option("--lora-side", is_flag=True, help="--lora-mode side.")
@click.option("--lora-fuse", is_flag=True, help="--lora-mode fuse.")
@places.models_dir
@click.option("--refiner", metavar="MODEL", help="An SDXL refiner that ends each picture.")
@places.weights
@click.option("--backend", type=click.Choice(NAMES), default="auto", metavar="|".join(NAMES), help="Default auto.")
@_mode("--compile", "Compile the denoiser; auto by what that saves.")
@_mode("--graphs", "Its calls as CUDA graphs; auto for small sizes.")
@click.option(
    "--preset", metavar="NAME", help="quality, balanced, fast, memory or auto; qwenimg presets. Default auto."
)
@click.option(
    "--precision",
    metavar="POLICY",
    help="The preset's, or fp32, bf16, fp16, fp16-upcast; with parts: bf16,vae=bf16.",
)
@parts.options
@click.option(
    "--cache-prompts", is_flag=True, help="Keep encoded prompts on the disk: later runs load no text encoder."
)
@click.option("--step-cache-check", is_flag=True, help="Also draw without --step-cache, and say how far that is.")
@click.option("--fallback", is_flag=True, help="Go on in a larger dtype where a value overflows.")
@click.option("--max-memory", metavar="AMOUNT", help="Stay below, as 12GB: blocks that do not fit are streamed.")
@click.option("--offline", is_flag=True, help="Use no network.")
# Output
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    help="Name.png, .jpg or .webp, with {seed} {index} {prompt} {date}; folder/, or -.",
)
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@click.option("--save-latents", type=options.FILE, metavar="FILE", help="Also write the latents that are decoded.")
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
    if given["output"] in streams.NAMES_OF_STDOUT:
        given["output"] = "-"
    environment.check(ctx, given)
    parts.taken(given)
    places.take_texts(given)
    if (steps := given.pop("lightning")) is not None:
        if given["few_steps"] is not None:
            raise UsageError("--lightning and --few-steps say the same; give one of them")
        given["few_steps"] = f"lightning:{steps}"
    _take_lora_mode(ctx, given)
    said = {name: None if given[name] == () else given[name] for name in SAID}
    for name in SAID:
        del given[name]
    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()
    return draw(Flags(said=said, **given), stop, environment.unknown(ctx.command))


def _take_lora_mode(ctx: click.Context, given: dict[str, Any]) -> None:
    """Takes --lora-side and --lora-fuse out of `given`: they come before what is not on the command line. Raises
    UsageError."""
    said = {mode for mode in ("side", "fuse") if given.pop(f"lora_{mode}")}
    if ctx.get_parameter_source("lora_mode") is ParameterSource.COMMANDLINE:
        said.add(given["lora_mode"])
    if len(said) > 1:
        raise UsageError("--lora-side, --lora-fuse and --lora-mode contradict each other; give one of them")
    given["lora_mode"] = said.pop() if said else given["lora_mode"]
