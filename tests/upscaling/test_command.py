"""`qwenimg upscale`: pictures made larger, their files and records, and one line for whatever is wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import upscalers
from support.cli_runner import cli
from support.upscalers import as_safetensors, as_torch

from qwenimg import backends
from qwenimg.common.hub.job_upscalers import JobUpscalers
from qwenimg.common.jobs.job import Job
from qwenimg.common.pictures.pixels import fit
from qwenimg.common.pictures.texts import UPSCALING, read_texts
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.upscaling.network_file import open_upscaler
from qwenimg.common.upscaling.upscaling import Upscaling, policy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    as_torch(tmp_path / "x4.pth", upscalers.rrdbnet(blocks=1, features=8, growth=4))
    as_safetensors(tmp_path / "x2.safetensors", upscalers.srvgg(convs=1, features=8, scale=2))
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    Image.fromarray(pixels[..., :3]).save(tmp_path / "photo.png")
    Image.fromarray(pixels[..., :3]).save(tmp_path / "photo.jpg")
    return tmp_path


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_picture_is_made_larger_beside_itself(folder: Path, backend: str) -> None:
    ran = cli("upscale", "photo.png", "--with", "x4.pth", "--backend", backend)
    assert ran.code == 0 and ran.paths == [folder / "photo-4x.png"]
    assert "10x12 to 40x48 takes about" in ran.err and "RRDBNet, x4" in ran.err
    wanted = upscalers.formula(upscalers.rrdbnet(blocks=1, features=8, growth=4), pixels(folder / "photo.png"))[0]
    apart = np.abs(pixels(ran.paths[0]).astype(int) - (wanted.clip(0, 1) * 255).round().transpose(1, 2, 0))
    print(f"{apart.max():.0f} of 255 from the formula on {backend}")
    assert apart.max() <= 1
    assert cli("upscale", "photo.png", "--with", "x4.pth", "--quiet").code == 2  # never over a file
    again = cli("upscale", "photo.png", "--with", "x4.pth", "--overwrite", "--quiet", "--no-metadata")
    assert (again.code, again.err) == (0, "") and read_texts(again.paths[0]) == {}


def test_the_size_is_the_one_that_was_asked_for(folder: Path) -> None:
    """A scale below the network's is resampled by Lanczos, one above takes more passes."""
    for file, by in (("x4.pth", 2), ("x4.pth", 3), ("x2.safetensors", 4), ("x2.safetensors", 3), ("x4.pth", 1)):
        ran = cli("upscale", "photo.png", "--with", file, "--by", str(by), "-o", f"{by}.png", "--overwrite", "--quiet")
        assert pixels(ran.paths[0]).shape == (12 * by, 10 * by, 3), (file, by, ran.err)
    assert cli("upscale", "photo.png", "--with", "x4.pth", "--quiet").code == 0
    whole = pixels(folder / "photo-4x.png")
    ran = cli("upscale", "photo.png", "--with", "x4.pth", "--by", "2", "--quiet")
    assert np.array_equal(pixels(ran.paths[0]), fit(whole, 20, 24))


def test_alpha_stays_and_several_pictures_go_into_a_folder(folder: Path) -> None:
    ran = cli("upscale", "clear.png", "photo.jpg", "photo.png", "--with", "x2.safetensors", "-o", "out/", "--quiet")
    ran.refused(2, "more than one picture would have this name")
    ran = cli("upscale", "clear.png", "photo.jpg", "--with", "x2.safetensors", "-o", "out/", "--json")
    assert [event["event"] for event in ran.events] == ["plan", "image", "image", "done"]
    assert pixels(folder / "out" / "clear-2x.png").shape == (24, 20, 4)
    assert pixels(folder / "out" / "photo-2x.png").shape == (24, 20, 3)
    part = cli("upscale", "clear.png", "none.png", "--with", "x2.safetensors", "--json", "--overwrite", "-o", "out/")
    assert part.code == 7 and [event["event"] for event in part.events] == ["plan", "image", "error", "done"]


@pytest.mark.parametrize("suffix", [".png", ".webp", ".jpg"])
@pytest.mark.sample(0)
def test_the_record_is_in_the_file_and_the_recipe_stays(folder: Path, suffix: str) -> None:
    drawn = cli("a red circle", "-m", "shapes", "--steps", "1", "-s", "1", "--size", "64", "-o", "drawn.png", "--quiet")
    assert drawn.code == 0
    before = read_texts(folder / "drawn.png")
    ran = cli("upscale", "drawn.png", "--with", "x2.safetensors", "-o", f"large{suffix}", "--quiet")
    after = read_texts(ran.paths[0])
    assert json.loads(after["qwenimg"]) == json.loads(before["qwenimg"])
    record = json.loads(after[UPSCALING])
    assert record["by"] == 2 and record["network"] == "SRVGGNetCompact" and record["upscaler"] == "x2.safetensors"
    assert len(record["upscaler_sha256"]) == len(record["image_sha256"]) == 64
    assert "trainedAlgorithmicMedia" in after["XML:com.adobe.xmp"]
    if suffix == ".png":
        line = 'Postprocess upscale by: 2, Postprocess upscaler: "x2"'
        assert after["postprocessing"] == line and after["parameters"] == before["parameters"]
    assert "a red circle" in cli("info", f"large{suffix}").out.decode()
    again = cli("--from", f"large{suffix}", "-o", "again.png", "--quiet")
    assert again.code == 0 and np.array_equal(pixels(folder / "again.png"), pixels(folder / "drawn.png"))
    photo = cli("upscale", "photo.png", "--with", "x2.safetensors", "-o", f"photo-large{suffix}", "--quiet")
    texts = read_texts(photo.paths[0])
    assert "qwenimg" not in texts and json.loads(texts[UPSCALING])["width"] == 10
    assert "algorithmicallyEnhanced" in texts["XML:com.adobe.xmp"]
    assert "has no recipe" in cli("--from", photo.paths[0].name).err


@pytest.mark.parametrize("suffix", [".png", ".webp"])
@pytest.mark.sample(0)
def test_a_drawn_picture_is_written_larger(folder: Path, suffix: str) -> None:
    """As the command makes it of the small one, with the recipe and the record in the file."""
    draw = ("a red circle", "-m", "shapes", "--steps", "1", "-s", "1", "--size", "64", "--quiet")
    assert cli(*draw, "-o", "small.png").code == 0
    ran = cli(*draw, "-o", f"large{suffix}", "--upscale", "2", "--upscale-with", "x2.safetensors")
    assert ran.code == 0, ran.err
    assert cli("upscale", "small.png", "--with", "x2.safetensors", "--quiet").code == 0
    assert np.array_equal(pixels(ran.paths[0]), pixels(folder / "small-2x.png"))
    texts = read_texts(ran.paths[0])
    assert json.loads(texts["qwenimg"])["width"] == 64 and json.loads(texts[UPSCALING])["by"] == 2
    bare = cli(*draw, "-o", f"bare{suffix}", "--upscale-with", "x2.safetensors", "--no-metadata")
    assert bare.code == 0 and read_texts(bare.paths[0]) == {} and pixels(bare.paths[0]).shape == (128, 128, 3)
    out = cli(*draw, "-o", "-", "--upscale", "4", "--upscale-with", "x2.safetensors")
    assert out.code == 0 and Image.open(io.BytesIO(out.out)).size == (256, 256)
    cli(*draw, "--upscale", "2").refused(2, "no upscaler", "--upscale-with FILE")
    cli(*draw, "--upscale", "2", "--upscale-with", "photo.png").refused(5, "photo.png")
    cli(*draw, "--upscale", "0", "--upscale-with", "x2.safetensors").refused(2, "upscale is 0", "1 to 16")
    cli(*draw, "--upscale", "2", "--upscale-with", "x2.safetensors", "--devices", "2").refused(2, "one device")
    lines = "\n".join(json.dumps({"prompt": "a red circle", "seed": seed}) for seed in (1, 2))
    (folder / "lines.txt").write_text(lines)
    several = cli(*draw[1:4], "1", "--size", "64", "--quiet", "--prompt-file", "lines.txt", "-o", "out/",
                  "--upscale", "2", "--upscale-with", "x2.safetensors")  # fmt: skip
    assert [pixels(path).shape for path in several.paths] == [(128, 128, 3)] * 2, several.err


def test_upscalers_have_names_in_the_folders_of_other_programs(folder: Path) -> None:
    for place in ("ComfyUI/models/upscale_models", "webui/models/ESRGAN"):
        (folder / place).mkdir(parents=True)
    (folder / "x4.pth").rename(folder / "ComfyUI/models/upscale_models/4x-One.pth")
    at = ("--quiet", "--overwrite", "-o", "p.png")
    assert cli("upscale", "photo.png", *at, "--models-dir", "ComfyUI").code == 0  # the only one
    assert cli("upscale", "photo.png", *at, "--models-dir", "ComfyUI", "--with", "4x-One").code == 0
    cli("upscale", "photo.png", *at, "--models-dir", "webui").refused(2, "no upscaler", "--with FILE")
    (folder / "x2.safetensors").rename(folder / "ComfyUI/models/upscale_models/two.safetensors")
    cli("upscale", "photo.png", *at, "--models-dir", "ComfyUI").refused(2, "2 upscalers", "4x-One, two")
    cli("upscale", "photo.png", *at, "--models-dir", "ComfyUI", "--with", "none").refused(5, "none")
    described = cli("info", "4x-One", "--models-dir", "ComfyUI").out.decode()
    assert "an upscaler, RRDBNet, x4" in described and "qwenimg upscale PICTURE --with" in described


def test_what_is_wrong_is_one_line(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    (folder / "text.png").write_text("no picture")
    as_torch(folder / "x1.pth", upscalers.rrdbnet(blocks=1, features=8, growth=4, patch=4))
    wrong = {
        ("photo.png",): (2, "no upscaler"),
        ("none.png", "--with", "x4.pth"): (5, "none.png: does not exist"),
        ("pipe.png", "--with", "x4.pth"): (5, "not a regular file"),
        ("text.png", "--with", "x4.pth"): (5, "is no PNG"),
        (".", "--with", "x4.pth"): (5, "is a folder"),
        ("photo.png", "--with", "photo.png"): (5, "photo.png"),
        ("photo.png", "--with", "none.pth"): (5, "none.pth: no such file"),
        ("photo.png", "--with", "."): (5, "is a folder"),
        ("photo.png", "--with", "x4.pth", "--by", "0"): (2, "--by"),
        ("photo.png", "--with", "x4.pth", "--by", "17"): (2, "--by"),
        ("photo.png", "--with", "x4.pth", "--by", "x"): (2, "--by"),
        ("photo.png", "--with", "x1.pth", "--by", "2"): (2, "does not enlarge"),
        ("photo.png", "--with", "x4.pth", "-o", "photo.gif"): (2, "let the name end in"),
        ("photo.png", "--with", "x4.pth", "-o", "no/such/p.png"): (2, "its folder does not exist"),
        ("photo.png", "--with", "x4.pth", "-o", "photo.png"): (2, "exists already"),
        ("photo.png", "clear.png", "--with", "x4.pth", "-o", "p.png"): (2, "one file for 2 pictures"),
        ("photo.png", "clear.png", "--with", "x4.pth", "-o", "-"): (2, "standard output takes one"),
        ("photo.png", "--with", "x4.pth", "--precision", "fp8"): (2, "--precision"),
        ("photo.png", "--with", "x4.pth", "--backend", "tpu"): (2, "--backend"),
        ("photo.png", "--with", "x4.pth", "--max-memory", "2kB"): (4, "--max-memory"),
        ("photo.png", "--with", ""): (2, "is empty"),
        ("", "--with", "x4.pth"): (2, "is empty"),
        (): (2, "Missing argument"),
    }
    for args, (code, said) in wrong.items():
        cli("upscale", *args, "--quiet").refused(code, said)
    assert {path.name for path in folder.iterdir()} == {
        "x4.pth", "x2.safetensors", "x1.pth", "clear.png", "photo.png", "photo.jpg", "pipe.png", "text.png",
    }  # fmt: skip


def test_standard_output_takes_one_picture(folder: Path) -> None:
    ran = cli("upscale", "photo.png", "--with", "x2.safetensors", "-o", "-", "--quiet")
    assert ran.code == 0 and ran.out.startswith(b"\x89PNG") and not (folder / "photo-2x.png").exists()


@pytest.mark.parametrize(("kind", "rows"), [("esrgan", None), ("esrgan", 32), ("compact", None), ("compact", 32)])
@pytest.mark.sample(0)
def test_memory_is_the_planned_one_on_mlx(folder: Path, kind: str, rows: int | None) -> None:
    """MLX counts the bytes of its arrays; `tools/measure_upscaling.py` measures both backends at larger sizes."""
    from measure_upscaling import measured

    planned, peak = measured("mlx", kind, 48, 96, rows, folder)
    print(f"{kind}, rows {rows}: {peak / 1e6:.1f} MB, planned {planned / 1e6:.1f} MB, {planned / peak:.2f}")
    assert 0.9 < planned / peak < 1.1


def test_a_picture_that_does_not_fit_is_taken_in_bands(folder: Path) -> None:
    from qwenimg import backends

    lines: list[str] = []
    made = []
    for limit in (None, 9_000_000):
        runtime = Runtime(backends.load("cpu"), policy("fp32"), lambda _, text: lines.append(text), max_memory=limit)
        with closing(Upscaling(runtime, open_upscaler(folder / "x4.pth"))) as upscaling:
            made.append(upscaling.enlarged(np.random.default_rng(1).integers(0, 256, (200, 60, 3), dtype=np.uint8), 4))
    assert "in bands of" in lines[-1] and not any("in bands" in line for line in lines[:3]), lines
    apart = np.abs(made[0].astype(int) - made[1])
    print(f"{np.count_nonzero(apart)} of {apart.size} values, by {apart.max()}")
    assert apart.max() <= 1 and np.mean(apart > 0) < 1e-4


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_a_plan_has_the_stages_of_upscaling(folder: Path, backend: str) -> None:
    asked = ("plan", "shapes", "--size", "64x48", "--backend", backend, "--memory", "4GB", "--json")
    plain, larger = cli(*asked).events[0], cli(*asked, "--upscale", "2", "--upscale-with", "x4.pth").events[0]
    *before, last = larger["stages"]
    assert before == plain["stages"] and last["name"] == "upscale"
    engine = backends.load(backend)
    with closing(open_upscaler(folder / "x4.pth")) as upscaler:
        alone = Upscaling(Runtime(engine, policy("fp32"), lambda kind, text: None), upscaler).plan(48, 64, 2).largest
    print(f"{backend}: {last['activation_bytes']:,} bytes beside {last['weights_bytes']:,} of weights")
    assert last["activation_bytes"] == alone.activations
    assert last["weights_bytes"] == before[-1]["weights_bytes"] + alone.weights
    assert larger["peak_bytes"] == max(stage["peak_bytes"] for stage in larger["stages"])
    cli(*asked[:-1], "--upscale", "2", "--upscale-with", "photo.png").refused(5, "photo.png")


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_stop_comes_between_two_passes(folder: Path, backend: str) -> None:
    """`x2` by 4 runs twice; one upscaler at a time is in memory, and its file is looked for once."""
    runtime = Runtime(backends.load(backend), policy("fp32"), lambda kind, text: None)
    small, jobs = pixels(folder / "photo.png"), [_job("x2.safetensors", 4), _job("x4.pth", None), _job(None, None)]
    with closing(JobUpscalers(())) as upscalers_:
        first, second, none = (upscalers_.enlargement(job, runtime) for job in jobs)
        assert first is not None and second is not None and none is None and (first.by, second.by) == (4, 4)
        calls: list[int] = []

        def stops() -> None:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt

        runtime.interrupt = stops
        (folder / "x2.safetensors").unlink()
        first = upscalers_.enlargement(jobs[0], runtime)
        assert first is not None
        with pytest.raises(KeyboardInterrupt):
            first(small, {})
        runtime.interrupt = lambda: None
        second = upscalers_.enlargement(jobs[1], runtime)
        assert second is not None and second(small, {})[0].shape[0] == 4 * small.shape[0]


def _job(name: str | None, by: int | None) -> Job:
    given = {"upscale": by, "upscale_with": name}
    return Job(options={"prompt": "x"} | {key: value for key, value in given.items() if value is not None}, seeds=(0,))


@pytest.mark.sample(0)
def test_each_line_of_a_prompt_file_has_its_own(folder: Path) -> None:
    """By `generate` and by `batch`, whose pictures are drawn again if the factor or the upscaler's content changes."""
    lines = [
        {"prompt": "a red circle"},
        {"prompt": "a red circle", "upscale": 2, "upscale_with": "x2.safetensors"},
        {"prompt": "a red circle", "upscale_with": "x4.pth"},
    ]
    file = folder / "lines.txt"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw = ("-m", "shapes", "--steps", "1", "-s", "1", "--size", "64", "--quiet", "--backend", "cpu")
    ran = cli("--prompt-file", "lines.txt", *draw, "-o", "out/{index}.png")
    assert ran.code == 0, ran.err
    sizes = [pixels(path).shape[0] for path in ran.paths]
    batch = cli("batch", "lines.txt", *draw, "-o", "batch/")
    assert batch.code == 0, batch.err
    assert sizes == [64, 128, 256] and sorted(pixels(path).shape[0] for path in batch.paths) == sizes
    same = {pixels(path).tobytes() for path in ran.paths}
    assert {pixels(path).tobytes() for path in batch.paths} == same, "the same pixels as of generate"
    assert cli("batch", "lines.txt", *draw, "-o", "batch/").paths == [], "nothing is left to draw"
    (folder / "x2.safetensors").unlink()
    as_safetensors(folder / "x2.safetensors", upscalers.srvgg(convs=2, features=8, scale=2))
    assert [pixels(path).shape[0] for path in cli("batch", "lines.txt", *draw, "-o", "batch/").paths] == [128]
    wrong = [*lines[:1], {"prompt": "x", "upscale": 0}, {"prompt": "x", "upscale": 2, "upscale_with": "none.pth"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in wrong))
    ran = cli("--prompt-file", "lines.txt", *draw, "-o", "more/{index}.png", "--keep-going")
    assert ran.code == 7 and len(ran.paths) == 1, ran.err
    assert "lines.txt:2: upscale is 0" in ran.err and "lines.txt:3: none.pth" in ran.err, ran.err
    file.write_text(json.dumps(lines[1]) + "\n")
    cli("--prompt-file", "lines.txt", *draw, "--devices", "2", "-o", "a/").refused(5, "lines.txt:1", "one device")


@pytest.mark.sample(0)
def test_a_picture_that_cannot_be_made_larger_is_kept(folder: Path) -> None:
    """At its own size, with its recipe; a line says so, the exit code is that of the error, and the next is drawn."""
    huge = {name: values * np.float32(1e30) for name, values in upscalers.srvgg(convs=1, features=8, scale=2).items()}
    as_safetensors(folder / "huge.safetensors", huge)
    draw = ("a red circle", "-m", "shapes", "--steps", "1", "--size", "64", "--quiet", "--backend", "cpu")
    ran = cli(*draw, "-s", "1-2", "--upscale", "2", "--upscale-with", "huge.safetensors", "-o", "out/")
    files = sorted((folder / "out").iterdir())
    assert ran.code == 6 and not ran.paths and [pixels(file).shape for file in files] == [(64, 64, 3)] * 2
    lines = [line for line in ran.err.splitlines() if "not made larger" in line]
    assert len(lines) == 2 and all(len(line) <= 320 and "non-finite" in line for line in lines), ran.err
    assert json.loads(read_texts(files[0])["qwenimg"])["seed"] == 1
    out = cli(*draw, "-s", "1", "--upscale", "2", "--upscale-with", "huge.safetensors", "-o", "-")
    assert out.code == 6 and Image.open(io.BytesIO(out.out)).size == (64, 64)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0, rest=0)
def test_memory_with_a_model_is_as_planned(backend: str, folder: Path) -> None:
    """`plan --upscale` beside a model in memory, at a published width, against what the device or process then has."""
    network = as_safetensors(folder / "e.safetensors", upscalers.rrdbnet(1, 64, 32))
    size = ("--size", "192x192", "--steps", "1", "--backend", backend)
    ran = cli("plan", "-m", "shapes", *size, "--upscale", "4", "--upscale-with", str(network), "--json")
    stage = json.loads(ran.out)["stages"][-1]
    code = """
import sys
import numpy as np
import qwenimg
sys.path.insert(0, sys.argv[3])
from measure_upscaling import _now
from pathlib import Path
from qwenimg.common.hub.network_search import read_upscaler, upscaling
backend = sys.argv[1]
pipe = qwenimg.load("shapes", backend)
pixels = pipe("a red circle", width=192, height=192, steps=1, seed=1).pixels
ready = upscaling(read_upscaler(Path(sys.argv[2])), pipe.engine, "fp32", None, lambda kind, text: None)
ready.enlarged(np.zeros((16, 16, 3), np.uint8), 4)
before = _now(backend)
pipe.engine.peak_memory()
pipe.engine.expect(ready.plan(192, 192, 4).largest.activations)
ready.enlarged(pixels, 4)
print(before, pipe.engine.peak_memory())
"""
    tools = str(Path(__file__).parents[2] / "tools")
    command = [sys.executable, "-c", code, backend, str(network), tools]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, peak = map(int, output.split()[-2:])
    measured = (
        peak if backend == "mlx" else peak - before + stage["weights_bytes"]
    )  # a process has more than its weights
    ratio = stage["peak_bytes"] / measured
    print(f"{backend}: planned {stage['peak_bytes'] / 1e6:.0f} MB, measured {measured / 1e6:.0f}, {ratio:.3f} of that")
    assert stage["name"] == "upscale" and abs(ratio - 1) <= 0.1
