"""Writes the keywords that type checkers and editors show: of a call of a pipeline in common/request/call_types.py, of
`qwenimg.load`, with their documentation, in src/qwenimg/__init__.py, and of the classes of `qwenimg.diffusers`.

python tools/write_call_types.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from qwenimg.common.families.load_options import LOAD_OPTIONS, LoadOptions
from qwenimg.common.request.family_options import FamilyOptions
from qwenimg.common.request.option import Option
from qwenimg.common.request.request import OPTIONS, Request
from qwenimg.diffusers.keywords import PROMPTS

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "common" / "request" / "call_types.py"
LOAD = ROOT / "src" / "qwenimg" / "__init__.py"
POSITIONAL = ("model", "backend", "precision")  # of `qwenimg.load`
HEAD = '''\
"""The keywords of a call of a pipeline, for type checkers and editors.

Written by tools/write_call_types.py from the fields of `Request` and of `FamilyOptions`, for type checkers, which run
nothing.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.request.coerce import Controls, Embeddings, Loras, Picture, Pictures


class CallOptions(TypedDict, total=False):
    """Options of a call besides the prompt. None takes the model's default, or a random seed."""

'''


def text() -> str:
    plain = {one.name: str(one.type).removesuffix(" | None") for one in (*fields(Request), *fields(FamilyOptions))}
    types = {name: one.python or plain[one.field] for name, one in OPTIONS.items()}
    return HEAD + "".join(f"    {name}: {kind} | None\n" for name, kind in types.items() if name != "prompt")


# qwenimg.diffusers

DIFFUSERS = ROOT / "src" / "qwenimg" / "diffusers" / "call_types.py"
_SEEN = "Pictures | Tensor | NDArray[np.floating]"
# diffusers' keywords; a call of `qwenimg.load`'s pipeline has the others
THEIRS = {
    **dict.fromkeys(("prompt", "negative_prompt", *PROMPTS), "str | Sequence[str]"),
    **dict.fromkeys(("height", "width", "num_inference_steps", "num_images_per_prompt", "clip_skip"), "int"),
    **dict.fromkeys(("padding_mask_crop", "layers", "max_sequence_length"), "int"),
    **dict.fromkeys(("guidance_scale", "true_cfg_scale", "guidance_rescale", "strength", "cfg_truncation"), "float"),
    **dict.fromkeys(("cfg_normalization", "skip_layer_guidance_scale"), "float"),
    **dict.fromkeys(("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs"), "Mapping[str, float]"),
    "image": _SEEN,
    "mask_image": f"Picture | {_SEEN.partition(' | ')[2]}",
    "generator": "Generator | int | Sequence[Generator | int]",
    "latents": "Tensor | NDArray[np.floating]",
    "skip_guidance_layers": "Sequence[int]",
    "use_en_prompt": "bool",
    "callback_on_step_end": "Callable[..., Mapping[str, object] | None]",
    "callback_on_step_end_tensor_inputs": "Sequence[str]",
}
_LOADED = {
    **dict.fromkeys(("torch_dtype", "dtype"), "object"),
    **dict.fromkeys(("local_files_only", "use_safetensors"), "bool"),
    "scheduler": "object",
    "notify": "Callable[[str, str], None]",
}
DIFFUSERS_HEAD = '''\
"""The keywords of the classes of `qwenimg.diffusers`, for type checkers and editors.

Written by tools/write_call_types.py, for type checkers, which run nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.load_options import Prediction
from qwenimg.common.request.coerce import Controls, Embeddings, Loras, Picture, Pictures


class Tensor(Protocol):
    """A tensor of torch."""

    def detach(self) -> Any: ...


class Generator(Protocol):
    """A torch.Generator."""

    def initial_seed(self) -> int: ...


'''


def diffusers_text() -> str:
    """Return the file of the keywords of `qwenimg.diffusers`."""
    own = dict(re.findall(r"^    (\w+): (.*) \| None$", text(), re.MULTILINE))
    loads = {one.name: str(one.type).removesuffix(" | None") for one in fields(LoadOptions)}
    loads = {name: (LOAD_OPTIONS[name].python or loads[name]).removesuffix(" | None") for name in LOAD_OPTIONS}
    loads.pop("model")
    call = _typed(
        "CallKeywords", "A call: diffusers' keywords, then the other options of a call here.", own | THEIRS, THEIRS
    )
    loaded = _typed(
        "LoadKeywords", "`from_pretrained`: those of diffusers, then of `qwenimg.load`.", loads | _LOADED, _LOADED
    )
    return f"{DIFFUSERS_HEAD}{call}\n\n{loaded}"


def _typed(name: str, about: str, types: dict[str, str], first: Iterable[str]) -> str:
    lines = [f"    {key}: {types[key]} | None\n" for key in dict.fromkeys((*first, *types))]
    return f'class {name}(TypedDict, total=False):\n    """{about}"""\n\n' + "".join(lines)


# qwenimg.load

_LOAD = re.compile(r"def load\(\n.*?^    given = dict\(locals\(\)\)", re.DOTALL | re.MULTILINE)
_HEAD = '''\
def load(
{parameters}
) -> Pipeline:
    """Open a model on a backend; weights are read when they are first needed.

{options}
        notify: a function that takes (kind, text), for stages, warnings and notices.

    Raises QwenimgError; UnknownOption, a TypeError too, for other keywords. `with` closes it at the end."""
    given = dict(locals())'''


def load_text(before: str) -> str:
    """Return the text `before` of the package's `__init__.py` with the keywords of `load` as they are now."""
    named = [LOAD_OPTIONS[name] for name in (*POSITIONAL, *(name for name in LOAD_OPTIONS if name not in POSITIONAL))]
    types = {one.name: str(one.type) for one in fields(LoadOptions)}
    lines = [f"{one.name}: {one.python or types[one.name]} = {one.default!r},".replace("'", '"') for one in named]
    lines.insert(len(POSITIONAL), "*,")
    lines += ["notify: Callable[[str, str], None] | None = None,", "**unknown: Never,"]
    parameters = textwrap.indent("\n".join(lines), " " * 4)
    head = _HEAD.format(parameters=parameters, options="\n".join(map(_documented, named)))
    written, count = _LOAD.subn(lambda _: head, before)
    assert count == 1, LOAD
    return written


def _documented(one: Option) -> str:
    said = f"{one.name}: {one.format_help(one.call or one.help)}."
    return textwrap.fill(said, 120, initial_indent=" " * 8, subsequent_indent=" " * 12)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    DIFFUSERS.write_text(diffusers_text(), encoding="utf-8")
    LOAD.write_text(load_text(LOAD.read_text(encoding="utf-8")), encoding="utf-8")
