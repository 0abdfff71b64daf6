"""What `help` and completion show of a call of a pipeline, and what is said about a keyword that it does not take.

Both are made from `Asked`, where each option is written down once.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from qwenimg.common.base.errors import UnknownOption
from qwenimg.common.base.text import clean
from qwenimg.common.pipeline.request import Asked

F = TypeVar("F", bound=Callable[..., Any])

# Other libraries' names, where the nearest by its letters is another one or none.
ELSEWHERE = {
    "num_inference_steps": "did you mean steps?",
    "guidance_scale": "did you mean guidance?",
    "true_cfg_scale": "did you mean guidance?",
    "cfg_scale": "did you mean guidance?",
    "cfg": "did you mean guidance?",
    "scheduler": "the solver is sampler, the noise levels are schedule",
    "generator": "did you mean seed? it is a whole number",
    "init_image": "did you mean image?",
    "mask_image": "did you mean mask?",
    "denoising_strength": "did you mean strength?",
    "num_images_per_prompt": "a call makes one picture; call once for each seed",
    "num_images": "a call makes one picture; call once for each seed",
    "batch_size": "a call makes one picture; call once for each seed",
    "callback_on_step_end": "read the steps from pipe.stream(...)",
    "callback": "read the steps from pipe.stream(...)",
    "output_type": "a result has image, pixels and latents",
    "size": "give width and height",
    "aspect": "give width and height",
    "output": "save the result with result.save(path)",
}


def described(function: F) -> F:
    """`function(self, prompt, **asked: Unpack[Asked])` with every option in its signature and its docstring."""
    function.__signature__ = _signature(function)  # type: ignore[attr-defined]
    text = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = "\n".join(
        [text, "", "Options, each by its keyword; None takes the model's own value:", *_lines()]
    )
    return function


def check_names(names: Iterable[str]) -> None:
    """Raises UnknownOption for the first name that is no option."""
    for name in names:
        if name not in Asked.__annotations__:
            raise UnknownOption(f"unknown option {clean(name, 40)!r}: {_nearest(name)}")


def _nearest(name: str) -> str:
    if name.lower() in ELSEWHERE:
        return ELSEWHERE[name.lower()]
    known = list(Asked.__annotations__)
    near = difflib.get_close_matches(name[:100].lower(), known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _hints() -> dict[str, tuple[Any, str]]:
    """Of each option its type and what it means."""
    hints = get_type_hints(Asked, include_extras=True)
    for name, hint in hints.items():
        assert get_origin(hint) is Annotated, f"{name} has no description"
    return {name: (get_args(hint)[0], get_args(hint)[1]) for name, hint in hints.items()}


def _lines() -> list[str]:
    return [f"    {name}: {text}" for name, (_, text) in _hints().items()]


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    plain = inspect.signature(function)
    kept = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, (kind, _) in _hints().items()
    ]
    return plain.replace(parameters=[*kept, *options])
