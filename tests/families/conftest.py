"""What computes here needs the frameworks set up first; tiny Stable Diffusion models as folders and files."""

import shutil
from pathlib import Path

import filelock
import pytest
from safetensors.torch import save_file
from support import frameworks  # noqa: F401
from support.tiny_ldm import models_of, one_file, pipeline, write_folder


@pytest.fixture(scope="session")
def both(shared_folder: Path) -> dict[str, tuple[Path, Path]]:
    """Of each type the folder and the file, which lies in a folder with the folder's tokenizer."""
    found = {}
    for kind in ("sd1", "sd2", "sdxl"):
        place = shared_folder / f"ldm-{kind}"
        with filelock.FileLock(f"{place}.lock"):
            if not place.exists():
                part = place.with_suffix(".part")
                models = models_of(kind)
                if kind == "sdxl":
                    models["vae"].register_to_config(scaling_factor=0.13025)  # as in every SDXL, and in no file
                write_folder(part / "folder", models)
                pipeline(part / "folder", kind, models).save_pretrained(part / "folder")
                (part / "file").mkdir()
                save_file(one_file(kind, models), part / "file" / "model.safetensors")
                shutil.copytree(part / "folder" / "tokenizer", part / "file" / "tokenizer")
                part.rename(place)
        found[kind] = (place / "folder", place / "file" / "model.safetensors")
    return found
