"""ComfyUI's weights in 8 bits: the tensors that belong to one weight, and the formats that are read.

A layer X of the older kind has X.scale_weight, and perhaps X.scale_input; one tensor of the file, `scaled_fp8`, has the
dtype of all codes. A layer of the newer kind has X.weight_scale, perhaps X.input_scale, and a descriptor: JSON such as
{"format": "float8_e4m3fn"}, as the bytes of a tensor X.comfy_quant, or for all layers in the header's metadata under
`_quantization_metadata`. A value is float32(code) * float32(scale). The scales of activations are unused, since
activations are not in 8 bits here. Layers without any of these are plain weights: files mix them freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.codes.eight_bits import FORMATS, EightBits, Format, format_of
from qwenimg.common.formats.stored import DTYPES, TensorSlice
from qwenimg.common.weights.plan import Source

METADATA = "_quantization_metadata"
MARKER = "scaled_fp8"
SCALES = ("weight_scale", "scale_weight")
UNUSED = ("comfy_quant", "input_scale", "scale_input")

_FLOATS: Mapping[str, Format] = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_INT8 = "int8_tensorwise"
_CODES = (*FORMATS, "I8", "U8")  # a float may be stored as bytes
_MAX_DESCRIPTOR = 1024  # bytes of one tensor
_MAX_DESCRIPTORS = 10_000
_MAX_METADATA = 8 << 20  # characters
_ADVICE = "give a file of this model in fp8, int8_tensorwise, bf16 or fp16"

# Ends of tensors' names that only these programs write.
_OTHERS = {
    ".weight.quant_map": "bitsandbytes",
    ".weight.absmax": "bitsandbytes",
    ".qweight": "Nunchaku (SVDQuant), GPTQ or AWQ",
    ".wscales": "Nunchaku (SVDQuant)",
    ".weight_proj_down": "SVDQuant",
    ".weight._data": "quanto",
    ".weight_qdata": "torchao",
    ":qdata": "torchao",
    ".weight_packed": "compressed-tensors",
}


class Descriptor(NamedTuple):
    """The format that a descriptor names for a layer."""

    format: str
    rotated: bool


def refuse_others(pieces: Mapping[str, TensorSlice]) -> None:
    """Raise ModelError for weights of programs whose formats are not read, by the program's name."""
    ends = tuple(_OTHERS)
    name = next((name for name in pieces if name.endswith(ends)), None)
    if name is not None:
        program_name = next(program for end, program in _OTHERS.items() if name.endswith(end))
        path = pieces[name].file.path
        raise bad(path, f"has weights of {program_name} (tensor '{clean(name, 80)}'), which are not read: {_ADVICE}")


def scaled(
    pieces: dict[str, TensorSlice], wanted: Mapping[str, object], notes: Mapping[str, str]
) -> tuple[dict[str, Source], set[str]]:
    """Take the weights with a scale whose names are `wanted` out of `pieces`. Return their sources, and the names of
    known tensors that are not used.

    `notes`: the header's metadata. Raises ModelError.
    """
    described = _descriptors(pieces, wanted, notes)
    markers = [pieces.pop(name) for name in list(pieces) if name == MARKER or name.endswith(f".{MARKER}")]
    usual = next((format for marker in markers if (format := format_of(marker.dtype))), None)
    sources, unused = {}, {marker.key for marker in markers}
    for layer in [name.removesuffix(".weight") for name in wanted if name.endswith(".weight") and name in pieces]:
        weight, descriptor = pieces[f"{layer}.weight"], described.get(layer)
        scale = next((pieces[name] for part in SCALES if (name := f"{layer}.{part}") in pieces), None)
        code = _code(weight, scale, descriptor, usual)
        if code is None:
            continue
        used = (weight,) if scale is None else (weight, scale)
        sources[weight.key] = Source(used, code)
        unused |= {name for part in UNUSED if (name := f"{layer}.{part}") in pieces}
        for piece in used:
            del pieces[piece.key]
    for name in unused:
        pieces.pop(name, None)
    return sources, unused


def _code(
    weight: TensorSlice, scale: TensorSlice | None, descriptor: Descriptor | None, usual: Format | None
) -> EightBits | None:
    """Return the code of a weight, or None if it is not quantized, or has neither scale nor descriptor. Raises
    ModelError."""
    if descriptor is None and (weight.dtype not in _CODES or (scale is None and weight.dtype != "U8")):
        return None
    if descriptor is not None and (descriptor.rotated or descriptor.format not in (*_FLOATS, _INT8)):
        what = f"{clean(descriptor.format, 40)}{' with convrot' if descriptor.rotated else ''}"
        _refuse(weight, f"is in ComfyUI's format {what}, which is not read: {_ADVICE}")
    if descriptor is not None and descriptor.format == _INT8:
        if weight.dtype != "I8" or scale is None:
            _refuse(weight, f"is {weight.dtype}{'' if scale else ' without weight_scale'}; its descriptor says {_INT8}")
        _check_scale(weight, scale)
        return EightBits("I8")
    format = format_of(weight.dtype) or (_FLOATS[descriptor.format] if descriptor else usual)
    if weight.dtype == "I8" or format is None:
        return None  # no descriptor gives their meaning: the planner refuses the dtype
    if descriptor is not None and (weight.dtype not in _CODES or format != _FLOATS[descriptor.format]):
        _refuse(weight, f"is {weight.dtype}; its descriptor says {descriptor.format}")
    if scale is not None:
        _check_scale(weight, scale)
    return EightBits(format)


def _check_scale(weight: TensorSlice, scale: TensorSlice) -> None:
    """Check that the scale is one number, one for each row, or one for each block of a row [out blocks 1]. Raises
    ModelError."""
    rows = weight.shape[0] if weight.shape else 0
    single = scale.shape in ((), (1,), (1, 1))
    by_row = scale.shape in ((rows,), (rows, 1))
    blocks = scale.shape[1] if len(scale.shape) == 3 and scale.shape[::2] == (rows, 1) else 0
    in_blocks = len(weight.shape) == 2 and blocks > 0 and weight.shape[1] % blocks == 0
    if scale.dtype not in DTYPES or not (single or by_row or in_blocks):
        shapes = f"{scale.dtype} {list(scale.shape)}, for a weight {list(weight.shape)}"
        raise bad(
            scale.file.path,
            f"tensor '{clean(scale.key, 80)}' is {clean(shapes, 80)}: expected one scale, or one for each row",
        )


def _refuse(weight: TensorSlice, what: str) -> NoReturn:
    raise bad(weight.file.path, f"tensor '{clean(weight.key, 80)}' {what}")


def _descriptors(
    pieces: Mapping[str, TensorSlice], wanted: Mapping[str, object], notes: Mapping[str, str]
) -> dict[str, Descriptor]:
    """Return the descriptor of each layer that is wanted and has one. Raises ModelError."""
    descriptors: dict[str, Descriptor] = {}
    if METADATA in notes and pieces:
        path = next(iter(pieces.values())).file.path
        for layer, entry in _table(notes[METADATA], path).items():
            name = _with_prefix(layer, pieces)
            if f"{name}.weight" in wanted:
                descriptors[name] = _descriptor(entry, path, layer)
    tensors = [layer for name in wanted if f"{(layer := name.removesuffix('.weight'))}.comfy_quant" in pieces]
    if len(tensors) > _MAX_DESCRIPTORS:
        path = next(iter(pieces.values())).file.path
        raise bad(path, f"has {len(tensors)} descriptors of layers; at most {_MAX_DESCRIPTORS} are read")
    for layer in tensors:
        piece = pieces[f"{layer}.comfy_quant"]
        size = piece.end - piece.begin
        if piece.dtype not in ("U8", "I8") or size > _MAX_DESCRIPTOR:
            _refuse(piece, f"is {piece.dtype} of {size} bytes; expected U8 of at most {_MAX_DESCRIPTOR}")
        where = f"{piece.file.path} ({clean(piece.key, 80)})"
        descriptors[layer] = _descriptor(
            strict_json(piece.file.read(piece.begin, size), where, depth=4, values=50), where
        )
    return descriptors


def _with_prefix(layer: str, pieces: Mapping[str, TensorSlice]) -> str:
    """Return a layer's name in the file: some metadata leaves out the prefix of the model."""
    prefixes = ("", "model.diffusion_model.", "diffusion_model.", "model.")
    return next((prefix + layer for prefix in prefixes if f"{prefix}{layer}.weight" in pieces), layer)


def _table(text: str, path: Path) -> dict[str, object]:
    if len(text) > _MAX_METADATA:
        raise bad(path, f"its {METADATA} has {len(text):,} characters; at most {_MAX_METADATA:,} are read")
    where = f"{path} ({METADATA})"
    data = strict_json(text.encode(), where, depth=5, values=20 * _MAX_DESCRIPTORS)
    layers = data.get("layers") if isinstance(data, dict) else None
    if not isinstance(layers, dict):
        raise bad(where, "has no table `layers`")
    return layers


def _descriptor(entry: object, where: Path | str, layer: str = "") -> Descriptor:
    format = entry.get("format") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(format, str):
        of = f" of '{clean(layer, 80)}'" if layer else ""
        raise bad(where, f"its descriptor{of} names no format: {_ADVICE}")
    params = entry.get("params")
    nested = params.get("convrot") if isinstance(params, dict) else None
    return Descriptor(format, bool(entry.get("convrot", nested)))
