"""The model that a run without -m draws with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.fake_hub import COMMIT
from support.tiny_zimage import write_tiny_zimage

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import storage_folder
from qwenimg.common.families import catalog
from qwenimg.common.hub import resolve


@pytest.mark.sample(0)
def test_a_whole_copy_comes_before_one_that_is_cut_off(cache: Path, tiny_folder: Path, tmp_path: Path) -> None:
    def put(name: str, folder: Path) -> Path:
        snapshot = storage_folder(resolve.find_repo(name)[0]) / "snapshots" / COMMIT
        return Path(shutil.copytree(folder, snapshot))

    cut = put(catalog.DEFAULT, tiny_folder)
    next(cut.glob("transformer/*.safetensors")).unlink()
    with pytest.raises(ModelError, match=f"^{catalog.DEFAULT}: the copy in .* is incomplete, it lacks transformer"):
        resolve.resolve(None)
    write_tiny_zimage(tmp_path / "z-image")
    whole = put(catalog.FIRST, tmp_path / "z-image")
    found = resolve.resolve(None)
    assert (found.name, found.folder) == (catalog.FIRST, whole)
