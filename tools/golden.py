"""What every test draws, prints and refuses, written to a file; two such files compared. For changes of the structure,
after which pictures, exit codes and texts have to be what they were.

python tools/golden.py record before.jsonl tests/families    # arguments of pytest; the sample of all tests without any
python tools/golden.py record after.jsonl tests/families     # in the changed tree
python tools/golden.py compare before.jsonl after.jsonl      # each difference by its test; fails if there is one
python tools/golden.py compare before.jsonl after.jsonl --again before2.jsonl    # a second recording of the same tree:
                                                             # tests that differ by themselves do not count

A picture is the SHA-256 of its latents and of its pixels, so both files have to come from one machine with the same
packages. Texts are compared without temporary paths, seconds, dates and sizes of free memory.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

RECORDING = "GOLDEN_RECORDING"  # the file of a recording, for the processes of pytest
SAMPLE = ("-m", "not slow and not rest", "-n", "2", "--dist", "loadfile")  # a file's fixtures draw in one order
LONGEST = 20_000  # characters of a text
SHOWN = 160  # characters of a difference
Event = list[str]  # a kind, and what has to stay
Golden = Mapping[str, list[Event]]  # by test
_VARYING = (
    (re.compile(r"/\S*pytest-of-\w+/pytest-\d+/(popen-gw\d+/)?"), "TEMPORARY/"),
    (re.compile(re.escape(str(Path.cwd())) + r"/?"), "TREE/"),
    (re.compile(r"/tmp/tmp\w+"), "TEMPORARY"),
    (re.compile(r"\d+(\.\d+)?(e-?\d+)? (ns|ms|s|min|h|days)\b"), "N s"),
    (re.compile(r"\b20\d\d-?\d\d-?\d\d([T-]?\d\d:?\d\d:?\d\d[\d.+:]*)?"), "DATE"),
    (re.compile(r"(of|only) \d+(\.\d+)? [KMGT]B"), r"\1 N GB"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0xN"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("output", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--again", type=Path)
    given, more = parser.parse_known_args()
    if given.command == "record":
        sys.exit(record(given.output, more or SAMPLE))
    if more:
        parser.error(f"no {' '.join(more)} here")
    before, after = read(given.before), read(given.after)
    unstable = {name for name, _ in differences(before, read(given.again))} if given.again else set()
    lines = [f"{name}: {line}" for name, line in differences(before, after) if name not in unstable]
    print(*lines, sep="\n", end="\n" if lines else "")
    both = before.keys() & after.keys() - unstable
    events = [event for name in both for event in before[name]]
    counts = ", ".join(f"{sum(event[0] == kind for event in events)} {kind}s" for kind in KINDS)
    print(f"{len(both)} tests with {counts}: {len(lines)} differ")
    for which, names in (("before", before.keys() - after.keys()), ("after", after.keys() - before.keys())):
        print(f"{len(names)} tests are only in the file {which}; {len(unstable)} differ by themselves")
    sys.exit(6 if lines or not events else 0)


def record(output: Path, args: Sequence[str]) -> int:
    """Run the tests, and write what each drew, printed and refused. Return pytest's exit code."""
    for part in _parts(output):
        part.unlink()
    folders = (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {RECORDING: str(output.resolve()), "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    code = subprocess.run([sys.executable, "-m", "pytest", "-p", "golden", "-q", *args], env=environment).returncode
    lines = [line for part in _parts(output) for line in part.read_text(encoding="utf-8").splitlines()]
    output.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")
    for part in _parts(output):
        part.unlink()
    return code


def _parts(output: Path) -> list[Path]:
    return sorted(output.parent.glob(f"{output.name}.gw*"))


def read(path: Path) -> Golden:
    return dict(map(json.loads, path.read_text(encoding="utf-8").splitlines()))


def differences(before: Golden, after: Golden) -> Iterator[tuple[str, str]]:
    """Yield each test of both recordings whose events differ, with the first difference."""
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        for number, (one, other) in enumerate(zip(old, new, strict=False)):
            if one != other:
                yield name, f"{one[0]} {number}: {_shown(one, other)}"
                break
        else:
            if len(old) != len(new):
                yield name, f"{len(old)} events, now {len(new)}"


def _shown(one: Event, other: Event) -> str:
    if one[0] != other[0]:
        return f"now {other[0]} {other[-1][:SHOWN]!r}"
    old, new = next(pair for pair in zip(one[1:], other[1:], strict=True) if pair[0] != pair[1])
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    start = max(0, same - 40)
    return f"{old[start : start + SHOWN]!r}, now {new[start : start + SHOWN]!r}"


# The recording, as a plugin of pytest

_events: dict[str, list[Event]] = {}
_running: list[str] = []
KINDS = ("picture", "command", "refusal")


def plain(text: str | bytes) -> str:
    """Return a text without what varies from run to run; a hash of what is none."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        return hashlib.sha256(error.object).hexdigest()
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return text[:LONGEST]


def note(kind: str, *values: str) -> None:
    if _running:
        _events.setdefault(_running[-1], []).append([kind, *values])


def _hash(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def _after(owner: Any, name: str, noted: Callable[..., None]) -> None:
    """Let `noted` see the result and the arguments of each call of a function."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def calling(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        noted(result, *args)
        return result

    setattr(owner, name, calling)


def pytest_configure() -> None:
    from support import cli_runner, processes

    import qwenimg

    def refused(held: bool, context: Any, kind: Any, error: Any, *_: Any) -> None:
        if held and type(error).__module__.startswith("qwenimg."):
            note("refusal", type(error).__name__, plain(str(error)))

    def printed(ran: Any, *_: Any) -> None:
        code, out, err = (ran.code, ran.out, ran.err) if hasattr(ran, "code") else ran
        note("command", str(code), plain(out), plain(err))

    _after(qwenimg.Result, "__init__", lambda _, made, *__: note("picture", _hash(made.latents), _hash(made.pixels)))
    _after(pytest.RaisesExc, "__exit__", refused)
    _after(cli_runner, "captured", printed)
    _after(processes, "qwenimg", printed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    with _during(item.nodeid):
        return (yield)


@contextmanager
def _during(name: str) -> Iterator[None]:
    _running.append(name)
    try:
        yield
    finally:
        _running.pop()


def pytest_unconfigure() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw")
    lines = (json.dumps([name, events], ensure_ascii=True) for name, events in _events.items())
    if text := "".join(f"{line}\n" for line in lines):
        Path(f"{os.environ[RECORDING]}.gw{worker}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
