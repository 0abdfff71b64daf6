"""`qwenimg grid`: cells against single runs, going on after a kill and Ctrl-C, the sheet, and axes that are refused."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import Library, cli
from support.processes import listing, pixels, qwenimg, start

from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.jobs import axes
from qwenimg.common.jobs.axes import KEY, MOST_CELLS, Grid, from_text, parse_axis, to_text
from qwenimg.common.jobs.grid_sheet import MAX_PIXELS, grid_png
from qwenimg.common.pictures.labelled_sheet import MARGIN
from qwenimg.common.pictures.texts import read_texts

SMALL = ("-m", "shapes", "--size", "64x64")
PROMPT = "a red ring"


def in_this_process(*args: str, cwd: Path) -> tuple[int, str, str]:
    ran = cli(*args)
    return ran.code, ran.out.decode(), ran.err


@pytest.mark.parametrize(
    ("backend", "qwenimg"),
    [("cpu", in_this_process), *(pytest.param(one, qwenimg, marks=pytest.mark.rest) for one in ("cpu", "mlx"))],
)
@pytest.mark.sample(0)
def test_cells_are_the_pictures_of_single_runs(
    backend: str, qwenimg: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also on the sheet; and those of the sheet's own recipe are the same again."""
    if backend == "mlx":
        pytest.importorskip("mlx")
    monkeypatch.chdir(tmp_path)
    axes = ("--x", "prompt=red,blue", "--y", "guidance=1,4")
    code, out, err = qwenimg(
        "grid", PROMPT, *SMALL, "--backend", backend, *axes, "--steps", "2", "-s", "7", "-o", "g.png", cwd=tmp_path
    )
    assert code == 0, err
    *cells, sheet = map(Path, out.splitlines())
    assert sheet == tmp_path / "g.png" and len(cells) == 4
    page = pixels(sheet)
    across, down = page.shape[1] // 2, page.shape[0] // 2
    for i, (word, guidance) in enumerate([("red", 1), ("blue", 1), ("red", 4), ("blue", 4)]):
        name = f"{i}.png"
        args = (f"a {word} ring", *SMALL, "--backend", backend, "--guidance", str(guidance), "--steps", "2", "-s", "7")
        assert qwenimg(*args, "-o", name, cwd=tmp_path)[0] == 0  # as the cells, without others
        assert (pixels(cells[i]) == pixels(tmp_path / name)).all(), (word, guidance)
        top, left = i // 2 * down + MARGIN, i % 2 * across + MARGIN
        assert (page[top : top + 64, left : left + 64] == pixels(tmp_path / name)).all()
        mine, theirs = (json.loads(read_texts(path)["qwenimg"]) for path in (cells[i], tmp_path / name))
        assert mine["prompt"] == theirs["prompt"] and mine["guidance"] == theirs["guidance"]
    code, out, err = qwenimg("grid", "--from", "g.png", "--backend", backend, "-o", "again.png", cwd=tmp_path)
    assert code == 0, err
    assert (pixels(tmp_path / "again.png") == page).all()
    assert read_texts(tmp_path / "again.png")[KEY] == read_texts(sheet)[KEY]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.sample(0)
def test_a_grid_goes_on(how: signal.Signals, tmp_path: Path) -> None:
    """After a kill or Ctrl-C no picture is drawn twice, and the sheet is that of an unbroken run."""
    args = ("grid", "a star", *SMALL, "--backend", "cpu", "--x", "seed=1-6", "--steps", "20", "-o")
    broken = start(*args, "g.png", cwd=tmp_path)
    assert broken.stdout is not None
    first = Path(broken.stdout.readline().strip())
    broken.send_signal(how)
    rest, err = broken.communicate(timeout=120)
    assert broken.returncode == (-9 if how == signal.SIGKILL else 130), err
    assert first.exists() and not (tmp_path / "g.png").exists() and "Traceback" not in err
    drawn = [first, *map(Path, rest.split())]
    before = {path: path.stat().st_ino for path in drawn}
    assert len(drawn) < 6
    code, _, err = qwenimg(*args, "g.png", cwd=tmp_path)
    assert code == 0, err
    assert before == {path: path.stat().st_ino for path in drawn}
    assert qwenimg(*args, "whole.png", cwd=tmp_path)[0] == 0
    assert (pixels(tmp_path / "g.png") == pixels(tmp_path / "whole.png")).all()
    assert listing(tmp_path / "g") == listing(tmp_path / "whole") and len(listing(tmp_path / "g")) == 7
    rows = [json.loads(line) for line in (tmp_path / "g" / "journal.jsonl").read_text().splitlines()]
    assert {*Counter(row["key"] for row in rows).values()} == {1}


def test_a_sheet_that_is_there_is_kept(library: Library) -> None:
    Path("g.png").write_bytes(b"mine")
    cli("grid", PROMPT, "--x", "steps=1,2", "-o", "g.png").refused(2, "g.png", "--overwrite")
    cli("grid", PROMPT, "--x", "steps=1,2", "-o", "g.jpg").refused(2, ".png")
    cli("grid", PROMPT, "--x", "steps=1,2", "-o", "-").refused(2, "a file")
    assert Path("g.png").read_bytes() == b"mine" and not Path("g").exists()


REFUSED = [
    (["--x", "steps=0,4"], "choose 1 to"), (["--x", "stepz=1"], "no option"), (["--x", "steps=a"], "whole number"),
    (["--x", "steps=1.5"], "whole number"), (["--x", "steps=1_0"], "whole number"), (["--x", "steps=\u0663"], "whole"),
    (["--x", "steps"], "expected an option"), (["--x", "=4"], "expected an option"), (["--x", "steps="], "empty"),
    (["--x", "steps=1,,2"], "empty"), (["--x", "steps=|"], "empty"), (["--x", "steps=4,4"], "twice"),
    (["--x", "seed=1-200"], "100"), (["--x", "seed=0-99999999999"], "seed"), (["--x", "seed=-1"], "random"),
    (["--x", "seed=3-1"], "backwards"), (["--x", "seed=1-2,2"], "twice"), (["--x", "guidance=nan"], "choose 0 to 100"),
    (["--x", "guidance=inf"], "choose"), (["--x", "prompt=blue,red"], "not in the prompt"),
    (["--x", "steps=1,2", "--y", "steps=3"], "both"), (["--x", "size=64", "--y", "aspect=1:1"], "both give the size"),
    (["--x", "size=big"], "size"), (["--x", "sampler=foo"], "no sampler"), (["--x", "image=a.png"], "no option"),
    (["--x", "num-images=1,2"], "no option"), (["--x", "model=a,b"], "no option"), (["--y", "steps=1"], "no axis"),
    (["--x", "steps=1,2", "-s", "1-3"], "--x seed=1-3"), (["--x", "lora=a:x|b:1"], "lora"),
    (["--x", f"guidance={','.join(str(i / 10) for i in range(30))}", "--y", "seed=1-4"], "120 cells"),
    (["--x", "y" * 100_000], "expected an option"), (["--x", "steps=" + "1" * 9_000], "expected"),
    (["--x", "steps=" + "1" * 5_000], "steps"), (["--x", "outpaint=left=1,top=1"], "outpaint"),
    (["--x", "\x1b[2J=\u202e"], "no option"), (["--x", "prompt=\udcff,a"], "not in the prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "what"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_axes_are_refused_before_a_model_is_looked_for(library: Library, args: list[str], what: str) -> None:
    cli("grid", PROMPT, "-m", "nowhere.safetensors", *args).refused(2, what)
    assert not list(Path().iterdir())


@pytest.mark.parametrize(("name", "what"), [
    ("samplr", "did you mean sampler?"),
    ("Denoising", "did you mean strength?"),
    ("Prompt S/R", "did you mean prompt?"),
    ("model", "all cells have one model; run the grid once for each"),
    ("num_images", "a cell is one picture; give seeds, as seed=1-4"),
    ("foo", "there are prompt, steps, guidance, seed,"),
    ("💥", "all: qwenimg grid --help"),
    ("a" * 7000, "all: qwenimg grid --help"),
])  # fmt: skip
def test_an_unknown_axis_is_answered_with_those_that_there_are(library: Library, name: str, what: str) -> None:
    cli("grid", "a ring", "--x", f"{name}=1,2").refused(2, "no option of a picture that a grid compares", what)
    assert all(axes._option(one, "").dashed == one for one in axes._USUAL)
    assert axes._option("CFG Scale", "").name == "guidance"


def test_words_are_replaced_and_labels_stand_under_cells() -> None:
    """As A1111's Prompt S/R: each of the two axes replaces its first value."""
    grid = Grid(
        base={"prompt": "a red ring, red sky", "seed": "1"},
        x=parse_axis("--x", "prompt=red|dark blue, starry"),
        y=parse_axis("--y", "prompt=ring,star"),
    )
    assert [(labels, cell["prompt"]) for labels, cell in grid.cells()] == [
        (("red", "ring"), "a red ring, red sky"),
        (("dark blue, starry", "ring"), "a dark blue, starry ring, dark blue, starry sky"),
        (("red", "star"), "a red star, red sky"),
        (("dark blue, starry", "star"), "a dark blue, starry star, dark blue, starry sky"),
    ]
    lora = parse_axis("--x", "lora=folder/ink.safetensors:0.5|folder/ink.safetensors:1")
    assert lora.labels() == ["lora ink.safetensors:0.5", "lora ink.safetensors:1"]
    assert [one["lora"][0].scale for one in lora.options] == [0.5, 1]
    assert parse_axis("--x", "cfg-scale=1,2.5").name == "guidance"
    assert parse_axis("--x", "outpaint=left=8,top=8|").values == ("left=8,top=8",)
    assert len(parse_axis("--x", f"seed=1-{MOST_CELLS}").values) == MOST_CELLS


@pytest.mark.sample(0)
def test_the_sheet_is_bounded(tmp_path: Path) -> None:
    """A hundred large pictures of several shapes: no more pixels than are read back, and each is there."""
    sides = [(1500, 700), (300, 2000)]
    for i, (width, height) in enumerate(sides):
        Image.new("RGB", (width, height), (200, 30, 30)).save(tmp_path / f"{i}.png")
    data = grid_png([tmp_path / f"{i % 2}.png" for i in range(100)], [("a 1", "b 2")] * 100, 10, {KEY: "x"})
    (tmp_path / "sheet.png").write_bytes(data)
    page = np.asarray(Image.open(tmp_path / "sheet.png"))
    print(page.shape, page.shape[0] * page.shape[1] / MAX_PIXELS)
    assert page.shape[0] * page.shape[1] < 1.2 * MAX_PIXELS
    assert read_texts(tmp_path / "sheet.png")[KEY] == "x"


def test_a_text_of_a_sheet_is_read_back_or_refused(tmp_path: Path) -> None:
    """2,000 mutants raise errors of ours alone, and none names a file of this machine."""
    options = {"prompt": "a {red|blue} ring", "negative_prompt": " ", "steps": 3, "width": 64, "height": 64}
    grid = Grid(base=options, x=parse_axis("--x", "guidance=1,4"), y=parse_axis("--y", "prompt=ring,star"))
    text = to_text(grid, 5)
    axes, read = from_text({KEY: text}, tmp_path)
    assert axes == {"x": "guidance=1,4", "y": "prompt=ring,star"} and read == options | {"seed": "5"}
    chance, refused = random.Random(7), 0
    for _ in range(2_000):
        letters = list(text)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(letters))
            letters[at : at + chance.randint(0, 3)] = chance.choice(
                ["", "9" * 30, "{", '"', "[", "null", "\ud800", "1e999"]
            )
        try:
            axes, _ = from_text({KEY: "".join(letters)}, tmp_path)
            for name, axis in axes.items():
                parse_axis(f"--{name}", axis, files=False)
        except QwenimgError:
            refused += 1
    print(f"{refused} of 2000 refused")
    for bad in (
        "[]",
        '{"format": 1}',
        '{"format": 2, "x": "a=1", "options": {}}',
        '{"format":1,"x":1,"options":{}}',
    ):
        with pytest.raises(ModelError):
            from_text({KEY: bad}, tmp_path)
    with pytest.raises(UsageError):
        parse_axis("--x", "lora=/etc/passwd:1", files=False)


def test_a_picture_that_is_no_sheet(library: Library) -> None:
    Image.new("RGB", (8, 8)).save("plain.png")
    cli("grid", "--from", "plain.png").refused(5, "plain.png", "no axes")
    cli("grid", "--from", "none.png").refused(5, "none.png")
    cli("grid", PROMPT).refused(2, "no axis")
    cli("grid", "--x", "steps=1,2").refused(2, "no prompt")
