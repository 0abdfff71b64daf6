"""What machines can draw: the memory that a program may have there, the known models, and the time of a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import write_operations
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.cli_runner import cli

import qwenimg
from qwenimg import backends
from qwenimg.backends.paper import for_hints, on_paper
from qwenimg.backends.torch.ops import cpu
from qwenimg.common.base.config import data_folder
from qwenimg.common.families.catalog import KNOWN
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub import forecast
from qwenimg.common.hub.open_model import plan_pipeline
from qwenimg.common.memory import share
from qwenimg.common.memory.estimate import TO_CARD, streaming_rate
from qwenimg.common.pipeline.fit_options import plan_memory
from qwenimg.common.precision.machines import MACHINES, machine
from qwenimg.common.runtime import rates
from qwenimg.common.runtime.runtime import Change

MIB = 2**20
PUBLISHED = json.loads((Path(__file__).parents[2] / "docs" / "results" / "published-times.json").read_text())
OFF = 1.5  # the most that a plan may differ from a time that others published, either way
# What Metal recommends as its working set, by the GiB of a Mac, as users of such Macs report it.
REPORTED = {16: 10922.67, 32: 21845.34, 64: 49152.00, 96: 73728.00}
Planned = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))


def told(*words: object) -> str:
    ran = cli(*map(str, words))
    assert ran.code == 0, ran.err
    print(ran.out.decode())
    return ran.out.decode()


def planned(*words: object) -> Any:
    return json.loads(told("plan", *words, "--json"))


@pytest.mark.parametrize("memory", REPORTED)
def test_a_mac_has_what_metal_recommends(memory: int) -> None:
    assert share.of_mac(memory * share.GIB) / MIB == pytest.approx(REPORTED[memory], abs=0.7)


def test_gigabytes_on_a_box_are_binary() -> None:
    assert share.on_the_box(24 * 10**9) == 24 * share.GIB == share.on_the_box(24 * share.GIB)


@pytest.mark.sample(0)
def test_a_mac_of_32_gb_does_not_hold_the_whole_model() -> None:
    """Its weights and a step take 28.6 GB, and its GPU may have 22.9."""
    found = planned("qwen-image", "--on", "m2-pro", "--memory", "32GB")
    print(f"{found['peak_bytes']:,} of {found['memory_bytes']:,} bytes")
    assert found["memory_bytes"] == pytest.approx(REPORTED[32] * MIB, abs=MIB) and not found["fits"]
    text = told("plan", "qwen-image", "--on", "m2-pro", "--memory", "32GB")
    assert re.search(r"^of 32 GiB \(34.4 GB\) the GPU may have 22\.9 GB +peak", text, re.MULTILINE)
    assert planned("qwen-image", "--on", "m4-max", "--memory", "48GB")["fits"]


def test_a_card_that_is_named_has_its_memory() -> None:
    found = planned("sdxl", "--on", "rtx 3060")
    assert found["device"] == "NVIDIA RTX 3060" and found["memory_bytes"] == 11 * share.GIB
    assert "of 12 GiB (12.9 GB) a program may have 11.8 GB" in told("plan", "sdxl", "--on", "3060")


def test_the_list_of_machines() -> None:
    lines = told("plan", "--on", "list").splitlines()
    assert len(lines) == len(MACHINES) + 1
    assert any(re.fullmatch(r"4060-ti +NVIDIA RTX 4060 Ti +8, 16 +44\.1", line) for line in lines)


def test_the_time_of_a_picture() -> None:
    """Its steps, and the operations of decoding at the same rate."""
    found = planned("sdxl", "--on", "4090")
    machine = MACHINES["4090"]
    rate = machine.peak("float16") * machine.products
    decoding = found["picture_seconds"] - 50 * found["step_seconds"]
    print(f"{found['step_seconds']:.3f} s a step, {found['picture_seconds']:.1f} s a picture, decoding {decoding:.2f}")
    # a VAE of SDXL takes some 2.5e12 multiplications to decode 1024x1024, as others count them
    assert 4e12 < decoding * rate < 12e12


@pytest.mark.sample(0)
def test_distilled_models_have_rows() -> None:
    """Of 4 and 8 steps with one branch each, in as many bits as fit."""
    found = planned("qwen-image", "--on", "3060")
    rows = {row["options"]: row for row in found["few_steps"]}
    assert [*rows] == ["--few-steps lightning:8 -q 4", "--few-steps lightning:4 -q 4"]
    for row in rows.values():
        assert row["fits"] and row["step_operations"] == pytest.approx(found["step_operations"] / 2)
    again = planned("qwen-image", "--on", "3060", "--few-steps", "lightning:8", "-q", 4)
    assert again["peak_bytes"] + forecast.LORA_BYTES == rows["--few-steps lightning:8 -q 4"]["peak_bytes"], (
        "it is not here"
    )
    assert planned("qwen-image", "--on", "h100")["few_steps"][0]["options"] == "--few-steps lightning:8"
    assert planned("qwen-image", "--on", "h100", "--steps", 20)["few_steps"] == []
    assert planned("shapes", "--on", "h100")["few_steps"] == [], "the LoRA is not made for it"


@pytest.mark.parametrize("machine", ["3060", "m4 --memory 16GB", "h100"])
@pytest.mark.sample(0)
def test_all_models_of_a_machine(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's options, planned again, take what the row says; what fits comes first."""
    found = planned("--on", *machine.split())["models"]
    assert {row["model"] for row in found} == KNOWN.keys() - {"sdxl-refiner"}
    assert [row["fits"] for row in found] == sorted((row["fits"] for row in found), reverse=True)
    monkeypatch.setattr(
        forecast, "forecast_all", lambda engine, below: []
    )  # the other models, for each that takes long
    for row in found:
        again = planned(row["model"], "--on", *machine.split(), *row["options"].split())
        beside = forecast.LORA_BYTES if "--few-steps" in row["options"] and "-q" in row["options"] else 0
        assert (again["peak_bytes"] + beside, again["fits"]) == (row["peak_bytes"], row["fits"]), row
        assert again["picture_seconds"] == pytest.approx(row["picture_seconds"])


@pytest.mark.sample(0)
def test_all_models_as_text() -> None:
    text = told("plan", "--on", "m1", "--memory", "8GB")
    assert text.startswith("mlx on Apple M1: of 8 GiB (8.6 GB) the GPU may have 5.7 GB\n")
    assert re.search(r"qwenimg PROMPT -m sd15$", text, re.MULTILINE)
    assert "measured on no such machine" in text


@pytest.mark.sample(0)
def test_smaller_models_are_named_where_one_does_not_fit_or_takes_long() -> None:
    slow = planned("qwen-image", "--on", "m4", "--memory", "16GB", "--steps", 50)
    least = min(row["picture_seconds"] for row in (slow, *slow["ways"]) if row["fits"])
    assert [one["model"] for one in slow["others"]] == ["z-image-turbo", "flux-schnell"] and least > 600
    assert all(one["fits"] and one["picture_seconds"] < least / 2 for one in slow["others"])
    text = told("plan", "qwen-image", "--on", "m4", "--memory", "16GB", "--steps", 50)
    others = r"^other models that fit: z-image-turbo \(.*\) or flux-schnell \(.*\); all of them: qwenimg plan$"
    assert re.search(others, text, re.M)
    assert planned("sdxl", "--on", "h100")["others"] == []


def test_plan_and_run_expect_the_same_of_a_cpu_without_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers widen to float32 there, and so does the layer by which both estimate: the rate is about float32's."""
    monkeypatch.setattr(cpu, "_multiplies", lambda dtype, device: dtype == torch.float32)
    engine = backends.load("cpu")
    found = {dtype: rates.measure(engine, "matmul", dtype) for dtype in ("float32", "float16")}
    print(found)
    assert 0.2 < found["float16"] / found["float32"] < 2


@pytest.mark.sample(0)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_plan_doctor_and_run_have_one_rate_of_a_dtype(
    backend: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"float32": 1e9, "bfloat16": 3e9, "float16": 0.5e9}
    monkeypatch.setattr(
        rates, "measure", lambda engine, layer, dtype, small: speeds[dtype] / (2 if layer == "conv2d" else 1)
    )
    planned_now = planned("shapes", "-p", "a picture", "--backend", backend, "--precision", precision)
    with closing(qwenimg.load("shapes", backend, precision)) as pipe:
        expected = pipe.estimate("a picture")
    print(planned_now["step_seconds"], expected.step)
    assert planned_now["step_seconds"] == pytest.approx(expected.step, rel=0.02)
    assert planned_now["picture_seconds"] == pytest.approx(expected.seconds, rel=0.02)
    report = json.loads(told("doctor", "--backend", backend, "--json"))
    row = next(row for row in report["models"] if row["model"] == "shapes-v1")
    auto = planned("shapes", "--backend", backend)
    assert row["picture_seconds"] == pytest.approx(auto["picture_seconds"], rel=0.02)


@pytest.mark.sample(0)
def test_doctor_ends_with_what_fits() -> None:
    text = told("doctor", "qwen-image", "--backend", "cpu")
    assert "--preset auto, qwen-image: " in text
    assert re.search(r"^shapes-v1 .* fits .*qwenimg PROMPT -m shapes-v1$", text, re.MULTILINE)
    found = json.loads(told("doctor", "--backend", "cpu", "--json"))
    assert {row["model"] for row in found["models"]} == KNOWN.keys() - {"sdxl-refiner"}


@pytest.mark.sample(0)
def test_policies_of_a_model_that_was_not_pulled() -> None:
    text = told("precision", "sdxl", "--backend", "cpu")
    assert text.startswith("sdxl is not here") and text.endswith("to measure it: qwenimg pull sdxl\n")
    assert len(re.findall(r"^(fp32|bf16|fp16)\S*( \(auto\))? +\S+ GB", text, re.MULTILINE)) == 6
    assert cli("precision", "sdxl", "--json", "x.json").code == 5, "figures to write need the files"


@pytest.mark.sample(0)
def test_the_order_of_models() -> None:
    names = [one.model.name for one in forecast.forecast_all(paper("h100"))]
    assert names.index("qwen-image") < names.index("sdxl") < names.index("sdxl-turbo") < names.index("sd15")
    assert names[-1] == "shapes-v1"


@pytest.mark.parametrize(
    ("machine", "memory"), [("m4", "16GB"), ("4060-ti", "16GB"), ("3070", "8GB"), ("m4-pro", "48GB")]
)
@pytest.mark.sample(0)
def test_the_model_to_pull_first_leads(machine: str, memory: str) -> None:
    best = json.loads(told("plan", "--on", machine, "--memory", memory, "--json"))["models"][0]
    assert best["model"] == "z-image-turbo" and best["fits"]


def paper(name: str) -> Any:
    from qwenimg.backends.paper import on_paper

    return on_paper("auto", None, MACHINES[name])


def test_the_row_of_a_converted_model_is_that_of_its_folder(tmp_path: Path) -> None:
    """Planned as `qwenimg convert -q 8` would write it, and as it has written it."""
    folder, engine = tmp_path / "eight", on_paper("cuda", None, machine("3060", "--on"))
    assert cli("convert", "shapes", str(folder), "-q", "8").code == 0
    streamed = set()
    for limit in (8_000_000, 3_500_000, 1):
        ours, theirs = (
            plan_pipeline(LoadOptions(model=name, precision="bf16", max_memory=most), engine)[0]
            for name, most in (("shapes", None), (str(folder), limit))
        )
        model = ours.model.variant(Change(quantize="8", converted=True, max_memory=limit))
        request = ours.check("a red circle", width=64, height=64)
        found, expected = (plan_memory(one, request) for one in (model, theirs.model))
        print(limit, found.largest.peak, expected.largest.peak, found.streamed, expected.streamed)
        # Norms are written in 16 bit: 1 kB of 6.8 MB.
        assert found.largest.peak == pytest.approx(expected.largest.peak, rel=1e-3)
        assert found.streamed == pytest.approx(expected.streamed, rel=1e-3)
        streamed.add(found.streamed > 0)
        ours.close()
        theirs.close()
    assert streamed == {False, True}


def test_a_card_of_eight_lanes_reads_at_half_the_rate() -> None:
    halves = {"4060": 1, "4060-ti": 1, "4070": 2, "2080-ti": 1, "5090": 2}
    for name, expected in halves.items():
        engine = on_paper("auto", 8 * 2**30, machine(name))
        assert streaming_rate(engine.facts) == expected * TO_CARD / 2, name


@pytest.mark.sample(5)
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["plan"].replace(" ", "_"))
def test_a_plan_is_near_what_others_measured(row: dict[str, Any]) -> None:
    """Pictures on machines that this project has not, by programs that compute the same products."""
    found = planned(*row["plan"].split())["picture_seconds"]
    ratio = found / row["seconds"]
    print(f"{row['plan']}: planned {found:.1f} s, published {row['seconds']} s ({row['source']}): {ratio:.2f}")
    assert 1 / OFF <= ratio <= OFF


@pytest.mark.sample(0)
def test_fewer_bits_are_not_faster_on_old_macs() -> None:
    """So 16 bit come first where they fit, and the rows say what fewer bits cost."""
    for chip, most in (("m1-max", 1.3), ("m2-pro", 1.3), ("m4-max", 1.001)):
        sixteen, four = (
            planned("flux2-klein-4b", "--on", chip, "--memory", "32GB" if chip != "m4-max" else "36GB", *bits)
            for bits in ([], ["-q", 4])
        )
        assert 1 <= four["step_seconds"] / sixteen["step_seconds"] < most, chip
        assert (four["step_seconds"] > 1.2 * sixteen["step_seconds"]) == chip.startswith(("m1", "m2"))
    best = next(
        row for row in planned("--on", "m2-pro", "--memory", "32GB")["models"] if row["model"] == "z-image-turbo"
    )
    assert best["options"] == "", "16 bit fit"


# The first row


@pytest.mark.parametrize("free", [2e8, 3.5e9, 24e9])
@pytest.mark.parametrize("rate", [5e9, 1e11, 1e12])
@pytest.mark.sample(0)
def test_the_first_row_is_found_without_the_others(free: float, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replace(on_paper("cpu", int(free)), rate=lambda layer, dtype, small: rate)
    rows = [one for one in forecast.forecast_all(engine) if one.model.repo is not None]
    expected = next((one for one in rows if one.fits), None)
    least = min(rows, key=lambda one: one.peak)
    print("takes least", least.model.name, least.peak)
    opened: list[str] = []
    of_model = forecast.of_model
    monkeypatch.setattr(forecast, "of_model", lambda known, on: opened.append(known.name) or of_model(known, on))  # type: ignore[func-returns-value]
    found = forecast.first(engine)
    print(found and (found.model.name, found.options), opened)
    assert found == expected and len(opened) <= 4
    assert expected or opened[1:] == [least.model.name], "where nothing fits, no other model is opened"


def test_a_hint_where_nothing_fits_says_so() -> None:
    """It began with "the smallest: qwenimg pull sd15", as if that drew here."""
    text = forecast.hint(on_paper("cpu", int(2e8)))
    assert text == "none fits here; the smallest: qwenimg pull sd15 (4.3 GB); what each takes: qwenimg plan"


@pytest.mark.sample(0)
def test_the_operations_of_a_first_row_are_those_of_its_model() -> None:
    written = json.loads(data_folder(forecast.OPERATIONS).read_text())
    assert written == write_operations.counted(), "run python tools/write_operations.py"


@pytest.mark.sample(0)
def test_ten_rows_and_all_of_them() -> None:
    every = json.loads(told("plan", "--on", "3060", "--json"))["models"]
    rows = re.findall(r"^.* qwenimg PROMPT -m (\S+).*$", told("plan", "--on", "3060"), re.MULTILINE)
    assert rows == [row["model"] for row in every[: forecast.ROWS]] and len(rows) == 10
    assert f"\n{len(every) - 10} more: --all lists them\n" in told("plan", "--on", "3060")
    whole = told("plan", "--on", "3060", "--all")
    assert whole.count("qwenimg PROMPT -m ") == len(every) > 25 and "more:" not in whole


def test_a_model_that_is_not_here_is_answered_with_the_first_row() -> None:
    first = forecast.first(for_hints("auto"))
    assert first is not None
    other = "sdxl" if first.model.name == "sd15" else "sd15"
    ran = cli("-m", other, "x")
    assert f"the best for this machine: {first.model.name} (" in ran.err
    ran.refused(5, f"qwenimg pull {other}")
    assert "the best" not in cli("-m", first.model.name, "x").err
    assert first.model.name in cli("a lighthouse").err and "all that fit: qwenimg plan" in cli("a lighthouse").err


@pytest.mark.sample(0)
def test_a_broken_copy_does_not_hide_the_forecast(tmp_path: Path) -> None:
    place = tmp_path / "empty" / "models--Qwen--Qwen-Image" / "snapshots" / ("0" * 40) / "transformer"
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"a": 1}')
    (place.parent / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    assert "qwen-image" in told("plan", "--on", "3060", "--all")
    assert "qwen-image" in told("models")


@pytest.mark.sample(0)
def test_a_plan_of_a_recipe_is_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the model is not here; -m comes first."""
    monkeypatch.chdir(tmp_path)
    texts = "a cat\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 640x512, Model: "
    for name, model in (("known.png", "sd_xl_base_1.0"), ("strange.png", "strange")):
        info = PngInfo()
        info.add_text("parameters", texts + model)
        Image.new("RGB", (640, 512)).save(name, pnginfo=info)
    found = planned("--from", "known.png", "--on", "4090")
    same = planned("sdxl", "--steps", "20", "--sampler", "euler_a", "--size", "640x512", "--on", "4090")
    assert (found["model"], found["size"]) == ("sdxl", [640, 512]) and found["here"] is False
    assert found["picture_seconds"] == pytest.approx(same["picture_seconds"])
    assert planned("--from", "strange.png", "-m", "sd15", "--on", "4090")["model"] == "sd15"
    cli("plan", "--from", "strange.png").refused(5, "calls its model 'strange', which is no name here; say with -m")
    ran = cli(
        "a red circle", "-m", "shapes", "--backend", "cpu", "--steps", "1", "--size", "64", "-q", "8", "-o", "q.png"
    )
    assert ran.code == 0, ran.err
    assert "fp32" in told("plan", "--from", "q.png", "--backend", "cpu").splitlines()[0]
    Path("shapes-v1").mkdir()  # a folder of that name is not what the recipe means
    assert "shapes-v1" in told("plan", "--from", "q.png", "--backend", "cpu").splitlines()[0]
