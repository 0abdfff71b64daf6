"""The memory that the limits on this process leave: control groups of both versions, address space and data segment.

MLX ends by SIGSEGV where an allocation fails, so an allocation that would fail is refused before. Linux only: macOS
does not enforce these limits.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import DoesNotFit

NONE = 2**62  # no limit; control groups of version 1 report about this number
# Bytes of the address space for stacks and heaps of threads that will start later.
RESERVED = 2**27
# Bytes of address space and of data that numpy takes to load, on two cores: with less its BLAS ends the process itself.
# Measured by `ulimit -v` and `ulimit -d`, rounded up, like those of the backends.
NUMPY = (150 << 20, 100 << 20)
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def left() -> int:
    """Return the bytes that all limits leave, NONE without a limit."""
    return tightest()[1]


def tightest() -> tuple[str, int]:
    """Return the limit that leaves the fewest bytes, by its name in messages, and these bytes."""
    limits = {name: max(0, free - RESERVED) for name, free in _of_process().items()}
    limits = {f"`{name}`": free for name, free in limits.items()}
    limits["the memory limit of the container"] = left_in_groups(CONTROL_GROUPS, _text("/proc/self/cgroup"))
    return min(limits.items(), key=lambda one: one[1])


def check_room(library: str, needed: tuple[int, int]) -> None:
    """Raise DoesNotFit if the limits on this process leave less address space or data than `library` takes to load."""
    if library in sys.modules:
        return
    for (limit, free), least in zip(_of_process().items(), needed, strict=True):
        if free < least:
            left = size_text(max(0, free))
            raise DoesNotFit(f"loading {library} takes {size_text(least)} of memory, `{limit}` leaves {left}; raise it")


def _of_process() -> dict[str, int]:
    """Return the bytes that `ulimit -v` and `ulimit -d` leave, by these names."""
    left = {"ulimit -v": NONE, "ulimit -d": NONE}
    try:
        import resource
    except ImportError:
        return left
    used = dict(re.findall(r"^(Vm\w+):\s+(\d+) kB$", _text("/proc/self/status"), re.MULTILINE))
    for name, field, kind in (
        ("ulimit -v", "VmSize", resource.RLIMIT_AS),
        ("ulimit -d", "VmData", resource.RLIMIT_DATA),
    ):
        limit = resource.getrlimit(kind)[0]
        if field in used and limit != resource.RLIM_INFINITY:
            left[name] = limit - int(used[field]) * 1024
    return left


def left_in_groups(root: Path, groups: str) -> int:
    """Return the bytes that control groups leave. `groups`: the text of /proc/self/cgroup; `root`: where control groups
    are mounted.

    A container sees its own group as the root, so the root is read as well as each group above this process's."""
    folders: set[tuple[str, tuple[str, str, str]]] = set()
    for line in [*groups.splitlines(), "0::/", "0:memory:/"]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            folder, names = str(root), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder, names = f"{root}/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folders.add((folder, names))
        for part in filter(None, path.split("/")):
            folder = f"{folder}/{part}"
            folders.add((folder, names))
    return max(0, min(_left_in(folder, *names) for folder, names in folders))


def _left_in(folder: str, limit: str, current: str, cached: str) -> int:
    """Return the bytes that one control group leaves. Cached files do not count: the system drops them when needed."""
    try:
        if (most := int(_text(f"{folder}/{limit}"))) >= NONE:
            return NONE
        used = int(_text(f"{folder}/{current}"))
    except ValueError:  # no such files, or a limit of "max"
        return NONE
    match = re.search(rf"^{cached} (\d+)$", _text(f"{folder}/memory.stat"), re.MULTILINE)
    return most - used + (int(match[1]) if match else 0)


def _text(file: str) -> str:
    try:
        with open(file) as opened:  # noqa: PTH123 (read before every stage; Path.read_text takes twice as long)
            return opened.read()
    except OSError:
        return ""
