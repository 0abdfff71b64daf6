"""`convert`: write a model as a folder that appears complete or not at all, and continue where a killed run stopped.

The folder is built in OUT.part. Each file of weights gets its name when it is whole; its metadata names the conversion
and the hash of its data, so that the next run can keep it. At the end the folder gets its name.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Protocol

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.atomic_files import make_folder, sync_folder, write_atomic
from qwenimg.common.base.config import INDEX, MODULAR_INDEX, read_json
from qwenimg.common.base.errors import DoesNotFit, ModelError, NumericsError, QwenimgError, UsageError, disk_full
from qwenimg.common.base.safe_files import absolute
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.conversion.parts import ConvertedPart, as_json, parts, small_files
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.registry import NOTE, OpenModel
from qwenimg.common.formats.safetensors import read_header
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.loras import Loras
from qwenimg.common.weights.write import is_whole, write_shard

FORMAT = "1"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SPARE = 64 << 20  # bytes for the small files


class ConversionListener(Protocol):
    """A receiver of a conversion's progress."""

    def report(self, kind: str, text: str) -> None:
        """Receive a message on the source's files: a `stage`, a `notice` or a `warning`."""

    def plan(self, size: int, files: int) -> None:
        """Receive the bytes and the number of the files of weights, before anything is written."""

    def kept(self, name: str, size: int) -> None:
        """Receive a file that an earlier run has written."""

    def written(self, name: str, size: int) -> None:
        """Receive the number of bytes that were added to the file `name`."""


def convert(
    source: Path,
    out: Path,
    options: LoadOptions,
    listener: ConversionListener,
    *,
    name: str | None = None,
    loras: Sequence[Lora] = (),
    dtype: str | None = None,
) -> None:
    """Write the model in the folder or file `source`, opened with `options`, as the folder `out`. Raises UsageError,
    ModelError and DoesNotFit; finished files stay for the next call.

    name: of a known model. dtype: of weights that are not quantized, a key of DTYPES; None keeps that of the files."""
    out = absolute(out)
    work = out.parent / f"{out.name}.part"
    _check_place(out, work)
    with ExitStack() as stack:
        opened = registry.open_model(source, replace(options, for_rewrite=True))
        stack.callback(opened.checkpoint.close)
        opened.checkpoint.read_tokenizers()
        for report in opened.checkpoint.reports:
            listener.report(*report)
        files = Loras(cache(lambda: opened.family.lora_names(opened.checkpoint)))
        stack.callback(files.close)
        changed = replace(opened, checkpoint=opened.checkpoint.with_deltas(files.deltas(loras, "fuse")))
        converted = parts(changed, dtype and DTYPES[dtype])
        small = small_files(changed, options.prediction)
        made_with = {"model": name, "quantize": options.quantize, "dtype": dtype, "prediction": options.prediction}
        made_with["variant"] = options.variant
        note = _note(changed, converted, small, made_with | files.recorded(loras))
        stack.enter_context(_building(out, work, note))
        stack.enter_context(_clearing(work))
        _write(work, converted, small, note, listener)
        registry.open_model(work).checkpoint.close()
    _publish(work, out)


def _note(
    opened: OpenModel, converted: list[ConvertedPart], small: dict[str, bytes], options: Mapping[str, object]
) -> dict[str, object]:
    """Return a description of the folder's contents, without paths; equal notes mean equal folders. options: the
    user's, None if not given."""
    about: dict[str, object] = {"format": FORMAT, "family": opened.family.name}
    about |= {key: value for key, value in options.items() if value is not None}
    if opened.made_of is not None:
        about.setdefault("model", opened.made_of.name)
    about["sources"] = {part.name: part.source for part in converted}
    about["small_files"] = hashlib.sha256(b"".join(small[path] for path in sorted(small))).hexdigest()
    return about


# The folder in which it is built


def _check_place(out: Path, work: Path) -> None:
    """Raise UsageError if `out` exists, or cannot be made."""
    shown = shown_path(out)
    if not out.name or out.name in (".", ".."):
        raise UsageError(f"{shown}: names no folder; end it in a name")
    if os.path.lexists(out):
        raise UsageError(f"{shown}: exists already; choose another name, or move it away")
    try:
        mode = out.parent.stat().st_mode
    except (OSError, ValueError):
        raise UsageError(f"{shown}: its folder does not exist; create it or choose another") from None
    if not stat.S_ISDIR(mode) or not os.access(out.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{shown}: no permission to write in its folder, or it is none; choose another")
    if not os.path.lexists(work):
        return
    if work.is_symlink() or not work.is_dir() or (not os.path.lexists(work / NOTE) and any(work.iterdir())):
        raise UsageError(f"{shown_path(work)}: is not the unfinished work of a conversion; move it away")


@contextmanager
def _building(out: Path, work: Path, note: dict[str, object]) -> Iterator[None]:
    """Make or continue `work`, for this conversion alone. Raises UsageError."""
    make_folder(work)
    file = work / NOTE
    if os.path.lexists(file):
        _check_same(work, note)
    else:
        try:
            write_atomic(file, as_json(note), overwrite=False)
        except QwenimgError:
            with suppress(OSError):  # another run may have put something there
                work.rmdir()
            raise
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as lock:  # noqa: PTH123
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{shown_path(out)}: another run is converting to it; wait for it to end") from None
        except OSError:
            pass  # some network disks have no locks
        try:
            yield
        except OSError as error:
            raise _failure(out, work, error) from None


@contextmanager
def _clearing(work: Path) -> Iterator[None]:
    """Remove `work` if the model was refused, as it would be again, or no weights were written. A run that a signal or
    a full disk ended can be continued."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModelError | NumericsError) or not any(work.rglob("*.safetensors")):
            shutil.rmtree(work, ignore_errors=True)
        raise


def _check_same(work: Path, note: dict[str, object]) -> None:
    try:
        before: dict[str, object] = read_json(work / NOTE)
    except ModelError as error:
        raise UsageError(f"{error}; move {shown_path(work, 80)} away") from None
    wanted = json.loads(as_json(note))
    other = next((key for key in {**wanted, **before} if before.get(key) != wanted.get(key)), None)
    if other is not None:
        raise UsageError(
            f"{shown_path(work)}: is the unfinished conversion of another model, or with other options "
            f"({clean(other, 40)} differs); finish that one, or delete it"
        )


def _failure(out: Path, work: Path, error: OSError) -> Exception:
    reason = clean(error.strerror or error, 60)
    if disk_full(error):
        free = f"{size_text(shutil.disk_usage(out.parent).free)} free: make room and run it again"
        if error.errno == errno.EFBIG:  # of a process's limit, or a disk like FAT32
            free = "more than `ulimit -f` or this disk allows: raise it or choose another disk"
        done = f", what is done stays in {shown_path(work.name, 60)}" if work.exists() else ""
        return DoesNotFit(f"{shown_path(out)}: {reason}, {free}{done}")
    return UsageError(f"{shown_path(out)}: cannot be written: {reason}; choose another place")


def _publish(work: Path, out: Path) -> None:
    """Rename `work` to `out`. Raises UsageError if `out` was made meanwhile."""
    try:
        if os.path.lexists(out):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        work.rename(out)
    except OSError as error:
        reason = clean(error.strerror or error, 60)
        raise UsageError(f"{shown_path(out)}: {reason}; the folder is whole as {shown_path(work, 80)}") from None
    sync_folder(out.parent)


# Files


def _write(
    work: Path,
    parts: list[ConvertedPart],
    small: dict[str, bytes],
    note: dict[str, object],
    listener: ConversionListener,
) -> None:
    every = [(part, name, shard) for part in parts for name, shard in zip(part.files, part.shards, strict=True)]
    sizes = {(part.name, name): sum(weight.nbytes for weight in shard) for part, name, shard in every}
    listener.plan(sum(sizes.values()), len(every))
    done = {
        (part.name, name)
        for part, name, shard in every
        if is_whole(work / part.name / name, shard, _metadata(part, note))
    }
    _check_room(work, sum(size for key, size in sizes.items() if key not in done))
    for part, name, shard in every:
        path = work / part.name / name
        inside = f"{part.name}/{name}"
        if (part.name, name) in done:
            listener.kept(inside, sizes[part.name, name])
            continue
        make_folder(path.parent)
        write_shard(path, shard, _metadata(part, note), partial(listener.written, inside))
    for part in parts:
        if len(part.shards) > 1:
            _put(work / part.name / f"{part.stem}.safetensors.index.json", as_json(_shard_index(work, part)))
        _put(work / part.name / "config.json", as_json(part.config))
    for inside, data in sorted(small.items(), key=lambda item: (item[0] in (INDEX, MODULAR_INDEX), item[0])):
        _put(work / inside, data)
    sync_folder(work)


def _metadata(part: ConvertedPart, note: dict[str, object]) -> dict[str, str]:
    """Return the metadata of a file of weights, without the hash of its data."""
    whole = hashlib.sha256(as_json(note)).hexdigest()
    format = "mlx" if part.coded else "pt"  # transformers refuses files without one
    return {"format": format, "qwenimg_format": FORMAT, "source": part.source, "conversion": whole}


def _check_room(work: Path, need: int) -> None:
    free = shutil.disk_usage(work).free
    if need + _SPARE > free:
        raise DoesNotFit(
            f"{shown_path(work.parent)}: {size_text(need + _SPARE)} are needed, {size_text(free)} are free; "
            "make room, choose another disk or fewer bits with -q"
        )


def _shard_index(work: Path, part: ConvertedPart) -> dict[str, object]:
    """Return the index of a part's files, in the form of diffusers and transformers."""
    names: dict[str, str] = {}
    total = 0
    for name in part.files:
        header = read_header(work / part.name / name)
        header.file.close()
        names |= dict.fromkeys(header.tensors, name)
        total += sum(stored.end - stored.begin for stored in header.tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}


def _put(path: Path, data: bytes) -> None:
    make_folder(path.parent)
    write_atomic(path, data, overwrite=True)
