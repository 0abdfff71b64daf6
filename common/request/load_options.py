"""Messages about keywords that `qwenimg.load` does not take: the nearest option by meaning, else by letters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from qwenimg.common.base.errors import UnknownOption, not_built
from qwenimg.common.base.text import by_name, clean
from qwenimg.common.request.request import OPTIONS

# Other libraries' names.
FOREIGN = by_name({
    "did you mean backend?": "device",
    "did you mean precision? it takes fp32, bf16, fp16 or auto": "dtype variant",
    "did you mean max_memory? blocks that do not fit are streamed": "device_map offload cpu_offload low_cpu_mem_usage",
    "did you mean quantize? it takes 8, 6 or 4": "quantization_config bits load_in_8bit load_in_4bit",
    "did you mean offline?": "local_files_only",
    "did you mean model?": "pretrained_model_name_or_path model_path",
    "did you mean transformer? it takes a UNet too": "unet",
    "the cache is where the environment's HF_HOME says": "cache_dir",
    "pickles are never read; leave it out": "use_safetensors",
    "no code of a model is run; leave it out": "trust_remote_code",
    "there is none; leave it out": "safety_checker",
    "give sampler and schedule to a call, as in pipe(prompt, sampler=...)": "scheduler",
})  # fmt: skip


def check_names(unknown: Iterable[str], known: Sequence[str]) -> None:
    """Raise UnknownOption for the first of the `unknown` keywords. `known`: the existing ones."""
    for name in unknown:
        raise UnknownOption(f"qwenimg.load takes no {clean(name, 40)!r}: {_nearest(name, known)}")


def _nearest(name: str, known: Sequence[str]) -> str:
    plain = name.lower()
    if plain in FOREIGN:
        return FOREIGN[plain]
    if (missing := not_built(plain)) is not None:
        return missing
    if plain.endswith("_dtype"):
        return FOREIGN["dtype"]
    if plain in OPTIONS:
        return f"give it to a call, as in pipe(prompt, {plain}=...)"
    near = difflib.get_close_matches(plain[:100], known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
