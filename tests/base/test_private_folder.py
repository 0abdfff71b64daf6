"""Code is loaded only from a folder to which nobody else can write."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwenimg.common.base import leftovers
from qwenimg.common.runtime import private_folder

NOBODY = 12345  # of users and groups


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "ours" / "code"
    before = os.umask(0)
    try:
        assert private_folder.make(folder) == "" == private_folder.make(folder)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(place.stat().st_mode) for place in (folder, *folder.parents[:2])] == [0o700] * 3


def linked(folder: Path) -> None:
    (folder.parent / "other").mkdir()
    folder.symlink_to("other")


def writable(mode: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        folder.mkdir()
        folder.chmod(mode)

    return change


def below(mode: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        folder.parent.chmod(mode)

    return change


def below_a_link(folder: Path) -> None:
    """The folder above is a link of ours to one in a folder that is everybody's."""
    shared = folder.parent.parent / "shared"
    (shared / "there").mkdir(parents=True)
    shared.chmod(0o777)
    folder.parent.rmdir()
    folder.parent.symlink_to(shared / "there")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (linked, "is a link"),
        (lambda folder: folder.write_text(""), "is a link or a file"),
        (os.mkfifo, "is a link or a file"),
        (writable(0o777), "others can write to"),
        (writable(0o702), "mode 702"),
        (writable(0o1777), "others can write to"),  # the sticky bit lets others add files
        (below(0o777), "others can write to"),
        (below_a_link, "shared (mode 777)"),
    ],
)
def test_a_folder_that_others_can_reach_is_refused(tmp_path: Path, change: Callable[[Path], None], text: str) -> None:
    above = tmp_path / "above"
    above.mkdir(mode=0o700)
    change(above / "code")
    reason = private_folder.make(above / "code")
    print(reason)
    assert text in reason and "\n" not in reason


def test_a_folder_below_a_sticky_one_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert private_folder.make(tmp_path / "tmp" / "code") == ""


def test_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert "belongs to another user" in private_folder.make(tmp_path / "code")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_makes_nothing_in_the_cache_of_a_user(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    assert f"(uid {NOBODY})" in private_folder.make(tmp_path / "cache" / "code")
    assert list(tmp_path.iterdir()) == []


def test_a_group_of_one_user_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many systems give each user: a folder made there may be writable for that group."""
    folder, name = tmp_path / "code", "me"
    folder.mkdir()
    folder.chmod(0o775)
    members: list[str] = []
    monkeypatch.setattr(private_folder.pwd, "getpwuid", lambda user: SimpleNamespace(pw_name=name))
    monkeypatch.setattr(private_folder.grp, "getgrgid", lambda group: SimpleNamespace(gr_name="me", gr_mem=members))
    assert private_folder.make(folder) == ""
    members.append("you")
    assert "mode 775" in private_folder.make(folder)
    members.clear()
    name = "you"
    assert "mode 775" in private_folder.make(folder)


def test_a_folder_that_cannot_be_made_or_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be made" in private_folder.make(tmp_path / "file" / "code")
    assert "cannot be made" in private_folder.make(tmp_path / ("n" * 300))
    assert "cannot be made" in private_folder.make(tmp_path / "a\0b")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert "noexec" in private_folder.make(tmp_path / "code")


def test_a_temporary_folder_goes_with_the_process_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder.temporary("code", tmp_path)
    (folder / "more").mkdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.name.startswith("code-")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        leftovers.remove(folder)
    assert folder.is_dir()
    leftovers.register(folder)
    leftovers.remove_all()
    assert list(tmp_path.iterdir()) == []
