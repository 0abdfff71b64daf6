"""The parts of a model whose weights may come from another folder or file: a row for each.

The command line, `qwenimg.load`, config.toml, recipes, passports and the search in --models-dir are made from these
rows: another part, such as a third text encoder, is a row here and its name in the row of the family that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from qwenimg.common.request.option import Option

LEFT_OUT = Path("none")
"""The file of a text encoder that the user leaves out, of a model that can draw without one."""
_FILE = Option(
    help="",
    call="a folder or file of its weights",
    section="Model's files",
    metavar="FILE",
    python="str | Path | None",
    config=True,
)
_ROWS: dict[str, Option] = {
    "transformer": replace(
        _FILE,
        help="use these weights instead of the model's transformer or UNet",
        call="a folder or file of its weights, or of the UNet's",
        flags=("--unet",),
    ),
    "text_encoder": replace(
        _FILE, help="use these weights of a text encoder; repeat it for each further one, and for its mmproj file"
    ),
    "text_encoder_2": replace(_FILE, again="text_encoder"),
    "text_encoder_3": replace(_FILE, again="text_encoder"),
    "vae": replace(_FILE, help="use these weights of the VAE"),
    "effnet": replace(_FILE, help="use these weights of the network by which Stable Cascade sees a picture"),
}
PARTS: Mapping[str, Option] = {name: replace(_ROWS[name], name=name, kind=Path) for name in _ROWS}
"""The options of the parts, by the names of the parts' folders; the UNet too is called transformer."""


def kind_of(part: str) -> str:
    """Return the kind of files that `part` is, in the folders of models: what encodes pictures is among VAEs."""
    return "vae" if part == "effnet" else PARTS[part].again or part


def components_of(parts: Iterable[str]) -> frozenset[str]:
    """Return the names of the components' folders for `parts`, of PARTS, in all families."""
    return frozenset(name for part in parts for name in (("transformer", "unet") if part == "transformer" else (part,)))
