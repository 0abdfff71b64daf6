"""The command that generates images, which runs if the command line names no other command."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

import qwenimg
from qwenimg.backends.ranks import MOST
from qwenimg.cli import options, places, streams
from qwenimg.cli.help import HELP_NAMES, Sectioned, complete_prompt, show_all_help, show_version
from qwenimg.cli.signals import Stop
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.load_options import LOAD_OPTIONS, LoadOptions, load_options_of

_SETTINGS = {
    "auto_envvar_prefix": "QWENIMG",
    "token_normalize_func": options.known_name,
    "max_content_width": 110,
    "help_option_names": HELP_NAMES,
}


@click.command("generate", cls=Sectioned, context_settings=_SETTINGS)
@click.argument("words", nargs=-1, metavar="PROMPT", shell_complete=complete_prompt)
@options.of_pictures()
# Prompt
@click.option(
    "--prompt-file", metavar="FILE|-", help="Draw a picture for each line: a prompt, or a JSON object with options."
)
@click.option(
    "--keep-going", is_flag=True, help="Skip lines of a prompt file that cannot be drawn, and end with exit code 7."
)
@click.option(
    "--from",
    "replay",
    type=options.FILE,
    metavar="IMAGE",
    envvar="QWENIMG_FROM",
    allow_from_autoenv=False,
    help="Draw IMAGE again from the recipe in its file, or a workflow.json of ComfyUI; other options change it.",
)
# Model
@places.declared(*LOAD_OPTIONS)
@click.option(
    "--devices", type=click.IntRange(1, MOST), default=1, metavar="N", help="Draw each picture on N devices together."
)
@click.option(
    "--step-cache-check", is_flag=True, help="Draw a second time without --step-cache and print the difference."
)
# Output
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    help="A file (.png .jpg .webp; {seed} {index} {prompt} {date} {layer} are filled in), a folder/, or - for stdout.",
)
@click.option(
    "--stack", is_flag=True, help="Also write the layers stacked into one picture, to compare with the -i picture."
)
@click.option("--sheet", is_flag=True, help="Also write the layers side by side, as a contact sheet.")
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@click.option(
    "--save-latents",
    type=options.FILE,
    metavar="FILE",
    help="Also write the final latents, as .npy or .safetensors.",
)
@click.option("--preview", is_flag=True, help="Show the picture while it is drawn: in the terminal, or in a file.")
@click.option("--keep-control", is_flag=True, help="Also write the edges that canny@PICTURE finds, beside the picture.")
@click.option("--no-metadata", is_flag=True, help="Leave the recipe out of the picture.")
@click.option("--json", is_flag=True, help="Print one JSON object per event instead of paths.")
@click.option("--quiet", is_flag=True, help="Print paths, warnings and errors only.")
@click.option("--debug", metavar="WHAT", help="Print more: timing, shapes, or timing,shapes.")
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
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=show_all_help,
    help="Show all options.",
)
@click.pass_context
def generate(ctx: click.Context, /, **given: Any) -> int:
    """Generate images from text and print their paths."""
    from qwenimg.cli import config, environment
    from qwenimg.cli.drawing import Open, draw, parsed
    from qwenimg.cli.progress import RunPrinter

    if not given["words"] and all(given[name] is None for name in ("prompt", "prompt_file", "replay")):
        if all(ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE for name in given):
            streams.show(ctx.get_help())
        if not (given["image"] or given["control"] or given["ip_image"]):
            raise UsageError('no prompt; give one, as in: qwenimg "a red circle"')
        given["prompt"] = ""  # some models describe the picture, or take it as text
    config.apply_defaults(ctx, given)
    if given["output"] in streams.NAMES_OF_STDOUT:
        given["output"] = "-"
    environment.check(ctx, given)
    report = RunPrinter(as_json=given["json"], quiet=given["quiet"], debug=options.parse_debug(given["debug"]))
    for line in environment.unknown(ctx.command):
        report.notify("warning", line)
    if (text := given["negative_prompt"]) is not None and text.isdecimal():
        line = f"-n is what to steer away from, here {text}; for {text} pictures give -N {text}"
        report.notify("warning", line)
    keep_policy = given["preset"] is None and given["precision"] is None
    opening = load_options_of(places.pop_opening(given))
    offline = opening.offline or given["json"] or given["devices"] > 1
    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()

    def drawn(opens: Open) -> int:
        run = parsed(given, opening)
        if given["replay"] is not None:
            from qwenimg.cli.commands.pull import with_offer
            from qwenimg.cli.replaying import with_recipe

            repeats = partial(with_recipe, run, given["replay"], report.notify, keep_policy=keep_policy)
            run = with_offer(repeats, offline=offline)
        return draw(run, opens, stop, report)

    def opened(opening: LoadOptions, notify: Callable[[str, str], None]) -> qwenimg.Pipeline:
        from qwenimg.cli.commands.pull import with_offer

        return with_offer(lambda: qwenimg.open_pipeline(opening, notify), offline=offline)

    if given["devices"] == 1:
        return drawn(opened)
    from qwenimg.cli.ranks.lead import leading

    with leading(given["devices"], opening, stop) as leader:
        return drawn(leader.open_pipeline)
