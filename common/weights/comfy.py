"""ComfyUI's weights in 8 and 4 bits: the tensors that belong to one weight, and the formats that are read.

A layer X of the older kind has X.scale_weight, and perhaps X.scale_input; one tensor of the file, `scaled_fp8`, has the
dtype of all codes. A layer of the newer kind has X.weight_scale, perhaps X.input_scale, and a descriptor: JSON such as
{"format": "float8_e4m3fn"}, as the bytes of a tensor X.comfy_quant, or for all layers in the header's metadata under
`_quantization_metadata`. A value is float32(code) * float32(scale); with `convrot`, and in the formats of 4 bits but
one, its row is rotated (`codes/rotated.py`). The scales of activations are unused, since activations are not in 8 bits
here. Layers without any of these are plain weights: files mix them freely.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import DTYPES, Header, TensorSlice
from qwenimg.common.quant.eight_bits import FORMATS, EightBits, Format, format_of
from qwenimg.common.quant.rotated import LARGEST, RotatedInt4, RotatedInt8, RotatedLevels, is_group
from qwenimg.common.quant.zero_points import ZeroPoints
from qwenimg.common.weights.plan import Source

if TYPE_CHECKING:
    import numpy as np

METADATA = "_quantization_metadata"
MARKER = "scaled_fp8"
SCALES = ("weight_scale", "scale_weight")
UNUSED = ("comfy_quant", "input_scale", "scale_input")

_FLOATS: Mapping[str, Format] = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_INT8 = "int8_tensorwise"
_INT4, _LEVELS, _ZEROS = "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16"
_READ = (*_FLOATS, _INT8, _INT4, _LEVELS, _ZEROS)
_CODES = (*FORMATS, "I8", "U8")  # a float may be stored as bytes
_MAX_DESCRIPTOR = 1024  # bytes of one tensor
_MAX_DESCRIPTORS = 10_000
_MAX_METADATA = 8 << 20  # characters
_ADVICE = "give a file of this model in int8_convrot, int8, fp8, bf16 or fp16"

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
    """The format that a descriptor names for a layer, and its groups: of the rotation, 0 without one, and of a
    scale."""

    format: str
    rotation: int = 0
    group: int = 0


def refuse_others(pieces: Mapping[str, TensorSlice]) -> None:
    """Raise ModelError for weights of programs whose formats are not read, by the program's name."""
    ends = tuple(_OTHERS)
    name = next((name for name in pieces if name.endswith(ends)), None)
    if name is not None:
        program_name = next(program for end, program in _OTHERS.items() if name.endswith(end))
        path = pieces[name].file.path
        raise bad(path, f"has weights of {program_name} (tensor '{clean(name, 80)}'), which are not read: {_ADVICE}")


def value_shapes(header: Header) -> dict[str, Shape]:
    """Return the shapes of the tensors in an open file; for a weight in 4 bits, the shape of its values. Raises
    ModelError."""
    shapes = {name: stored.shape for name, stored in header.tensors.items()}
    bytes_of = [name for name, stored in header.tensors.items() if stored.dtype in ("I8", "U8")]
    wanted = {name: None for name in bytes_of if name.endswith(".weight")}
    pieces = {name: TensorSlice(name, header.file, *stored) for name, stored in header.tensors.items() if wanted}
    for layer, descriptor in _descriptors(pieces, wanted, header.metadata).items():
        if descriptor.format in (_INT4, _LEVELS, _ZEROS):
            shapes[f"{layer}.weight"] = _four_bits(layer, pieces, descriptor).shape
    return shapes


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
        weight = pieces[f"{layer}.weight"]
        source = _source(layer, pieces, described.get(layer), usual)
        if source is None:
            continue
        sources[weight.key] = source
        unused |= {name for part in UNUSED if (name := f"{layer}.{part}") in pieces}
        for piece in source.pieces:
            del pieces[piece.key]
    for name in unused:
        pieces.pop(name, None)
    return sources, unused


def _source(
    layer: str, pieces: Mapping[str, TensorSlice], descriptor: Descriptor | None, usual: Format | None
) -> Source | None:
    """Return the source of a layer's weight, or None if it is not quantized, or has neither scale nor descriptor."""
    weight = pieces[f"{layer}.weight"]
    scale = next((pieces[name] for part in SCALES if (name := f"{layer}.{part}") in pieces), None)
    if descriptor is not None and descriptor.format not in _READ:
        _refuse(weight, f"is in ComfyUI's format {clean(descriptor.format, 40)}, which is not read: {_ADVICE}")
    if descriptor is not None and descriptor.format in (_INT4, _LEVELS, _ZEROS):
        return _four_bits(layer, pieces, descriptor)
    if descriptor is not None and descriptor.format == _INT8:
        if weight.dtype != "I8" or scale is None:
            _refuse(weight, f"is {weight.dtype}{'' if scale else ' without weight_scale'}; its descriptor says {_INT8}")
        _check_scale(weight, scale, in_blocks=not descriptor.rotation)
        if not descriptor.rotation:
            return Source((weight, scale), EightBits("I8"))
        _check_rotation(weight, weight.shape[-1] if weight.shape else 0, descriptor)
        return Source((weight, scale), RotatedInt8(descriptor.rotation))
    code = _float(weight, scale, descriptor, usual)
    return code and Source((weight,) if scale is None else (weight, scale), code)


def _float(
    weight: TensorSlice, scale: TensorSlice | None, descriptor: Descriptor | None, usual: Format | None
) -> EightBits | None:
    """Return the code of a weight in 8-bit floats, or None as `_source` does."""
    if descriptor is None and (weight.dtype not in _CODES or (scale is None and weight.dtype != "U8")):
        return None
    format = format_of(weight.dtype) or (_FLOATS[descriptor.format] if descriptor else usual)
    if weight.dtype == "I8" or format is None:
        return None  # no descriptor gives their meaning: the planner refuses the dtype
    if descriptor is not None and (weight.dtype not in _CODES or format != _FLOATS[descriptor.format]):
        _refuse(weight, f"is {weight.dtype}; its descriptor says {descriptor.format}")
    if scale is not None:
        _check_scale(weight, scale)
    return EightBits(format)


def _four_bits(layer: str, pieces: Mapping[str, TensorSlice], descriptor: Descriptor) -> Source:
    """Return the source of a weight in one of the formats of 4 bits (or 6)."""
    weight, (format, rotation, group) = pieces[f"{layer}.weight"], descriptor
    if weight.dtype not in ("I8", "U8") or len(weight.shape) != 2:
        _refuse(weight, f"is {weight.dtype} {list(weight.shape)}; its descriptor says {format}")
    rows, stored = weight.shape

    def part(name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> TensorSlice:
        piece = pieces.get(f"{layer}.{name}")
        if piece is None:
            _refuse(weight, f"is without {name}; its descriptor says {format}")
        if piece.dtype not in dtypes or piece.shape not in shapes:
            shown = clean(f"{piece.dtype} {list(piece.shape)}", 60)
            _refuse(piece, f"is {shown}: expected {dtypes[0]} {list(shapes[0])} for {format}")
        return piece

    numbers, width = tuple(DTYPES), 2 * stored
    if format == _INT4:
        _check_rotation(weight, width, descriptor)
        return Source((weight, part("weight_scale", numbers, (rows,), (rows, 1))), RotatedInt4(rotation))
    if format == _ZEROS:
        if width % group:
            _refuse(weight, f"is {list(weight.shape)}, and its groups are of {group}")
        scales = [part(name, numbers, (width // group, rows)) for name in ("weight_scale", "weight_zeros")]
        return Source((weight, *scales), ZeroPoints(group))
    has_levels = f"{layer}.weight_codebook" in pieces
    small = pieces.get(f"{layer}.weight_s_rel")
    six = small is not None and small.shape == (rows, stored * 4 // 3 // group) and not has_levels
    width = stored * 4 // 3 if six else width
    if width % group or (six and (stored % 24 or group % 16)):
        _refuse(weight, f"is {list(weight.shape)}, and its groups are of {group}")
    _check_rotation(weight, width, descriptor)
    groups = part("weight_s_rel", ("F8_E4M3", "U8", "F32"), (rows, width // group))
    channels = part("weight_s_channel", numbers, (rows,), (rows, 1))
    levels = [part("weight_codebook", numbers, (16,))._replace(shape=(1, 16))] if has_levels else []
    return Source((weight, groups, channels, *levels), RotatedLevels(rotation, 6 if six else 4))


def _check_rotation(weight: TensorSlice, width: int, descriptor: Descriptor) -> None:
    """Check that the weight is a matrix whose rows of `width` values are whole groups of the rotation."""
    if len(weight.shape) != 2 or width % descriptor.rotation or not width:
        shown = clean(list(weight.shape), 60)
        _refuse(weight, f"is {shown}: no rows of {width} that groups of {descriptor.rotation} rotate")


def described(code: RotatedInt8) -> np.ndarray:
    """Return the descriptor of a layer in this code, uint8, as long as 4-byte numbers, so that such may follow it."""
    import numpy as np

    fields = {"format": _INT8, "convrot": True, "convrot_groupsize": code.rotation}
    text = json.dumps(fields)
    return np.frombuffer(text.ljust(-(-len(text) // 4) * 4).encode(), np.uint8)


def _check_scale(weight: TensorSlice, scale: TensorSlice, *, in_blocks: bool = True) -> None:
    """Check that the scale is one number, one for each row, or with `in_blocks` one for each block of a row [out blocks
    1]."""
    rows = weight.shape[0] if weight.shape else 0
    single = scale.shape in ((), (1,), (1, 1))
    by_row = scale.shape in ((rows,), (rows, 1))
    blocks = scale.shape[1] if len(scale.shape) == 3 and scale.shape[::2] == (rows, 1) else 0
    in_blocks = in_blocks and len(weight.shape) == 2 and blocks > 0 and weight.shape[1] % blocks == 0
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
    """Return the descriptor of each layer that is wanted and has one."""
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
    """Return the descriptor of a layer, of whose fields some programs nest a few in `params`."""
    of = f" of '{clean(layer, 80)}'" if layer else ""
    format = entry.get("format") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(format, str):
        raise bad(where, f"its descriptor{of} names no format: {_ADVICE}")
    nested = entry.get("params")
    fields = {**(nested if isinstance(nested, dict) else {}), **entry}

    def number(name: str, usual: int) -> int:
        value = fields.get(name, usual)
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(where, f"its descriptor{of} has {name} {clean(repr(value), 40)}: expected a whole number")
        return value

    always = format in (_INT4, _LEVELS)
    turns = fields.get("convrot", always)
    if not isinstance(turns, bool) or (turns != always and format in _READ and format != _INT8):
        raise bad(where, f"its descriptor{of} has convrot {clean(repr(turns), 40)} in {clean(format, 40)}")
    rotation = number("convrot_groupsize", 256) if turns else 0
    if turns and not is_group(rotation):
        raise bad(
            where, f"its descriptor{of} has convrot_groupsize {rotation}: expected a power of 4 from 4 to {LARGEST}"
        )
    group = number("group_size", {_LEVELS: 16, _ZEROS: 64}[format]) if format in (_LEVELS, _ZEROS) else 0
    if format in (_LEVELS, _ZEROS) and not (group >= 4 and (16 % group == 0 or group % 16 == 0)):
        raise bad(where, f"its descriptor{of} has group_size {group}: expected 4, 8 or a multiple of 16")
    return Descriptor(format, rotation, group)
