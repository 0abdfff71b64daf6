"""What a recipe says of models: names and fingerprints, never a path; and that a path in one is never opened."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.recipe_cases import recipe, recipe_from_png, saved

from qwenimg.cli import config
from qwenimg.cli.main import run
from qwenimg.common.base import hf_cache
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.families import catalog
from qwenimg.common.families.known_model import ModelPath
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.stable_diffusion.family import FAMILY as STABLE_DIFFUSION
from qwenimg.common.formats.fingerprint import HEAD, PIECE, fingerprint
from qwenimg.common.hub import resolve
from qwenimg.common.hub.origin import origin
from qwenimg.common.request.recipe import check_recipe, png_text

PATHS = [
    "/etc/passwd",
    "~/model",
    "../m",
    "./m",
    "m/",
    "a/b/c",
    "C:\\\\m",
    "m.safetensors",
    "a/m.safetensors",
    "tiny",
    "",
    "a\0b",
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hf_cache, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(config, "path", lambda: tmp_path / "config.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.mark.parametrize("name", [*PATHS, "owner/name"])
@pytest.mark.parametrize("key", ["model", "refiner"])
def test_a_path_in_a_recipe_is_not_opened(name: str, key: str, cache: Path, monkeypatch, capsys) -> None:
    def opened(*args: Any) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(resolve, "from_path", opened)
    for there in ("tiny", "owner/name"):
        Path(there).mkdir(parents=True)
    texts = png_text(recipe(**({"model": "shapes"} | {key: "?"})))
    import json

    texts["qwenimg"] = texts["qwenimg"].replace(json.dumps("?"), json.dumps(name))
    saved(Path("x.png"), texts)
    assert run(["--from", "x.png"]) == 5
    last = capsys.readouterr().err.splitlines()[-1]
    print(last)
    assert last.startswith("qwenimg: error: ") and ("give it with -m" if key == "model" else "with --refiner") in last


def test_names_of_recipes(cache: Path) -> None:
    assert resolve.named("shapes") == "shapes"
    with pytest.raises(ModelError, match="qwenimg pull sdxl"):
        resolve.named("sdxl")
    Path("shapes").mkdir()
    assert Path(resolve.named("shapes")).is_absolute()  # and not the folder of that name here
    assert resolve.named_part("a/b") is None and resolve.named_part("vae.safetensors") is None
    copy = cache / "models--a--b" / "snapshots" / ("0" * 40)
    copy.mkdir(parents=True)
    assert resolve.named_part("a/b") == copy


@pytest.mark.parametrize("given", ["a/b", "./a/b", "a/../a/b"])
def test_a_vae_is_named_without_its_path(given: str, cache: Path) -> None:
    Path("a").mkdir()
    Path("a/b").write_bytes(b"x" * 100)
    plan = SimpleNamespace(files=(open_regular(Path(given)),))
    checkpoint = SimpleNamespace(components={"vae": SimpleNamespace(plan=plan)})
    model: Any = SimpleNamespace(
        checkpoint=checkpoint,
        family=STABLE_DIFFUSION,
        path=ModelPath(folder=Path(), name="shapes-v1", known=catalog.BUILT_IN),
        options=LoadOptions(parts={"vae": Path(given)}),
        refiner=None,
    )
    labels = origin(model)
    assert labels["vae"] == "b" and set(labels["fingerprints"]) == {"vae"}
    told = recipe(**labels)
    assert check_recipe(told, Path("x")) == told
    assert "a/b" not in "".join(png_text(told).values())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flux-dev", "FLUX.1 dev Non-Commercial"),
        ("flux2-dev", "FLUX Non-Commercial"),
        ("anima", "CircleStone Labs Non-Commercial"),
        ("krea-2-turbo", "Krea 2 Community (revenue limit)"),
        ("lumina-image-2", "Apache-2.0, text encoder Gemma"),
        ("ernie-image", None),
        ("qwen-image", None),
    ],
)
def test_a_license_with_terms_is_in_the_recipe(name: str, said: str | None, cache: Path) -> None:
    model: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(components={}),
        family=STABLE_DIFFUSION,
        path=ModelPath(folder=Path(), name=name, known=catalog.KNOWN[name]),
        options=LoadOptions(),
        refiner=None,
    )
    told = recipe(**origin(model))
    print(name, told.get("license"))
    assert told.get("license") == said
    saved(Path("x.png"), png_text(told))
    assert recipe_from_png(Path("x.png")) == told


def test_no_name_of_a_model_is_a_path_in_a_png(tmp_path: Path) -> None:
    named = dict.fromkeys(("model", "refiner", "vae"), "/home/someone/m.safetensors")
    read = recipe_from_png(saved(tmp_path / "x.png", png_text(recipe(**named))))
    assert {read["model"], read["refiner"], read["vae"]} == {"m.safetensors"}


def test_fingerprints_tell_files_apart(tmp_path: Path) -> None:
    data = bytearray(range(256)) * 4096

    def of(content: bytes, name: str = "a") -> str:
        (tmp_path / name).write_bytes(content)
        return fingerprint([open_regular(tmp_path / name)])

    first = of(data)
    assert first == of(data, "elsewhere") and len(first) == 64
    for place in (0, HEAD - 1, len(data) - 1, len(data) - PIECE):
        changed = data.copy()
        changed[place] ^= 1
        assert of(changed) != first, place
    assert of(data + b"x") != first and len({of(b""), of(b"x"), of(b"xy")}) == 3
