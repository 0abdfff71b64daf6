"""Passports by the command line: recorded on one backend and checked on another, each of which has to pass."""

from __future__ import annotations

from pathlib import Path

from support.cli_runner import cli


def record(model: Path, passport: Path, backend: str, *asked: str) -> None:
    ran = cli("parity", "record", str(model), "--backend", backend, "--steps", "2", *asked, "-o", str(passport))
    assert ran.code == 0, ran.err


def check(model: Path, passport: Path, backend: str, *options: str) -> str:
    """Return what the check printed."""
    ran = cli("parity", "check", str(passport), str(model), "--backend", backend, *options)
    print(backend, ran.out.decode(), sep="\n")
    assert ran.code == 0, ran.err
    return ran.out.decode()
