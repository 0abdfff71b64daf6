"""Files of textual inversion: vectors that stand for words in prompts of CLIP.

| written by | tensors |
| --- | --- |
| the AUTOMATIC1111 web UI, kohya, InvokeAI | `emb_params` [N C]; `.pt`: `string_to_param` {"*": [N C]} |
| diffusers (`learned_embeds`) | one tensor [C] or [N C], whose name is the token |
| all for SDXL | `clip_l` [N 768] and `clip_g` [N 1280]; for Stable Diffusion 3 also `t5xxl`, which is not used |

A `.pt` or `.bin` is read without running its pickle (`pth_file`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.formats.file_hash import hashed
from qwenimg.common.formats.files import first
from qwenimg.common.formats.headers import open_weights
from qwenimg.common.formats.pth_file import ALONE
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.prompts.inversion import Inversion

SUFFIXES = (".safetensors", ".pt", ".bin")
MAX_BYTES = 512 << 20  # of a file: some have all of a vocabulary's rows beside the one that counts
MAX_VECTORS = 75  # tokens of a chunk
MAX_WIDTH = 16_384
MAX_NAME = 100  # characters
CLIPS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}
BASES = {
    (768,): "Stable Diffusion 1.x",
    (1024,): "Stable Diffusion 2.x",
    (1280,): "the refiner of SDXL",
    (768, 1280): "SDXL",
}
"""Models by the widths of their text encoders."""
_PARAM = "string_to_param."
_PLAIN = "emb_params"
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
_SPARE = re.compile(r"string_to_token\..*|t5xxl")


@dataclass(frozen=True, kw_only=True)
class EmbeddingFile:
    """The contents of a file: vectors [N C] by their keys in it."""

    path: Path
    token: str  # as the file names it, or ""
    sha256: str
    parts: Mapping[str, NDArray[np.float32]]  # of CLIPS, or one of "" for a model with one text encoder

    @property
    def count(self) -> int:
        """The number of vectors."""
        return len(next(iter(self.parts.values())))

    @property
    def base(self) -> str:
        """The models that it fits, in words."""
        widths = [part.shape[1] for part in self.parts.values()]
        if len(widths) == 2:
            return base_of(widths)
        return "the refiner of SDXL" if "clip_g" in self.parts else base_of(widths)

    @property
    def sizes(self) -> str:
        """The number and the widths of its vectors, in words."""
        widths = " and ".join(f"{part.shape[1]}{f' ({key})' if key else ''}" for key, part in self.parts.items())
        return f"{counted(self.count, 'vector')} of {widths}"

    def fitted(self, widths: Mapping[str, int], name: str = "") -> Inversion:
        """Return the embedding for a model whose text encoders have these `widths`. name: in prompts, instead of the
        file's. Raises ModelError for one of another model."""
        vectors = self._vectors(widths)
        if vectors is None:
            model = base_of([*widths.values()])
            raise bad(self.path, f"is an embedding for {self.base} ({self.sizes}); the model is {model}")
        own = [name] if name else [self.path.stem]
        return Inversion(
            names=tuple(dict.fromkeys([*own, *([self.token] if self.token else [])])),
            sha256=self.sha256,
            vectors=vectors,
        )

    def _vectors(self, widths: Mapping[str, int]) -> dict[str, NDArray[np.float32]] | None:
        named = {CLIPS[key]: part for key, part in self.parts.items() if key}
        if len(widths) == 1 and "" in self.parts:
            named = dict.fromkeys(widths, self.parts[""])
        several = len(self.parts) > len(widths) and "text_encoder" in widths  # of SDXL, for a model with CLIP-L alone
        fits = all(name in named and named[name].shape[1] == width for name, width in widths.items())
        return {name: named[name] for name in widths} if fits and not several else None


def base_of(widths: Sequence[int]) -> str:
    """Return the models whose text encoders have these widths, in words."""
    named = BASES.get(tuple(widths))
    return named or f"a model with {counted(len(widths), 'text encoder')} of width {' and '.join(map(str, widths))}"


def is_embedding(header: Header) -> bool:
    """Return whether the names of a file's tensors are those of an embedding."""
    names = [name for name in header.tensors if not _SPARE.fullmatch(name)]
    known = [name for name in names if name in (*CLIPS, _PLAIN, ALONE) or name.startswith(_PARAM) or _is_token(name)]
    return bool(names) and len(known) == len(names)


def _is_token(name: str) -> bool:
    return name.startswith("<") and name.endswith(">")


def read_embedding(path: Path) -> EmbeddingFile:
    """Read the embedding in the file `path`. Raises ModelError."""
    header = open_weights(path)
    with closing(header.file):
        if header.file.size > MAX_BYTES:
            raise bad(path, f"has {header.file.size:,} bytes, and an embedding at most {MAX_BYTES:,}")
        tensors = {name: one for name, one in header.tensors.items() if not _SPARE.fullmatch(name)}
        if not tensors:
            raise bad(path, "is no embedding: it holds no vectors")
        if tensors.keys() <= CLIPS.keys():
            keys, token = {key: key for key in CLIPS if key in tensors}, ""
        elif len(tensors) == 1:
            [name] = tensors
            keys, token = {"": name}, "" if name == _PLAIN else name.removeprefix(_PARAM)
        else:
            what = "embedding with one token" if all(map(_is_token, tensors)) else "embedding"
            raise bad(path, f"is no {what}: it holds {len(tensors):,} tensors, such as {first(sorted(tensors))}")
        parts = {key: _read(header, name, tensors[name]) for key, name in keys.items()}
        counts = [len(part) for part in parts.values()]
        if len(set(counts)) > 1:
            raise bad(path, f"has {counts[0]} vectors for CLIP-L and {counts[1]} for CLIP-G: it is damaged")
        return EmbeddingFile(path=path, token=_token(token), sha256=hashed(header.file), parts=parts)


def _token(text: str) -> str:
    """Return a token that a prompt may have; "" for `*`, and for one that no prompt can name."""
    plain = text.strip()
    return plain if plain != "*" and 0 < len(plain) <= MAX_NAME and plain.isprintable() else ""


def _read(header: Header, name: str, stored: Stored) -> NDArray[np.float32]:
    path, shown = header.file.path, clean(name, 60)
    shape = (1, *stored.shape) if len(stored.shape) == 1 else stored.shape
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_WIDTH or not shape[0]:
        raise bad(path, f"is no embedding: its tensor '{shown}' has shape {clean(list(stored.shape), 60)}, not [N, C]")
    if shape[0] > MAX_VECTORS:
        raise bad(path, f"has {shape[0]:,} vectors, and a chunk of a prompt takes {MAX_VECTORS} tokens")
    if stored.dtype not in _DTYPES:
        raise bad(path, f"is no embedding: its tensor '{shown}' is of {clean(stored.dtype, 20)}, not of floats")
    raw = np.frombuffer(header.file.read(stored.begin, stored.end - stored.begin), _DTYPES[stored.dtype])
    with np.errstate(over="ignore", invalid="ignore"):  # such values are refused below
        if stored.dtype == "BF16":
            values = (raw.astype("<u4") << 16).view("<f4").reshape(shape)
        else:
            values = raw.astype(np.float32).reshape(shape)
    if not np.isfinite(values).all():
        raise bad(path, f"has values in its tensor '{shown}' that are not finite: it is damaged, download it again")
    header.file.check_unchanged()
    return np.ascontiguousarray(values)


def named_embedding(path: Path) -> bool:
    """Return whether the file `path` has the tensors of an embedding. Raises ModelError."""
    header = open_weights(path)
    header.file.close()
    return is_embedding(header)
