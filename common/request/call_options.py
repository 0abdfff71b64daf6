"""The documentation of a pipeline's call for `help` and completion, and messages about unknown keywords.

Both are made from the options of a `Request`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.arguments import shown, texts
from qwenimg.common.base.errors import UnknownOption, UsageError, not_built
from qwenimg.common.base.text import by_name, clean
from qwenimg.common.request import coerce
from qwenimg.common.request.family_options import FamilyOptions
from qwenimg.common.request.option import Option
from qwenimg.common.request.request import OPTIONS, Request

F = TypeVar("F", bound=Callable[..., Any])

# Other libraries' names whose meaning the most similar name here does not have.
FOREIGN = by_name({
    "did you mean guidance?": "guidance_scale",
    "the solver is sampler, the noise levels are schedule": "scheduler",
    "did you mean seed? it is a whole number": "generator",
    "did you mean strength?": "denoising_strength",
    "a call makes one picture; call once for each seed": "num_images_per_prompt num_images batch_size",
    "read the steps from pipe.stream(...)": "callback_on_step_end callback",
    "a result has image, pixels and latents": "output_type",
    "give width and height": "size aspect",
    "save the result with result.save(path)": "output",
    "a call returns a Result; leave it out": "return_dict",
    "did you mean lora? a pair (path, strength)": "cross_attention_kwargs attention_kwargs",
    "did you mean schedule?": "sigmas timesteps",
    "give backend to qwenimg.load": "device",
    "give precision to qwenimg.load": "dtype",
    "give it to qwenimg.load": "quantize",
})  # fmt: skip


def described(function: F) -> F:
    """Add every option to the signature and the docstring of `function(self, prompt, **asked: Unpack[CallOptions])`."""
    function.__signature__ = _signature(function)  # type: ignore[attr-defined]
    text = inspect.cleandoc(function.__doc__ or "")
    lines = [f"    {name}: {one.format_help(one.call or one.help)}" for name, one in _keywords().items()]
    head = "Options, each by its keyword; None takes the model's own value:"
    function.__doc__ = "\n".join([text, "", head, *lines])
    return function


def check_names(names: Iterable[str]) -> None:
    """Raise UnknownOption for the first name that is no option."""
    for name in names:
        if name not in _keywords() and name not in coerce.INTERNAL:
            raise UnknownOption(f"unknown option {clean(name, 40)!r}: {_nearest(name)}")


def converted(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call, each as its own type; None leaves one out. Raises UsageError."""
    if not isinstance(asked, Mapping):
        raise UsageError(f"asked is {shown(asked)}; expected options by their names")
    named = {name: value for name, value in asked.items() if value is not None}
    return {name: OPTIONS[name].converted(value) if name in OPTIONS else value for name, value in named.items()}


def checked(**asked: object) -> list[Any]:
    """Return the values of options, each as its own type, if some model takes them. Raises UsageError."""
    values = [OPTIONS[name].converted(value) for name, value in asked.items()]
    for name, value in zip(asked, values, strict=True):
        OPTIONS[name].check(value)
    return values


def checked_prompts(prompts: object) -> list[str]:
    """Return `prompts`, checked to be a list of allowed prompts. Raises UsageError."""
    return [str(checked(prompt=one)[0]) for one in texts("prompts", prompts)]


def checked_rewrites(rewrite: object) -> dict[str, int]:
    """Return the prompts to rewrite, each with the seed of its text, checked. Raises UsageError."""
    if not isinstance(rewrite, Mapping):
        raise UsageError(f"rewrite is {shown(rewrite)}; expected the seed of each prompt")
    seeds = [checked(rewrite=seed)[0] for seed in rewrite.values()]
    return dict(zip(checked_prompts(list(rewrite)), seeds, strict=True))


def checked_request(image: object, clip_skip: object, alpha: bool) -> Request:
    """Return a request without a prompt, with the images of a call's `image`, on white without `alpha`. Raises
    UsageError, and ModelError for a file."""
    (skipped,) = checked(clip_skip=clip_skip)
    pictures = coerce.read_pictures({"image": image})[0]
    request = Request(prompt="", family_options=FamilyOptions(clip_skip=skipped), **pictures)
    return request if alpha else request.opaque()


def _nearest(name: str) -> str:
    plain = name.lower()
    if plain in FOREIGN:
        return FOREIGN[plain]
    if (missing := not_built(plain)) is not None:
        return missing
    known = _keywords()
    for option, one in known.items():  # by the command line's other names
        if plain.replace("_", "-") in (*one.aliases, *(flag[2:] for flag in one.flags if flag.startswith("--"))):
            return f"did you mean {option}?"
    near = difflib.get_close_matches(name[:100].lower(), known, n=1)
    return f"did you mean {near[0]}?" if near else "help(pipe) lists the known ones"


def _keywords() -> dict[str, Option]:
    return {name: one for name, one in OPTIONS.items() if name != "prompt"}


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    plain = inspect.signature(function)
    parameters = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
    internal = dict.fromkeys(("Upscaler", "Inversion", "PromptWriter", "Rewritten"), object)
    named = {"np": np, "NDArray": NDArray} | internal
    hints = get_type_hints(Request, localns=named) | get_type_hints(FamilyOptions)
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=f"{one.python} | None" if one.python else hints[one.field] | None,
        )
        for name, one in _keywords().items()
    ]
    return plain.replace(parameters=[*parameters, *options])
