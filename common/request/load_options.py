"""Messages about keywords that `qwenimg.load` does not take: the nearest option by meaning, else by letters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from qwenimg.common.base.errors import UnknownOption, not_built
from qwenimg.common.base.text import clean
from qwenimg.common.request.request import OPTIONS

_DTYPE = "did you mean precision? it takes fp32, bf16, fp16 or auto"
_BITS = "did you mean quantize? it takes 8, 6 or 4"
_MEMORY = "did you mean max_memory? blocks that do not fit are streamed"

# Other libraries' names.
ELSEWHERE = {
    "device": "did you mean backend?",
    "dtype": _DTYPE,
    "variant": _DTYPE,
    "device_map": _MEMORY,
    "offload": _MEMORY,
    "cpu_offload": _MEMORY,
    "low_cpu_mem_usage": _MEMORY,
    "quantization_config": _BITS,
    "bits": _BITS,
    "load_in_8bit": _BITS,
    "load_in_4bit": _BITS,
    "local_files_only": "did you mean offline?",
    "pretrained_model_name_or_path": "did you mean model?",
    "model_path": "did you mean model?",
    "unet": "did you mean transformer? it takes a UNet too",
    "cache_dir": "the cache is where the environment's HF_HOME says",
    "use_safetensors": "pickles are never read; leave it out",
    "trust_remote_code": "no code of a model is run; leave it out",
    "safety_checker": "there is none; leave it out",
    "scheduler": "give sampler and schedule to a call, as in pipe(prompt, sampler=...)",
}


def check_names(unknown: Iterable[str], known: Sequence[str]) -> None:
    """Raise UnknownOption for the first of the `unknown` keywords. `known`: the existing ones."""
    for name in unknown:
        raise UnknownOption(f"qwenimg.load takes no {clean(name, 40)!r}: {_nearest(name, known)}")


def _nearest(name: str, known: Sequence[str]) -> str:
    plain = name.lower()
    if plain in ELSEWHERE:
        return ELSEWHERE[plain]
    if (missing := not_built(plain)) is not None:
        return missing
    if plain.endswith("_dtype"):
        return _DTYPE
    if plain in OPTIONS:
        return f"give it to a call, as in pipe(prompt, {plain}=...)"
    near = difflib.get_close_matches(plain[:100], known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
