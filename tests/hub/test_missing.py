"""What a run names and this machine lacks: all downloads in one message, files that cannot be read before a model that
is not here, and plans that need neither a tokenizer nor a LoRA."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file
from support import tiny_flux, tiny_ldm
from support.cli_runner import cli
from support.tiny_clip import write_tiny_clip_tokenizer

from qwenimg.common.hub.missing import Missing, listed

CANNY, STYLE = "sd15-controlnet-canny", "someone/style"
PICTURE = str(Path(__file__).parents[2] / "docs" / "pictures" / "first.png")


def test_all_downloads_are_in_one_message(cache: Path, tmp_path: Path) -> None:
    control = ("--control", f"{CANNY}={PICTURE}")
    run = ("-m", "sd15", "-p", "a cat", "-o", str(tmp_path / "a.png"))
    commands = (f"qwenimg pull sd15 (4.3 GB); qwenimg pull {STYLE}", f"qwenimg pull {CANNY} (1.4 GB)")
    cli(*run, *control, "--lora", STYLE).refused(5, "not on this machine: ", *commands)
    cli(*run, "--vae", "taesd").refused(
        5, "not on this machine: qwenimg pull sd15 (4.3 GB); qwenimg pull taesd (9.8 MB)"
    )
    cli("-m", "shapes", "-p", "a cat", "--vae", "taesd", "--lora", STYLE).refused(
        5, f"not on this machine: qwenimg pull taesd (9.8 MB); qwenimg pull {STYLE}"
    )
    lines = tmp_path / "lines.txt"
    lines.write_text("a cat\n")
    more = ("-m", "sd15", "--lora", STYLE)
    cli("batch", str(lines), *more, "-o", str(tmp_path / "out")).refused(5, f"not on this machine: {commands[0]}")
    grid = ("grid", "a cat", "--x", "steps=1,2", "-o", str(tmp_path / "grid.png"))
    cli(*grid, *more).refused(5, f"not on this machine: {commands[0]}")
    cli(*run).refused(
        5, "sd15: stable-diffusion-v1-5/stable-diffusion-v1-5, 4.3 GB, is not in the cache"
    )  # of one more
    assert not (tmp_path / "a.png").exists()


def test_a_line_has_as_many_commands_as_it_has_space_for() -> None:
    every = [Missing(f"owner-{i}/{'long' * 8}", 0) for i in range(12)]
    text = listed(every)
    shown = text.count("qwenimg pull")
    assert shown >= 2 and text.endswith(f"; and {12 - shown} more") and len(text) < 200
    assert listed(every[:1]) == every[0].command


@pytest.mark.parametrize("option", ["--lora", "--control", "--ip-adapter", "--embedding"])
@pytest.mark.parametrize("kind", ["bytes", "empty", "fifo", "loop", "device", "huge header", "none"])
def test_an_unreadable_file_is_named_before_a_missing_model(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("given.safetensors")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind in ("loop", "device"):
        path.symlink_to(path.name if kind == "loop" else "/dev/zero")
    elif kind != "none":
        path.write_bytes({"bytes": bytes(range(64)), "empty": b"", "huge header": b"\xff" * 8 + b"{}"}[kind])
    value = f"{path}={PICTURE}" if option == "--control" else str(path)
    more = ("--ip-image", PICTURE) if option == "--ip-adapter" else ()
    for model in ("sd15", "stable-diffusion-v1-5/stable-diffusion-v1-5"):
        ran = cli("-m", model, "-p", "a cat", option, value, *more, "-o", str(tmp_path / "a.png"))
        print(ran.err)
        ran.refused(5, "given.safetensors")
        assert "qwenimg pull" not in ran.err and not (tmp_path / "a.png").exists()


# Plans


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_a_plan_of_a_checkpoint_needs_no_vocabulary(cache: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "own.safetensors"
    save_file(tiny_ldm.one_file(kind, tiny_ldm.models_of(kind)), path)
    words = ("plan", str(path), "--backend", "cpu", "-p", "a cat")
    told, without = cli(*words), json.loads(cli(*words, "--json").out)
    print(told.out.decode())
    assert told.code == 0 and b"before it draws: own.safetensors: needs CLIP's vocabulary" in told.out
    assert "qwenimg pull clip-tokenizer (1.5 MB)" in without["missing"][0] and without["peak_bytes"] > 0
    cli("-m", str(path), "-p", "a cat", "-o", str(tmp_path / "a.png")).refused(
        5, "qwenimg pull clip-tokenizer (1.5 MB)"
    )
    cli(*words, "--tokenizer", str(tmp_path)).refused(5, "holds no tokenizer")
    write_tiny_clip_tokenizer(tmp_path / "tokenizer")
    found = json.loads(cli(*words, "--json").out)
    assert found["missing"] == [] and found["peak_bytes"] <= without["peak_bytes"]


def test_both_vocabularies_are_in_one_message(cache: Path, tmp_path: Path) -> None:
    tiny_flux.write_tiny_flux(tmp_path / "flux", "dev")
    for name in ("tokenizer", "tokenizer_2"):
        (tmp_path / "flux" / name).rename(tmp_path / name.replace("tokenizer", "other"))
    options = ("--transformer", "--vae", "--text-encoder", "--text-encoder")
    parts = ("transformer", "vae", "text_encoder", "text_encoder_2")
    given = [
        word for option, part in zip(options, parts, strict=True) for word in (option, str(tmp_path / "flux" / part))
    ]
    told = "qwenimg pull clip-tokenizer (1.5 MB) and qwenimg pull t5-tokenizer"
    cli("-m", "flux-dev", "-p", "a cat", *given, "-o", str(tmp_path / "a.png")).refused(
        5, "vocabularies of CLIP and of T5", told
    )


def test_a_plan_leaves_out_a_lora_that_is_not_here(cache: Path) -> None:
    words = ("plan", "sd15", "--backend", "cpu", "--lora", STYLE)
    ran = cli(*words)
    assert ran.code == 0 and f"not here, {STYLE}: qwenimg pull {STYLE}".encode() in ran.out, ran
    assert json.loads(cli(*words, "--json").out)["missing"] == [STYLE]
    cli(*words[:-1], "none.safetensors").refused(5, "none.safetensors: no such LoRA file")
    cli("plan", "sd15", "--vae", "taesd", "--control", f"a/b={PICTURE}").refused(
        5, "not on this machine: qwenimg pull taesd (9.8 MB); qwenimg pull a/b"
    )
