"""Plans: the same numbers as the run's, without a framework and a weight; refusals that name what really fits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.published import write_published

import qwenimg
from qwenimg import backends
from qwenimg.cli.main import run
from qwenimg.common.base.amounts import parse_bytes
from qwenimg.common.base.errors import DoesNotFit, UsageError
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.families import registry
from qwenimg.common.families.catalog import KNOWN
from qwenimg.common.memory.estimate import TO_CARD
from qwenimg.common.precision.machines import MACHINES, machine, of_device
from qwenimg.common.runtime import rates

STAGES = ["text", "modulation", "denoise", "decode"]
pytestmark = pytest.mark.usefixtures("no_other_models")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("published") / "Qwen-Image")


Planned = Callable[..., Any]


@pytest.fixture
def planned(capfd: pytest.CaptureFixture[str]) -> Planned:
    """What `plan --json` prints of these arguments."""

    def call(*arguments: object) -> Any:
        code = run(["plan", *map(str, arguments), "--json"])
        out, err = capfd.readouterr()
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    return call


@pytest.mark.parametrize(
    ("machine", "loaded"), [("--on m4-max --memory 48GB", []), ("--backend cpu --memory 24GB", ["torch"])]
)
@pytest.mark.sample(0)
def test_no_framework_is_imported_but_to_measure_a_cpu(published: Path, machine: str, loaded: list[str]) -> None:
    script = "import sys; from qwenimg.cli.main import run; code = run(sys.argv[1:]); "
    script += "print(code, sorted({'torch', 'mlx.core'} & set(sys.modules)), file=sys.stderr)"
    command = [sys.executable, "-c", script, "plan", str(published), *machine.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr.splitlines()[-1] == f"0 {loaded}", done.stderr


def test_the_published_model_on_a_card(published: Path, planned: Planned) -> None:
    """The figures of docs/measured/weights.md: 27 GB of transformer in bfloat16, 15 GB in 8 bits."""
    found = planned(published, "--backend", "cuda", "--memory", "24GB", "--size", "1024x1024")
    sizes = {stage["name"]: round(stage["weights_bytes"] / 1e9, 1) for stage in found["stages"]}
    ways = {way["options"]: (round(way["peak_bytes"] / 1e9, 1), way["fits"]) for way in found["ways"]}
    print(sizes, ways, f"{found['step_operations']:.3g}")
    assert list(sizes) == STAGES and not found["fits"] and found["memory_bytes"] == 24 * 10**9
    assert found["peak_bytes"] == max(stage["peak_bytes"] for stage in found["stages"])
    for stage in found["stages"]:
        assert stage["peak_bytes"] == stage["weights_bytes"] + stage["activation_bytes"]
    assert 27.2 < sizes["denoise"] < 28.5 and 14 < sizes["text"] < 18
    assert ways["-q 8"][1] and 14.5 < ways["-q 8"][0] < 18 and ways["-q 8"][0] > ways["-q 6"][0] > ways["-q 4"][0]
    # two passes over 4096 tokens of the picture and 512 of the text (docs/measured/performance.md): 2 x 76 TFLOP
    assert 1.4e14 < found["step_operations"] < 1.6e14


def test_a_large_machine_takes_it_as_it_is(published: Path, planned: Planned) -> None:
    found = planned(published, "--backend", "cuda", "--memory", "80GB", "-p", "a red circle")
    assert found["fits"] and 28e9 < found["peak_bytes"] < 40e9


@pytest.mark.parametrize("memory", [26, 16, 10])
@pytest.mark.sample(0)
def test_a_refusal_names_what_fits(
    published: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    """Each way that it names is planned again, by the command's own words; the next larger one does not fit."""
    read: list[str] = []
    pipe = qwenimg.load(published, backend="cpu", precision="bf16")
    monkeypatch.setattr(pipe.engine, "free_memory", lambda: memory * 10**9)
    monkeypatch.setattr(OpenFile, "fill", lambda self, view, begin: read.append(self.path.name))
    asked = {"width": 1328, "height": 1328, "steps": 2}
    with pytest.raises(DoesNotFit) as caught:
        pipe("a red circle", **asked)
    pipe.close()
    print(caught.value)
    ways = re.findall(r"(-[^()]*?) \(", str(caught.value).split("; ")[-1])
    fewer = next(way for way in ways if "-q" in way)
    assert caught.value.exit_code == 4 and not read and "\n" not in str(caught.value)
    assert len(ways) == 2 and all(ways)
    common = ["--backend", "cpu", "--precision", "bf16", "--memory", f"{memory}GB", "-p", "a red circle", "--steps", 2]
    for way in ways:
        more = way.split() if "--size" in way else [*way.split(), "--size", "1328x1328"]
        assert planned(published, *common, *more)["fits"], way
    if (bits := re.match(r"-q (\d)", fewer)) and bits[1] != "8":
        larger = str(int(bits[1]) + 2)
        assert not planned(published, *common, "-q", larger, "--size", "1328x1328")["fits"]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("kind", ["qwen", "sd15", "sdxl"])
@pytest.mark.sample(1)
def test_a_plan_has_the_numbers_of_the_run(
    tiny_folder: Path, folders: dict[str, Path], planned: Planned, backend: str, kind: str
) -> None:
    folder = tiny_folder if kind == "qwen" else folders[kind]
    pipe = qwenimg.load(folder, backend=backend, precision="fp32")
    expected = pipe.estimate("a red circle", width=512, height=256, steps=3).memory
    pipe.close()
    options = ["--precision", "fp32", "--size", "512x256", "--steps", 3, "-p", "a red circle"]
    found = planned(folder, "--backend", backend, *options)
    print(f"{kind} on {backend}: {found['peak_bytes']:,} bytes")
    assert found["peak_bytes"] == expected > 0
    assert [s["name"] for s in found["stages"]] == [s for s in STAGES if kind == "qwen" or s != "modulation"]


def test_the_text_of_a_plan_and_what_is_refused(published: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(published), "--backend", "cuda", "--memory", "24GB"]) == 0
    text = capfd.readouterr().out
    print(text)
    assert re.search(r"^decode +\S+ \S+ +\S+ \S+ +\S+ \S+( +in bands of .*)?$", text, re.MULTILINE)
    assert re.search(r"^as it is +\S+ GB  does not fit$", text, re.MULTILINE)
    assert re.search(r"^with -q 4 +\S+ GB  fits$", text, re.MULTILINE) and "name one with --on" in text
    for arguments, code in (
        ((published, "--memory", "much"), 2),
        ((published, "-m", "shapes"), 2),
        ((published, "--prompt-file", "x"), 2),
        ((published / "missing",), 5),
    ):
        assert run(["plan", *map(str, arguments)]) == code
        assert capfd.readouterr().err.count("\n") == 1


def test_amounts() -> None:
    assert [parse_bytes(text, "--memory") for text in ("24GB", "1.5 gib", "800m", "3kb")] == [
        24 * 10**9, 3 * 2**29, 8 * 10**8, 3000,
    ]  # fmt: skip
    for text in ("", "24", "0GB", "-1GB", "1e9GB", "9" * 40 + "GB", "GB"):
        with pytest.raises(UsageError, match="--memory"):
            parse_bytes(text, "--memory")


def test_the_machine_of_a_device() -> None:
    """By the names that drivers give. The longest name counts: a 4070 Ti SUPER is no 4070."""
    names = {
        "NVIDIA H100 80GB HBM3": "h100", "Apple M4 Max": "m4-max", "NVIDIA GeForce RTX 4090": "4090",
        "NVIDIA GeForce RTX 4070 Ti SUPER": "4070-ti-super", "NVIDIA GeForce RTX 4070": "4070", "Apple M4": "m4",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA L40S": "l40s", "NVIDIA RTX 6000 Ada Generation": "6000-ada",
        "NVIDIA GeForce RTX 5060 Ti": "5060-ti", "Apple M3 Ultra": "m3-ultra", "NVIDIA RTX A6000": "a6000",
    }  # fmt: skip
    for device, name in names.items():
        assert getattr(of_device(device), "name", None) == name, device
    for device in ("CPU (torch)", "NVIDIA GeForce RTX 4070 Laptop GPU", "NVIDIA GeForce GTX 1060", "Apple M9"):
        assert of_device(device) is None, device
    for one in MACHINES.values():
        assert of_device(one.title) is one, "every row is found by its title"
    assert machine("RTX 4070 Ti Super") is machine("nvidia-geforce-rtx-4070-ti-super") is MACHINES["4070-ti-super"]
    assert machine("Apple M4_Max") is MACHINES["m4-max"]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("kind", ["qwen", "sd15"])
@pytest.mark.sample(0)
def test_a_prompt_that_is_on_the_disk_has_no_stage(
    tiny_folder: Path,
    folders: dict[str, Path],
    planned: Planned,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    kind: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tiny_folder if kind == "qwen" else folders[kind]
    options = ["-m", folder, "--backend", backend, "--precision", "fp32", "--size", "64x64", "--steps", 1]
    drawn = [*options, "-p", "a red circle", "--cache-prompts", "-o", tmp_path / "x.png"]

    def stages(*more: object) -> list[str]:
        return [stage["name"] for stage in planned(*options, *more)["stages"]]

    assert "text" in stages("-p", "a red circle", "--cache-prompts")
    assert run([*map(str, drawn)]) == 0
    assert "text" not in stages("-p", "a red circle", "--cache-prompts")
    assert "text" not in stages("-p", "a red circle", "--cache-prompts", "--max-memory", "1GB")
    for others in (["-p", "a red circle"], ["-p", "a blue circle", "--cache-prompts"], ["--cache-prompts"]):
        assert "text" in stages(*others)
    assert "text" in stages("-p", "a red circle", "--cache-prompts", "--precision", "bf16")  # other states


@pytest.mark.sample(0)
def test_other_programs_hardly_change_the_rate_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside two busy loops for each core; wall time would be three times as long, or thirty."""
    monkeypatch.setattr(rates, "SECONDS", 0.1)
    engine = backends.load("cpu")
    alone = rates.measure(engine, "matmul", "float32")
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        beside = [rates.measure(engine, "matmul", "float32") for _ in range(5)]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    print(f"alone {alone:.3g}", *(f"{rate:.3g}" for rate in beside))
    assert all(alone / 2.5 < rate < alone * 2.5 for rate in beside)


@pytest.mark.sample(0)
def test_a_machine_that_is_named_has_its_published_rate(
    published: Path, planned: Planned, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, backend in (("4090", "cuda"), ("m4-max", "mlx")):
        found = planned(published, "--on", name, "--memory", "24GB", "--size", "1024x1024")
        named = MACHINES[name]
        expected = found["step_operations"] / named.peak("bfloat16") / named.products
        assert found["backend"] == backend and found["device"] == named.title
        assert found["step_seconds"] == pytest.approx(expected)
    for arguments, said in (
        (["--on", "1060", "--memory", "24GB"], "--on '1060' is not known; qwenimg plan --on list lists all names"),
        (["--on", "4060 Ti"], "NVIDIA RTX 4060 Ti comes with 8 or 16 GB; say which with --memory, such as 16GB"),
        (["--on", "4090", "--backend", "mlx", "--memory", "24GB"], "is a device of --backend cuda"),
    ):
        assert run(["plan", str(published), *arguments]) == 2
        assert said in capfd.readouterr().err


@pytest.mark.sample(0)
def test_streaming_takes_the_time_of_reading_where_that_is_longer(published: Path, planned: Planned) -> None:
    """A small picture on a card: 19 GB of blocks by 31.5 GB a second, and operations of a tenth of that."""
    found = planned(published, "--on", "h100", "--memory", "10GB", "--size", "512x512")
    way = next(way for way in found["ways"] if "--max-memory" in way["options"])
    assert way["step_streamed_bytes"] > 15e9 and found["step_streamed_bytes"] == 0
    assert way["step_seconds"] == pytest.approx(way["step_streamed_bytes"] / TO_CARD)
    assert way["step_seconds"] > 3 * found["step_seconds"]


def written(name: str, folder: Path, qwen: Path) -> Path:
    """The folder of a known model at its published size; Qwen-Image's is written once."""
    if name == "qwen-image":
        return qwen
    return write_published(folder, name)


@pytest.mark.parametrize("options", ["--backend cuda --memory 24GB", "--backend cpu --memory 14GB -q 8"])
@pytest.mark.parametrize(
    "name",
    [
        "qwen-image",
        "sd15",
        "sdxl",
        "sdxl-turbo",
        "z-image-turbo",
        "z-image",
        "flux2-klein-4b",
        "flux2-klein-9b",
        "flux-schnell",
        "flux-dev",
        "sd3.5-medium",
    ],
)
@pytest.mark.sample(1)
def test_a_known_model_is_planned_before_it_is_here(
    published: Path,
    planned: Planned,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    options: str,
) -> None:
    """With the numbers of its files, whose sizes, steps and guidance are those of the name."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    known = KNOWN[name]
    folder = written(name, tmp_path / "model", published)
    asked = ["--size", f"{known.width}x{known.height}", "--steps", known.steps, "--guidance", known.guidance]
    by_name, by_files = planned(name, *options.split()), planned(folder, *options.split(), *asked)
    assert not by_name.pop("here") and by_files.pop("here")
    assert by_name.pop("model") == name and by_files.pop("model") != name
    for row in (*by_name["ways"], *by_files["ways"], by_name, by_files):
        row.pop("step_seconds"), row.pop("picture_seconds")  # measured on a CPU
    for made in (by_name, by_files):  # the number of steps is given for one of them
        made.pop("few_steps"), made.pop("others")
    assert by_name == by_files
    assert run(["plan", name, *options.split(), "-p", "a red circle"]) == 0
    text = capfd.readouterr().out
    assert f"{name} is not here: planned from its published configuration, for the longest prompt" in text


def test_what_is_known_of_published_models() -> None:
    """Their files as large as the catalogue has them; what is no whole of a known model is still asked for."""
    names = ("sd15", "sdxl", "sdxl-turbo", "z-image-turbo", "z-image", "flux-schnell", "flux-dev")
    for name in (*names, "sd3-medium", "sd3.5-medium", "sd3.5-large", "sd3.5-large-turbo"):
        model = registry.published(KNOWN[name])
        assert model is not None
        size = sum(part.plan.nbytes for part in model.checkpoint.components.values())
        print(f"{name}: {size:,} bytes of {KNOWN[name].bytes:,}")
        assert abs(size / KNOWN[name].bytes - 1) < 0.012  # files of Z-Image have a layer of text that no plan has
    assert registry.published(KNOWN["sdxl-refiner"]) is None


def test_a_part_elsewhere_needs_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    assert run(["plan", "qwen-image", "--vae", str(published / "vae"), "--memory", "24GB"]) == 5
    assert run(["plan", "sdxl-refiner", "--memory", "24GB"]) == 5
