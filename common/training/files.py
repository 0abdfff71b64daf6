"""The files of a training run: checks of its outputs before it starts, and reading of those that it continues from.

Nothing here needs a framework, so that a run that must fail does so before one is imported. Files are not trusted: only
regular files are opened, and every value is checked before it is used. A bad input file is a ModelError, an output that
cannot be written a UsageError.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from qwenimg.common.base.atomic_files import check_output, make_folder
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad, closed_on_error, is_folder, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.formats.safetensors import read_header
from qwenimg.common.formats.stored import Header
from qwenimg.common.training.config import MAX_STEPS

FORMAT = "qwenimg-training-1"
COLUMNS = ("step", "loss", "rate", "gradient", "dtype", "scale", "growths", "back_offs", "images_per_second")
MAX_TABLE = 8 << 20  # bytes; a run of 5 million steps


# Before a run


class RunOptions(Protocol):
    """The options of a run: a frozen dataclass. A resumed run has those named in `SAME` in common with its
    checkpoint."""

    SAME: ClassVar[tuple[str, ...]]

    @property
    def steps(self) -> int: ...
    @property
    def resume(self) -> bool: ...
    @property
    def init(self) -> Path | None: ...
    @property
    def stem(self) -> Path:
        """The name of the run's own files, without their suffixes."""
        ...


def check(config: RunOptions, outputs: Iterable[Path]) -> None:
    """Check what would fail later, and change nothing: a checkpoint that is broken or of another run, and a file or
    folder that cannot be written. `outputs`: files that the stage writes outside the folder `training`. Raises
    ModelError and UsageError."""
    name = config.stem
    checkpoint = name.with_suffix(".safetensors")
    if config.resume:
        state = open_checkpoint(checkpoint, config)
        state.header.file.close()
        read_table(name.with_suffix(".csv"), state.step)
    elif os.path.lexists(checkpoint):
        raise UsageError(f"{clean(checkpoint)}: a run is there already; go on with --resume, or move it away")
    if config.init is not None and not is_folder(config.init):
        raise ModelError(f"--init {clean(config.init, 120)}: no such folder")
    if is_link(name.with_suffix(".log")):
        raise UsageError(f"{clean(name.with_suffix('.log'))}: is a link, and lines would go elsewhere; move it away")
    own_files = (name.with_suffix(suffix) for suffix in (".safetensors", ".csv", ".log"))
    for path in (*own_files, *outputs):
        _check_place(path)


def is_file(path: Path) -> bool:
    """Return whether something that is not a folder has this name; False without permission to look."""
    return os.path.exists(path) and not os.path.isdir(path)  # noqa: PTH110, PTH112 (Path's raise without permission)


def is_link(path: Path) -> bool:
    return os.path.islink(path)  # noqa: PTH114 (Path's raises for a name that is too long)


def _check_place(path: Path) -> None:
    """Raise UsageError unless `path` could be written once missing folders are made."""
    folder = path.parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not os.path.isdir(folder):  # noqa: PTH112 (as above)
        raise UsageError(f"{clean(folder)}: is not a folder; move it away or choose another --out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{clean(folder)}: no permission to write in this folder; choose another --out")
    if folder == path.parent:
        check_output(path, overwrite=True)


def prepare(config: RunOptions, outputs: Iterable[Path]) -> None:
    """Check the run and make the folder for its own files. Raises DoesNotFit too, for a full disk."""
    check(config, outputs)
    make_folder(config.stem.parent, parents=True)


# While it runs


def add_line(path: Path, text: str) -> None:
    """Append a line to a regular file. A failure is ignored, since the line is printed on the terminal too."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError), open(os.open(path, flags, 0o666), "ab", buffering=0) as file:  # noqa: PTH123
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.write(text.encode(errors="backslashreplace") + b"\n")


# Checkpoints


@dataclass(frozen=True, kw_only=True)
class State:
    """An open checkpoint: its tensors, the number of steps done, and the loss scaler's fields, unchecked."""

    header: Header
    step: int
    scaler: dict[str, object]


def run_of(config: RunOptions) -> dict[str, Any]:
    """Return the options that identify a checkpoint's run, as JSON values."""
    values = asdict(config)  # type: ignore[call-overload]
    options: dict[str, Any] = json.loads(json.dumps({name: values[name] for name in config.SAME}))
    return options


def open_checkpoint(path: Path, config: RunOptions) -> State:
    """Open the checkpoint `path` and check its header; the caller closes `header.file`. Raises ModelError."""
    _check_own(path)
    if not os.path.lexists(path):
        raise bad(path, "no checkpoint here to resume; start without --resume")
    try:
        header = read_header(path)
    except ModelError as error:
        reason = str(error).rpartition(path.name)[2].removeprefix(" (header)").removesuffix(": download it again")
        raise bad(path, f"is not a whole checkpoint{clean(reason, 120)}; move it away") from None
    with closed_on_error(header.file):
        step, scaler = _fields(path, header.metadata, config)
    return State(header=header, step=step, scaler=scaler)


def _fields(path: Path, metadata: dict[str, str], config: RunOptions) -> tuple[int, dict[str, object]]:
    if FORMAT not in metadata:
        raise bad(path, "is not a checkpoint of a training run; move it away or choose another --out")
    data = strict_json(metadata[FORMAT].encode(), f"{path} (run)", depth=8, values=1000)
    if not isinstance(data, dict) or data.keys() != {"step", "run", "scaler"}:
        raise bad(path, "its header is not that of a checkpoint: step, run and scaler; move it away")
    step, run, scaler = data["step"], data["run"], data["scaler"]
    if not isinstance(run, dict) or not isinstance(scaler, dict):
        raise bad(path, "its header has a run or a scaler that is not a table; move it away")
    _check_run(path, run, run_of(config))
    if type(step) is not int or not 0 <= step <= MAX_STEPS:
        raise bad(path, f"its step is {clean(step, 40)}; expected a whole number from 0 to {MAX_STEPS}; move it away")
    if step > config.steps:
        raise bad(path, f"is of step {step}, beyond --steps {config.steps}; give --steps {step} or more")
    return step, scaler


def _check_run(path: Path, theirs: dict[str, object], ours: dict[str, object]) -> None:
    for name, value in ours.items():
        if json.dumps(theirs.get(name)) != json.dumps(value):  # as text: 1, 1.0 and true are equal in Python
            if isinstance(value, dict) and isinstance(before := theirs.get(name), dict):
                _check_run(path, before, {key: value.get(key) for key in {**before, **value}})
            difference = f"{name} was {clean(theirs.get(name), 60)}, now it is {clean(value, 60)}"
            raise bad(path, f"is of another run: {difference}; give the same options, or another --out")


def _check_own(path: Path) -> None:
    """Raise ModelError for a link: a run writes only regular files."""
    if is_link(path):
        raise bad(path, "is a link, which no run writes; copy the file here or move the link away")


def read_table(path: Path, last: int) -> list[str]:
    """Return the rows of the table `path` up to the step `last`, as text and in order; none without a table. Raises
    ModelError for anything but a table that a run wrote."""
    _check_own(path)
    if not os.path.lexists(path):
        return []
    with contextlib.closing(open_regular(path)) as file:
        if file.size > MAX_TABLE:
            raise bad(path, f"has {file.size} bytes; at most {MAX_TABLE} are read; move it away")
        raw = file.read(0, file.size)
    try:
        lines = raw.decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise bad(path, f"is not the loss of a run: byte {error.start} is no plain text; move it away") from None
    if not lines or lines[0] != ",".join(COLUMNS):
        raise bad(path, f"is not the loss of a run: expected a first line {','.join(COLUMNS)}; move it away")
    steps = [0]
    for number, line in enumerate(lines[1:], 2):
        steps.append(_step(path, number, line))
        if steps[-1] <= steps[-2]:
            raise bad(path, f"line {number}: step {steps[-1]} comes after step {steps[-2]}; move it away")
    return [line for step, line in zip(steps[1:], lines[1:], strict=True) if step <= last]


def _step(path: Path, number: int, line: str) -> int:
    """Return the step of a row of numbers, all finite."""
    values = line.split(",")
    try:
        figures = [float(value) for name, value in zip(COLUMNS, values, strict=True) if name != "dtype"]
        whole = len(values[0]) <= len(str(MAX_STEPS)) and values[0].isdigit()
    except ValueError:
        whole = False
    if not whole or not all(math.isfinite(x) for x in figures):
        raise bad(path, f"line {number} is not a row of {len(COLUMNS)} figures: {clean(line, 60)}; move it away")
    return int(values[0])
