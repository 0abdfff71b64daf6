"""Where a model and its parts are: options of every command that opens one, and what they find by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from qwenimg.common.base.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])
_PATH = click.Path(path_type=Path, readable=False)  # what cannot be read is reported later, with its exit code


def models_dir(command: _F) -> _F:
    """Declares --models-dir."""
    return click.option(
        "--models-dir",
        type=_PATH,
        multiple=True,
        metavar="DIR",
        help="Find models, parts and LoRAs by name in DIR: ComfyUI's folder, A1111's, any.",
    )(command)


def parts(command: _F) -> _F:
    """Declares the options of the parts that may come from elsewhere."""
    for names, metavar, more in (
        (
            ("--tokenizer",),
            "FOLDER",
            {"help": "Vocabulary for a Stable Diffusion file or an mflux folder without one; found here if not given."},
        ),
        (("--vae",), "FILE", {"help": "Weights of the VAE."}),
        (("--text-encoder-2",), "FILE", {"hidden": True, "allow_from_autoenv": False}),
        (("--text-encoder",), "FILE", {"help": "Weights of a text encoder; again for SDXL's other.", "multiple": True}),
        (("--transformer", "--unet"), "FILE", {"help": "Weights in the place of the model's transformer or UNet."}),
    ):
        command = click.option(*names, type=_PATH, metavar=metavar, **more)(command)
    return command


WEIGHTS = ("transformer", "text_encoder", "text_encoder_2", "vae", "tokenizer", "prediction", "quantize")
"""Options that say of which weights a model is made, as `qwenimg.load` calls them."""
PREDICTS = click.Choice(("eps", "v", "x0"))  # as `families.choices.Prediction`


def weights(command: _F) -> _F:
    """Declares them."""
    bits = "Keep weights in so many bits; by part: text=8,transformer=4."
    command = click.option("-q", "--quantize", metavar="8|6|4", help=bits)(command)
    predicts = click.option(
        "--prediction",
        type=PREDICTS,
        metavar="eps|v|x0",
        help="What a Stable Diffusion file predicts, where that is not known.",
    )
    return parts(predicts(command))


def take_texts(given: dict[str, Any]) -> None:
    """Parts the files of --text-encoder, which may be given twice, into one each. Raises UsageError."""
    said = given["text_encoder"]
    files = [*(said if isinstance(said, Sequence) else [said]), given["text_encoder_2"]]
    files = [file for file in files if file is not None]
    if len(files) > 2:
        raise UsageError(f"--text-encoder: {len(files)} files; a model has two text encoders at most")
    given["text_encoder"], given["text_encoder_2"] = [*files, None, None][:2]


def found(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with --models-dir, where the model and what else it takes is looked for by name."""

    @functools.wraps(command)
    def located(**given: Any) -> Any:
        return command(**_located(given))

    return models_dir(located)


def _located(given: dict[str, Any]) -> dict[str, Any]:
    """Raises UsageError and ModelError."""
    from qwenimg.common.hub.model_folders import read_folders
    from qwenimg.common.hub.part_files import located

    if "text_encoder" in given:
        take_texts(given)
    folders = read_folders(given.pop("models_dir") or _config_folders())
    if "file" in given:
        given["file"] = Path(folders.of_any_kind(str(given["file"])))
    return given | located(folders, given)


def _config_folders() -> Sequence[Path]:
    from qwenimg.cli import config

    said = config.defaults().get("models_dir")
    return () if said is None else config.folders(said)
