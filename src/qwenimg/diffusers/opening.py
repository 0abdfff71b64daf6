"""The keywords of `from_pretrained` and `from_single_file` as those of `qwenimg.load`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwenimg.common.base.arguments import path_text
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import by_name, clean
from qwenimg.common.families.load_options import LOAD_OPTIONS
from qwenimg.common.prompts.wildcards import OFF
from qwenimg.common.request.load_options import check_names

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "auto": "auto"}
# What is decided here in another way: the values that are the same, and the answer to others
_WITHOUT_EFFECT = (
    "low_cpu_mem_usage", "device_map", "max_memory_map", "feature_extractor", "image_encoder", "add_watermarker",
    "requires_safety_checker", "safety_checker", "load_safety_checker", "force_zeros_for_empty_prompt", "config",
    "original_config", "original_config_file", "disable_mmap",
)  # fmt: skip
_REFUSED = by_name({
    "no code of a model is run here; leave it out": "custom_pipeline trust_remote_code custom_revision",
    "get the files first by: qwenimg pull NAME": "force_download revision token proxies mirror resume_download",
    "the cache is where the environment's HF_HOME says": "cache_dir",
    "give quantize=8, 6 or 4": "quantization_config",
    "give transformer= the folder or file of its weights": "unet",
    "a control network is control=(model, picture, scale) of a call": "controlnet",
    "pickles are read only where no code in them can run; leave it out": "allow_pickle",
})  # fmt: skip
_FILES = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "vae", "tokenizer")


def load_options(name: str, model: object, given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the keywords of `qwenimg.load`, and the scheduler that was given or None. Raises UsageError."""
    place = path_text(model)
    if not place:
        raise UsageError(f"{name}.from_pretrained: {clean(model, 40)}; give a folder, a file or the name of a model")
    if place.startswith(("http://", "https://")):
        raise UsageError(f"{name}: an address is not opened here; download the file, or: qwenimg pull owner/name")
    asked: dict[str, Any] = {"wildcards": OFF}
    for key, value in given.items():
        if value is None or key in (*_WITHOUT_EFFECT, "scheduler") or _says_nothing(key, value):
            continue
        if key in ("torch_dtype", "dtype"):
            asked["precision"] = _precision(value)
        elif key == "local_files_only":
            asked["offline"] = value
        elif key in _REFUSED:
            raise UsageError(f"{name}.from_pretrained takes no {key} here: {_REFUSED[key]}")
        elif key in _FILES and path_text(value) is None:
            what = f"{key} is {clean(type(value).__name__, 60)}"
            raise UsageError(f"{name}.from_pretrained: {what}; give the folder or file of its weights")
        elif key == "use_safetensors":
            raise UsageError(f"{name}.from_pretrained: use_safetensors={clean(value, 30)}: leave it out")
        else:
            asked[key] = value
    check_names([key for key in asked if key not in LOAD_OPTIONS and key != "notify"], [*LOAD_OPTIONS, "notify"])
    return {"model": place, **asked}, given.get("scheduler")


def _says_nothing(key: str, value: object) -> bool:
    """Return whether a keyword asks for nothing that is not so already."""
    is_variant = key == "variant" and value in ("fp16", "bf16", "fp32", "non_ema", "ema")  # files are found by name
    return is_variant or (key == "use_safetensors" and value is True) or value is False


def _precision(dtype: object) -> str:
    if isinstance(dtype, Mapping):
        raise UsageError("torch_dtype by part: give precision= by part, as precision='bf16,vae=fp32'")
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError(f"torch_dtype is {clean(dtype, 40)}; known are {', '.join(_DTYPES)}, or give precision=")
    return _DTYPES[name]
