"""The keys of a LoRA file: each is a module's name and the role of the tensor in it, with any of the endings that
trainers write.

A module may be spelled in two ways in one file, with dots and with underscores, so its tensors are gathered by its flat
name. Whole differences are not read, but differences of zero are left out. Biases of factors are read, and weights of
the norms of queries and keys, as FLUX.1's LoRAs for control pictures have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import first
from qwenimg.common.formats.stored import TensorSlice
from qwenimg.common.weights.loras.lora_names import flat

MAX_ZEROS = 1 << 30  # bytes of differences of zeros in a file, which are read to know that they are

# The ends of keys behind the module: whole tensors; PEFT's (with the adapter's name or without), kohya's, old
# diffusers', LyCORIS's
_ENDINGS = (
    (re.compile(r"(.+)\.lora_B(?:\.[A-Za-z0-9_-]+)??\.bias"), "bias"),
    (re.compile(r"(.+\.norm_(?:added_)?[qk])\.weight"), "norm"),
    (re.compile(r"(.+\.(?:query|key)_norm)\.scale"), "norm"),
    (re.compile(r"(.+)\.lora_A(?:\.[A-Za-z0-9_-]+)??(?:\.weight)?"), "down"),
    (re.compile(r"(.+)\.lora_B(?:\.[A-Za-z0-9_-]+)??(?:\.weight)?"), "up"),
    (re.compile(r"(.+)\.lora_(?P<role>down|up|mid)(?:\.[A-Za-z0-9_-]+)?\.weight"), None),
    (re.compile(r"(.+)[._]lora\.(?P<role>down|up)\.weight"), None),
    (re.compile(r"(.+_lora[12])\.(?P<role>down|up)\.weight"), None),  # XLabs': of the image stream, of the text stream
    (re.compile(r"(.+)\.lora_linear_layer\.(?P<role>down|up)\.weight"), None),
    (re.compile(r"(.+)\.lora_magnitude_vector(?:\.[A-Za-z0-9_-]+)??(?:\.weight)?"), "magnitude"),
    (re.compile(r"(.+)\.(?P<role>alpha|dora_scale|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2))"), None),
)
_SCALES = ("alpha", "dora_scale", "magnitude")  # roles that are no factors
_WHOLE = ("bias", "norm")  # roles of tensors with the shape of a parameter
# Ends of keys whose values are added to a parameter
_ADDED = ((re.compile(r".*\.(diff|diff_b|w_norm|b_norm)"), "holds whole differences of weights (diff)"),)
# Ends of keys that are known and not read
_REFUSED = (
    (re.compile(r".*\.(oft_[A-Za-z]+|.*boft.*)(\.weight)?"), "is an OFT or BOFT adapter"),
    (re.compile(r".*\.[ab][12]\.weight"), "is a GLoRA adapter"),
    (re.compile(r".*\.set_weight"), "holds whole weights (set_weight)"),
    (re.compile(r".*\.lora_embedding_[AB](\..+)?"), "adds to embeddings (lora_embedding)"),
    (re.compile(r"lora_controlnet|input_blocks\..*\.(up|down)|input_hint_block\..*"), "is a ControlNet-LoRA"),
    (re.compile(r"bundle_emb\..*"), "holds a textual inversion (bundle_emb)"),
    (re.compile(r".*\.on_input"), "is an IA3 adapter"),
)
# What torch's wrappers of a model put into the names of its modules: torch.compile, FSDP and activation checkpointing
_WRAPPED = re.compile(r"(?:^|(?<=[._]))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)[._]")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_CHUNK = 1 << 23


class Module(NamedTuple):
    """The tensors of a file for one weight, by role."""

    parts: Mapping[str, TensorSlice]  # the factors
    scales: Mapping[str, TensorSlice]  # alpha, dora_scale or magnitude
    whole: Mapping[
        str, TensorSlice
    ] = {}  # bias, that is added to the layer's; norm, the weight of a norm in place of it


def read_modules(path: Path, pieces: Mapping[str, TensorSlice]) -> dict[str, Module]:
    """Return the modules of the file `path` by their names, in the order of its bytes. Raises ModelError."""
    names: dict[str, str] = {}
    roles: dict[str, dict[str, TensorSlice]] = {}
    added: list[tuple[TensorSlice, str]] = []
    for key, piece in pieces.items():
        if what := _matching(_ADDED, key):
            added.append((piece, what))
            continue
        name, role = _parsed(path, key)
        if role == "bias" and piece.end - piece.begin <= _CHUNK and _is_zero(piece):
            continue
        other = roles.setdefault(flat(name), {}).setdefault(role, piece)
        if other is not piece:
            raise bad(path, f"tensors '{clean(other.key, 80)}' and {first([key])} are the same")
        if role not in _SCALES:
            names.setdefault(flat(name), name)
    _check_zeros(path, added, alone=not roles)
    if not roles:
        raise bad(path, "holds no tensors")
    modules = {}
    for form, by_role in roles.items():
        module = Module(
            {role: piece for role, piece in by_role.items() if role not in (*_SCALES, *_WHOLE)},
            {role: piece for role, piece in by_role.items() if role in _SCALES},
            {role: piece for role, piece in by_role.items() if role in _WHOLE},
        )
        _check_factors(path, module)
        modules[names[form]] = module
    return modules


def _parsed(path: Path, key: str) -> tuple[str, str]:
    """Return the module and the role of a key."""
    if what := _matching(_REFUSED, key):
        raise _refused(path, key, what)
    for pattern, role in _ENDINGS:
        if match := pattern.fullmatch(key):
            return _WRAPPED.sub("", match[1]).rstrip("_") or match[1], role or match["role"]
    raise bad(path, f"tensor {first([key])} is of no LoRA that is known: LoRA, LoCon, LoHa, LoKr and DoRA are read")


def _matching(endings: tuple[tuple[re.Pattern[str], str], ...], key: str) -> str | None:
    return next((what for pattern, what in endings if pattern.fullmatch(key)), None)


def _refused(path: Path, key: str, what: str) -> ModelError:
    return bad(path, f"{what}, see tensor {first([key])}: LoRA, LoCon, LoHa, LoKr and DoRA are read")


def _check_factors(path: Path, module: Module) -> None:
    for role, piece in module.whole.items():
        if len(piece.shape) != 1 or 0 in piece.shape or piece.dtype not in _FLOATS:
            raise bad(path, f"tensor {first([piece.key])} is {piece.dtype} {list(piece.shape)}, which no {role} is")
    if "norm" in module.whole and (module.parts or module.scales or "bias" in module.whole):
        raise bad(path, f"tensor {first([module.whole['norm'].key])} is of a norm that has other tensors too")
    if not module.parts and "norm" not in module.whole:
        key = next(iter({**module.scales, **module.whole}.values())).key
        raise bad(path, f"tensor {first([key])} is of a module without factors: the file is incomplete")
    for piece in module.parts.values():
        if len(piece.shape) < 2 or 0 in piece.shape:
            raise bad(path, f"tensor {first([piece.key])} has shape {list(piece.shape)}, which no factor has")


# Differences of zeros


def _check_zeros(path: Path, added: list[tuple[TensorSlice, str]], *, alone: bool) -> None:
    """Raise ModelError for a tensor that is `added` to a parameter and not zero, and for such tensors alone in the
    file."""
    left = MAX_ZEROS
    for piece, what in added:
        left -= piece.end - piece.begin
        if alone or left < 0 or not _is_zero(piece):
            raise _refused(path, piece.key, what)


def _is_zero(piece: TensorSlice) -> bool:
    """Return whether a tensor is of zeros, of either sign."""
    import numpy as np

    size = _FLOATS.get(piece.dtype)
    if size is None:
        return False
    for begin in range(piece.begin, piece.end, _CHUNK):
        bits = np.frombuffer(piece.file.read(begin, min(_CHUNK, piece.end - begin)), f"<u{size}")
        if (bits << bits.dtype.type(1)).any():  # without the sign
            return False
    return True
