"""Every value of a passport replaced by every wrong kind: exit 5 in one line or a verdict, and no path is opened."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import Ran, cli
from support.lora_cases import write_lora
from support.passport_mutants import Mutant, Original, cut, places
from support.refusals import refused

import qwenimg
from qwenimg import ModelError, Pipeline
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import MAX_GAIN

BLOCKS = ("transformer.time_text_embed", "vae.quant_conv")  # the first and the last: others would not be changed
VERDICTS = (0, 5, 6)
GIVE_THE_SAME = "model.parts"  # exit 2: what was recorded is to be given again


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A passport of the built-in model: drawn arrays, kept ones, a dtype, nothing and lists of them as arguments."""
    path = tmp_path_factory.mktemp("mutants") / "whole.safetensors"
    options = ("--backend", "cpu", "--precision", "bf16", "--sampled", "--steps", "1", "--size", "32x32")
    assert cli("parity", "record", *options, "-o", str(path)).code == 0
    passport_file.write(path, cut(passport_file.read(path), BLOCKS), overwrite=True)
    return Original(path)


@pytest.fixture(params=["cpu", "mlx"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def check(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ran]]:
    """Checks a passport on the backend, with one pipeline for all that ask for the same."""
    opens = qwenimg.open_pipeline
    opened: dict[str, Pipeline] = {}

    def shared(opening: LoadOptions) -> Any:
        key = repr(opening)
        if key not in opened:
            opened[key] = opens(opening)
        return contextlib.nullcontext(opened[key])

    monkeypatch.setattr(qwenimg, "open_pipeline", shared)
    monkeypatch.setattr("qwenimg.cli.commands.parity.closing", lambda shared: shared)
    yield lambda path, *options: cli("parity", "check", str(path), "--backend", backend, *options)
    for pipe in opened.values():
        pipe.close()


@pytest.fixture(scope="module")
def accepted(original: Original, tmp_path_factory: pytest.TempPathFactory) -> list[Mutant]:
    """The mutants that are read; every other one is refused in one line."""
    path, refusals, found = tmp_path_factory.mktemp("refused") / "mutant.safetensors", 0, []
    for mutant in original.mutants():
        try:
            passport_file.read(original.write(path, mutant.text))
        except ModelError as error:
            refusals += 1
            text = str(error)
            assert text.isprintable() and len(text) <= 300 and "mutant.safetensors" in text, (mutant.place, text)
        else:
            found.append(mutant)
    print(f"{refusals} refused, {len(found)} read")
    assert refusals > 1000 and refusals > 5 * len(found) > 0
    return found


@pytest.mark.sample(0, rest=1)
def test_every_mutant_that_is_read_is_judged(
    original: Original, accepted: list[Mutant], check: Callable[..., Ran], backend: str, tmp_path: Path
) -> None:
    codes: Counter[int] = Counter()
    for mutant in accepted[backend == "mlx" :: 2]:  # each on one of both: the verdict is made by neither
        path = original.write(tmp_path / "mutant.safetensors", mutant.text)
        whole = mutant.place.startswith(("picture", "model", "precision"))
        ran = check(path, *(() if whole else ("--blocks",)))
        codes[ran.code] += 1
        right = ran.code in VERDICTS or (ran.code == 2 and mutant.place.startswith(GIVE_THE_SAME))
        assert right, (mutant.place, ran.code, ran.err, mutant.text)
        assert "Traceback" not in ran.err and "Warning" not in ran.err, (mutant.place, ran.err)
    print(dict(codes))
    assert codes[0] and codes[5] and codes[6]


@pytest.mark.sample(0)
def test_every_mutant_that_is_read_is_drawn_in_a_report(
    original: Original, accepted: list[Mutant], tmp_path: Path
) -> None:
    for mutant in accepted:
        if mutant.place.startswith(("version", "created", "model.name", "sides", "places")):
            path = original.write(tmp_path / "mutant.safetensors", mutant.text)
            ran = cli("parity", "report", str(path), "--overwrite")
            assert ran.code == 0 and not ran.err, (mutant.place, ran)


# Faults by name

Change = Callable[[dict[str, Any]], object]
FAULTS: dict[str, tuple[Change, str]] = {
    "an argument that is a text": (lambda d: d["blocks"][0].update(arguments=["x"]), "an argument is"),
    "a result's dtype": (lambda d: d["blocks"][0]["results"][0].update(dtype="float128"), "float128"),
    "a result's seed": (lambda d: d["blocks"][0]["results"][0].update(seed="x"), "blocks[0].results[0].seed is 'x'"),
    "a seed of many bits": (lambda d: d["blocks"][0]["results"][0].update(seed=2**32), "results[0].seed"),
    "a gain that is large": (lambda d: d["blocks"][0]["results"][0].update(gain=2 * MAX_GAIN), "results[0].gain"),
    "a gain below one": (lambda d: d["blocks"][0]["results"][0].update(gain=0.5), "results[0].gain"),
    "an axis too large": (lambda d: d["blocks"][0]["arguments"][0]["drawn"].update(axis=5), "axis 5"),
    "a channel that is not there": (
        lambda d: d["blocks"][0]["arguments"][0]["drawn"].update(channels=[[10**6, 0.0, 1.0]]),
        "a channel is not in axis",
    ),
    "one figure too many": (lambda d: d["sides"][0]["figures"][0].append(d["sides"][0]["figures"][0][0]), "2 figures"),
    "figures of a block too many": (lambda d: d["sides"][0]["figures"].append([]), "of 3 blocks"),
    "versions that are a text": (lambda d: d["sides"][0].update(versions="x"), "sides[0].versions"),
    "no side": (lambda d: d.update(sides=[]), "on 0 sides"),
    "no blocks": (lambda d: (d.update(blocks=[]), d["sides"][0].update(figures=[])), "0 blocks"),
    "no prompt": (lambda d: d["picture"]["asked"].pop("prompt"), "picture.asked.prompt"),
    "self": (lambda d: d["picture"]["asked"].update(self=1), "picture.asked.self"),
    "a LoRA": (lambda d: d["picture"]["asked"].update(lora="/etc/hostname"), "picture.asked.lora"),
    "a picture's path": (lambda d: d["picture"]["asked"].update(image="/etc/hostname"), "picture.asked.image"),
    "steps without number": (lambda d: d["picture"]["asked"].update(steps=10**6), "steps"),
    "another size": (lambda d: d["picture"]["asked"].update(width=48), "the size that was asked for"),
    "bits that are none": (lambda d: d["model"].update(quantize="5"), "--quantize"),
    "a precision that is none": (lambda d: d.update(precision="fp8"), "--precision"),
    "a part that is none": (lambda d: d["model"].update(parts={"unet2": "x"}), "'unet2'"),
    "LoRAs without fingerprints": (lambda d: d["model"].update(lora="a:1"), "fingerprints"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(0)
def test_a_fault_is_named(original: Original, tmp_path: Path, fault: str) -> None:
    change, words = FAULTS[fault]
    document = json.loads(json.dumps(original.document))
    change(document)
    path = original.write(tmp_path / "fault.safetensors", json.dumps(document))
    assert words in refused(passport_file.read, path)
    cli("parity", "check", str(path), "--backend", "cpu").refused(5, "record it again")


@pytest.mark.sample(0)
def test_no_text_of_a_passport_is_opened(
    original: Original, check: Callable[..., Ran], tiny_folder: Path, tmp_path: Path
) -> None:
    """Each text in turn is the path of a file that would be a right LoRA, in every form."""
    lora = write_lora(tiny_folder, "qwen", tmp_path / "tripwire.safetensors")
    opened: list[object] = []

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and watching and "tripwire" in str(args[0]):
            opened.append(args[0])

    watching = True
    sys.addaudithook(hook)  # there is no way to take it back
    lora.read_bytes()
    assert opened, "the hook sees what is opened"
    opened.clear()
    for keys, value in places(original.document, ()):
        if isinstance(value, str):
            for text in (str(lora), f"{lora}:0.5"):
                mutant = original.changed(keys, text)
                ran = check(original.write(tmp_path / "mutant.safetensors", mutant.text))
                assert ran.code in VERDICTS, (mutant.place, ran.err)
                assert not opened, mutant.place
    watching = False
