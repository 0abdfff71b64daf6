"""Files of wildcards: their lines, the folders that are searched, and files that are none."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.hub.model_folders import read_folders
from qwenimg.common.prompts import wildcards as module
from qwenimg.common.prompts.wildcards import Wildcards


def write(file: Path, data: bytes | str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wildcards").mkdir()
    return tmp_path / "wildcards"


def drawn(folder: Path, prompt: str, seed: int = 1) -> str:
    text = Wildcards([folder]).chosen({"prompt": prompt}, seed)["prompt"]
    assert isinstance(text, str)
    return text


def several(folder: Path, prompt: str, count: int = 60) -> set[str]:
    wildcards = Wildcards([folder])
    return {wildcards.chosen({"prompt": prompt}, seed)["prompt"] for seed in range(count)}


# Lines


def test_the_lines_of_a_file(folder: Path) -> None:
    """Blank lines and comments are left out, and a byte order mark; ends of lines are of any program."""
    write(
        folder / "season.txt",
        b"\xef\xbb\xbf# seasons\r\nsummer\r\n\r\n  {autumn|fall} \n# x\nwinter\r\n\\#ff0000\nspring",
    )
    assert several(folder, "__season__!") == {"summer!", "autumn!", "fall!", "winter!", "spring!", "#ff0000!"}
    assert several(folder, "{2$$ and $$__season__}") > {"summer and winter", "spring and summer"}
    assert not any("summer and summer" in text for text in several(folder, "{2$$ and $$__season__}"))
    assert all(text.count("&") == 4 for text in several(folder, "{5$$&$$__season__}")), "no more than there are"


def test_lines_have_weights_and_wildcards(folder: Path) -> None:
    write(folder / "people.txt", "3::__land/africa__\n__land/asia__\n")
    write(folder / "land" / "africa.txt", "Namibian\n")
    write(folder / "land" / "asia.txt", "Thai\n")
    found = Counter(drawn(folder, "__people__", seed) for seed in range(2000))
    print(found)
    assert found.keys() == {"Namibian", "Thai"} and abs(found["Namibian"] / 2000 - 0.75) < 0.04
    write(folder / "zero.txt", "0::a\n0::b\n")
    with pytest.raises(ModelError, match=r"^__zero__: zero.txt has weights that are all 0$"):
        drawn(folder, "__zero__")
    with pytest.raises(UsageError, match="weights are all 0"):
        drawn(folder, "{0::a|0::b}")


def test_names_in_any_script_and_side_by_side(folder: Path) -> None:
    for name in ("色", "a_b", "a-b", "a.b", "v1/x"):
        write(folder / f"{name}.txt", f"[{name}]\n")
    assert drawn(folder, "__色____a_b__ __a-b__ __a.b__ __v1/x__") == "[色][a_b] [a-b] [a.b] [v1/x]"


def test_a_file_of_100000_lines_gives_each_of_twenty_seeds_another(folder: Path) -> None:
    write(folder / "many.txt", "".join(f"line {i}\n" for i in range(100_000)))
    begun, wildcards = time.process_time(), Wildcards([folder])
    texts = {wildcards.chosen({"prompt": "__many__"}, seed)["prompt"] for seed in range(1000, 1020)}
    print(f"{time.process_time() - begun:.2f} s for twenty prompts")
    assert len(texts) == 20


def test_a_file_is_read_again_when_it_changes(folder: Path) -> None:
    file = write(folder / "a.txt", "one\n")
    wildcards = Wildcards([folder])
    assert wildcards.chosen({"prompt": "__a__"}, 1)["prompt"] == "one"
    file.unlink()
    write(file, "another\n")
    assert wildcards.chosen({"prompt": "__a__"}, 1)["prompt"] == "another"


def test_few_files_are_kept_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_LINES", 25)
    for i in range(20):
        write(folder / f"f{i}.txt", "x\n" * 10)
    wildcards = Wildcards([folder])
    wildcards.chosen({"prompt": " ".join(f"__f{i}__" for i in range(20))}, 1)
    assert len(wildcards._values) == 2


# Folders


def test_folders_are_searched_in_order(tmp_path: Path) -> None:
    write(tmp_path / "one" / "a.txt", "first\n")
    write(tmp_path / "two" / "a.txt", "second\n")
    write(tmp_path / "two" / "b.txt", "b\n")
    both = Wildcards([tmp_path / "one", tmp_path / "two"])
    assert both.chosen({"prompt": "__a__ __b__"}, 1)["prompt"] == "first b"


def test_off_takes_every_text_as_it_is() -> None:
    asked = {"prompt": r"{a|b} __c__ \{", "negative_prompt": "{2$$a|b}"}
    assert Wildcards([Path("off")]).chosen(asked, 1) == asked


def test_folders_of_other_programs_are_found(tmp_path: Path) -> None:
    """Those of ComfyUI, of its packs, of the web UI and its extensions, and of ComfyUI's list of paths."""
    comfy, webui = tmp_path / "ComfyUI", tmp_path / "webui"
    places = [
        comfy / "wildcards", comfy / "models" / "wildcards",
        comfy / "custom_nodes" / "comfyui-impact-pack" / "wildcards",
        comfy / "custom_nodes" / "comfyui-impact-pack" / "custom_wildcards", tmp_path / "listed",
        webui / "extensions" / "sd-dynamic-prompts" / "wildcards", webui / "scripts" / "wildcards",
        webui / "extensions" / "stable-diffusion-webui-wildcards" / "wildcards",
    ]  # fmt: skip
    for place in places:
        write(place / "a.txt", "a\n")
    write(comfy / "extra_model_paths.yaml", f"mine:\n  base_path: {tmp_path}\n  wildcards: listed\n")
    assert set(read_folders([comfy, webui]).wildcards) == set(places)
    (comfy / "models" / "checkpoints").mkdir()
    assert set(read_folders([comfy / "models"]).wildcards) == {one for one in places if "webui" not in one.parts}


@pytest.mark.parametrize("place", ["missing", "file"])
def test_no_folder_is_refused(tmp_path: Path, place: str) -> None:
    write(tmp_path / "file", "")
    with pytest.raises(UsageError, match=r"--wildcards .*: no such folder; .* or off"):
        Wildcards([tmp_path / place])


def test_a_name_that_is_not_there_names_the_nearest(folder: Path) -> None:
    write(folder / "d" / "colour.txt", "red\n")
    with pytest.raises(UsageError) as error:
        drawn(folder, "a __d/color__ cat")
    fault = "the wildcard __d/color__: no color.txt there, the nearest is __d/colour__"
    assert str(error.value) == rf"{fault}; to draw it as text write \__d/color__"


# Files that are none


def bad_files(folder: Path) -> dict[str, str]:
    """Make files that cannot be used. Return the words of each refusal."""
    outside = write(folder.parent / "secret.txt", "secret\n")
    (folder / "link.txt").symlink_to(outside)
    (folder / "up.txt").symlink_to("../secret.txt")
    (folder / "passwd.txt").symlink_to("/etc/passwd")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "dangling.txt").symlink_to("nowhere.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "out").symlink_to(folder.parent)
    os.mkfifo(folder / "fifo.txt")
    (folder / "dir.txt").mkdir()
    write(folder / "empty.txt", "")
    write(folder / "blank.txt", "\n \n# only this\n")
    write(folder / "latin.txt", b"caf\xe9\n")
    write(folder / "utf16.txt", "red\n".encode("utf-16"))
    write(folder / "lines.txt", b"\n" * 500_000)
    write(folder / "wide.txt", "x" * 100_001)
    with (folder / "huge.txt").open("wb") as file:
        file.truncate(1 << 40)  # a hole
    write(folder / "self.txt", "__self__\n")
    write(folder / "a.txt", "__b__\n")
    write(folder / "b.txt", "{__c__|__c__}\n")
    write(folder / "c.txt", "{1$$__a__}\n")
    return {
        "link": "link out of", "up": "link out of", "passwd": "link out of", "loop": "cannot be read",
        "zero": "link out of",
        "dangling": "cannot be read", "out/secret": "link out of", "fifo": "a pipe", "dir": "is a folder",
        "empty": "has no values", "blank": "has no values", "latin": "not UTF-8 (byte 3)", "utf16": "not UTF-8",
        "lines": "500,000 lines", "wide": "a line of 100,001", "huge": "bytes; at most", "self": "leads back to itself",
        "a": "leads back to itself",
    }  # fmt: skip


def test_a_file_that_cannot_be_used_is_one_line(folder: Path) -> None:
    for name, words in bad_files(folder).items():
        with pytest.raises(ModelError) as error:
            drawn(folder, f"x __{name}__")
        text = str(error.value)
        assert words in text and text.count(f"__{name}__") == 1, text
        assert len(text) <= 300 and text.isprintable() and "secret\n" not in text
        assert str(folder) not in text, "a client of a server reads it"


@pytest.mark.parametrize(
    "name", ["../secret", "a/../../secret", "/etc/passwd", "..", ".hidden", "a/./b", "x\0y", "~/x", "a" * 199]
)
def test_no_name_leaves_the_folder(folder: Path, name: str) -> None:
    write(folder.parent / "secret.txt", "secret\n")
    write(folder / ".hidden.txt", "secret\n")
    try:
        assert drawn(folder, f"x __{name}__") == f"x __{name}__", "it is no name"
    except (UsageError, ModelError) as error:
        assert len(str(error)) <= 300 and str(error).isprintable()


def test_a_link_that_stays_inside_is_followed(folder: Path) -> None:
    write(folder / "a.txt", "red\n")
    (folder / "b.txt").symlink_to("a.txt")
    assert drawn(folder, "__b__") == "red"


def test_lines_that_multiply_end_soon(folder: Path) -> None:
    """Ten wildcards of ten each, ten deep: 10 billion choices."""
    for i in range(10):
        write(folder / f"x{i}.txt", f"__x{i + 1}__ " * 10)
    write(folder / "x10.txt", "{|}")
    begun = time.process_time()
    with pytest.raises(UsageError, match=r"more than 2,000 choices|characters"):
        drawn(folder, "__x0__")
    write(folder / "bars.txt", "{" + "|" * 99_000 + "}")
    with pytest.raises(UsageError, match="more than 300,000 characters of lines"):
        drawn(folder, "__bars__" * 100)
    print(f"{time.process_time() - begun:.2f} s")
    assert time.process_time() - begun < 20


def test_files_of_one_prompt_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read once for a prompt, also if there are more than are kept in memory."""
    for i in range(20):
        write(folder / f"t{i}.txt", "".join(f"line {j}\n" for j in range(100)))
    read: list[bytes] = []
    values = module._values
    monkeypatch.setattr(module, "_values", lambda raw: read.append(raw) or values(raw))
    prompt = "".join(f"__t{i}__" for i in range(20)) * 90
    assert drawn(folder, prompt).count("line") == 1800
    assert len(read) == 20
    monkeypatch.setattr(module, "MAX_FILE_LINES", 1999)
    with pytest.raises(UsageError, match="more than 1,999 lines"):
        drawn(folder, prompt)
    monkeypatch.setattr(module, "MAX_FILES", 19)
    with pytest.raises(UsageError, match="more than 19 wildcards"):
        drawn(folder, prompt)


def test_files_inside_each_other_have_a_depth(folder: Path) -> None:
    for i in range(200):
        write(folder / f"y{i}.txt", f"{{__y{i + 1}__|__y{i + 1}__}}")
    write(folder / "y200.txt", "end")
    with pytest.raises(UsageError, match="deeper than 80"):
        drawn(folder, "__y0__")
    assert drawn(folder, "__y180__") == "end"
