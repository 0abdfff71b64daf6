"""Every failure that a user can cause, each with the exit code that the command line returns for it.

The text of an error is one line: the file, the value in it, and what to do. `clean` keeps it one line whatever the file
contains. Exit codes 130 and 143 (signals) and 7 (partial batch) belong to the command line.
"""

from __future__ import annotations

import errno

from qwenimg.common.base.text import short

# Parts of the messages of torch's CPU allocator, MLX, Metal, libraries of CUDA and Python's threads in a bare
# RuntimeError, and of the loader of libraries in an ImportError.
_NO_MEMORY = (
    "::malloc]",
    "bad_alloc",
    "_alloc_failed",
    "allocation_failed",
    "can't start new thread",
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "unable to allocate",
    "maximum allowed buffer size",
    "insufficient memory",
    "out of memory",
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class QwenimgError(Exception):
    """Base of all errors that are shown as one line."""

    exit_code = 1

    def __str__(self) -> str:
        return short(super().__str__())


class UsageError(QwenimgError, ValueError):
    """A wrong option or argument, or an output that exists or cannot be written."""

    exit_code = 2


class UnknownOption(UsageError, TypeError):
    """A keyword that a call does not take; its text names the nearest one that it does."""


class PipelineBusy(UsageError):
    """A call to a pipeline that is drawing another picture, of this thread or of another one."""


class BackendMissing(QwenimgError):
    """The backend that was asked for is not installed or has no device here."""

    exit_code = 3


class DoesNotFit(QwenimgError, MemoryError):
    """A lack of memory or disk space, expected or met."""

    exit_code = 4


class ModelError(QwenimgError, ValueError):
    """A model or input file that is missing, unreadable, broken or unsupported."""

    exit_code = 5


class NotHere(ModelError):
    """A model that is not on this machine, or only in part; `qwenimg pull NAME` gets it. chosen: for this machine, and
    not by the user."""

    def __init__(self, text: str, name: str = "", *, chosen: bool = False) -> None:
        super().__init__(text)
        self.name, self.chosen = name, chosen


class NumericsError(QwenimgError, ArithmeticError):
    """A non-finite value, or a numeric check that failed."""

    exit_code = 6


# Errors that are not ours


def out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports a lack of memory. torch's own error is recognized by its name, so that torch need
    not be imported, the RuntimeError of an allocator by its text."""
    names = [cls.__name__ for cls in type(error).__mro__]
    if "OutOfMemoryError" in names or isinstance(error, MemoryError):
        return True
    text = str(error).lower() if isinstance(error, RuntimeError | ImportError) else ""
    return any(sign in text for sign in _NO_MEMORY)


def disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


# What is not built: every message about such a feature names it by its title here, and a test compares the words with
# the commands and options that there are, so that no message outlives its truth.

NOT_BUILT: dict[str, tuple[str, ...]] = {
    "a hypernetwork": ("hypernetwork", "hypernet"),
    "restoration of faces": (
        "face-restore", "restore-faces", "face-fix", "face-detailer", "adetailer", "codeformer", "gfpgan",
    ),
    "the noise of another size (seed resize)": ("seed-resize", "seed-resize-from-w", "seed-resize-from-h"),
    "training of whole models": ("finetune", "fine-tune", "dreambooth"),
    "video": ("video", "animate", "img2vid", "txt2vid"),
}  # fmt: skip
"""By title: words of commands, and of options without their dashes."""


def not_built(word: str) -> str | None:
    """Return the sentence about the feature that `word` stands for; None for a word of no such feature."""
    plain = word.lower().lstrip("-").replace("_", "-")
    title = next((title for title, words in NOT_BUILT.items() if plain in words), None)
    return None if title is None else f"{title} is not built yet"
