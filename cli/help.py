"""The help of the command that generates images, in sections; and completion of its first word."""

from __future__ import annotations

import json

import click
from click.shell_completion import CompletionItem

from qwenimg.common.families.load_options import LOAD_OPTIONS
from qwenimg.common.jobs.image_options import ALL

COMMANDS = {
    "generate": "draw pictures; needed if the prompt begins with a command's name",
    "info": "print the recipe of a picture, or what a model file contains",
    "describe": "write captions or tags of pictures, also beside them for LoRAs",
    "rewrite": "print a better prompt, by a language model",
    "upscale": "make pictures larger by a network that adds detail (ESRGAN)",
    "devices": "list the backends of this machine and their devices",
    "doctor": "measure the precision of this device, and say what --preset auto chooses",
    "parity": "compare backends and machines, block by block",
    "bench": "measure how long a picture takes on this machine",
    "precision": "draw a picture with each precision policy, and recommend one",
    "presets": "list the presets of precision and memory",
    "plan": "estimate the memory and time of a picture, and what makes it fit",
    "models": "list the models, and which of them are on this machine",
    "pull": "download a model",
    "rm": "delete a model from the disk",
    "convert": "write a model as a folder: in fewer bits, or with LoRAs merged",
    "train": "train a LoRA on your own pictures",
    "lora": "add LoRA files up, or change the rank of one",
    "grid": "compare values of one or two options on a labelled sheet",
    "batch": "draw many pictures with several workers, and resume if interrupted",
    "serve": "start an HTTP server for programs and browsers",
    "mcp": "draw for an assistant, by the Model Context Protocol",
    "selftest": "draw 40 prompts with the built-in model and check the pictures",
    "samplers": "list the samplers and schedules",
    "completion": "print the completion script for bash, zsh or fish",
}
# Words that are read as `generate` with options.
EDITING = {
    "edit": 'change a picture by words: edit PICTURE... "TEXT"',
    "inpaint": 'draw the white part of a mask anew: inpaint PICTURE MASK "TEXT"',
}

HELP_NAMES = ["-h", "--help"]
# Options besides those of images and of opening a model, which have their own section.
_OWN: dict[str, tuple[str, ...]] = {
    "Prompt": ("prompt_file", "keep_going", "replay"),
    "Picture": (),
    "Second pass": (),
    "Picture to start from": (),
    "Control": ("keep_control",),
    "Model": ("devices", "step_cache_check"),
    "Output": (
        "output", "stack", "sheet", "overwrite", "save_latents", "preview", "no_metadata", "json", "quiet", "debug",
    ),
}  # fmt: skip
# The options that most people need, in that order; --help-all shows the rest.
COMMON = (
    "model", "output", "size", "aspect", "seed", "num_images", "steps", "guidance", "negative_prompt", "sampler",
    "image", "strength", "mask", "lora", "few_steps", "replay", "prompt_file", "quantize", "max_memory", "models_dir",
)  # fmt: skip
ALL_HELP = "qwenimg.help_all"
_KNOWN = {**ALL, **{name: LOAD_OPTIONS[name] for name in LOAD_OPTIONS if not LOAD_OPTIONS[name].again}}
_OPTIONS_OF = {title: [name for name in _KNOWN if _KNOWN[name].section == title] for title in (*_OWN, "Model's files")}
SECTIONS = {
    title: (*_OPTIONS_OF[title], *_OWN[title], *(_OPTIONS_OF["Model's files"] if title == "Model" else ()))
    for title in _OWN
}
EXAMPLES = """\
qwenimg "a red circle"
qwenimg edit photo.jpg "make it night"
qwenimg "a lighthouse at dusk" --aspect 16:9 -s 1-4 -o out/
qwenimg --prompt-file prompts.txt -o "{index}-{prompt}.png"
qwenimg --from picture.png --steps 50"""
# The example in the message for a missing argument.
COMMAND_EXAMPLES = {
    "info": "info picture.png",
    "models": "models --models-dir ComfyUI",
    "grid": 'grid "a red circle" --x steps=4,8,20 --y guidance=1,4',
    "batch": "batch requests.jsonl -o out/",
    "describe": "describe photo.jpg -m qwen-image",
    "rewrite": 'rewrite "a cat" -m qwen-image',
    "upscale": "upscale photo.jpg --by 4 --with RealESRGAN_x4plus.pth",
    "rm": "rm sd15",
    "mcp": "mcp -m sdxl --folder pictures/",
    "convert": "convert sd15 sd15-8bit -q 8",
    "train": "train lora --data pictures/ -m qwen-image -o my.safetensors --word sks",
    "merge": "lora merge style.safetensors:0.7 face.safetensors -o both.safetensors",
    "resize": "lora resize style.safetensors --rank 16 -o small.safetensors",
    "record": "parity record -o mac.safetensors",
    "check": "parity check mac.safetensors",
    "report": "parity report mac.safetensors linux.safetensors -o report.html",
}
EXIT_CODES = """\
0 done   1 a bug in qwenimg   2 wrong usage, or an output that exists or cannot be written
3 backend missing   4 would not fit: memory or disk   5 model or input missing, broken or unsupported
6 a value that is not finite, or a failed check   7 some pictures failed   130, 143 stopped by a signal"""


class Sectioned(click.Command):
    """A command whose help has sections, the list of other commands, examples and exit codes. `--help --json` prints
    the JSON Schema of the options of an image."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        loose = click.Context(self, resilient_parsing=True, ignore_unknown_options=True, **self.context_settings)
        values, _, _ = self.make_parser(loose).parse_args(list(args))
        asks = self.get_help_option(loose)
        ctx.meta["qwenimg.schema"] = bool(asks and values.get(asks.name) and values.get("json"))
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        if not ctx.meta.get("qwenimg.schema"):
            return super().get_help(ctx)
        from qwenimg.common.jobs.schema import request_schema

        return json.dumps(request_schema(), indent=2)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("Usage: qwenimg [OPTIONS] PROMPT\n       qwenimg COMMAND [OPTIONS]\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        other = records.keys() - {name for names in SECTIONS.values() for name in names}
        last = sorted(other, key=str, reverse=True)
        every = {**SECTIONS, "Other": last} if ctx.meta.get(ALL_HELP) else {"Options": (*COMMON, *reversed(last))}
        for title, names in every.items():
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records[name])], col_max=34)
        with formatter.section("Commands (`qwenimg COMMAND --help`)"):
            formatter.write_dl([*EDITING.items(), *COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, text in (("Examples", EXAMPLES), ("Exit codes", EXIT_CODES)):
            with formatter.section(title):
                formatter.write("".join(f"  {line}\n" for line in text.splitlines()))


def show_all_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL_HELP] = True
        click.echo(ctx.get_help())
        ctx.exit()


def show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from qwenimg import __version__

        click.echo(f"qwenimg {__version__}")
        ctx.exit()


def complete_prompt(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the commands that begin with `incomplete`, while the first word is being typed."""
    if ctx.params.get("words") or not ctx.meta.get("qwenimg.implied"):
        return []
    return [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
