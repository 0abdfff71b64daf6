"""docs/notebook.ipynb: its cells run in their order, and a notebook shows a result as a picture."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.rules import ROOT

import qwenimg

NOTEBOOK = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.sample(0)
def test_the_cells_run_in_their_order() -> None:
    """As Python: a cell's last line is what a notebook shows."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in CELLS:
            exec(compile(cell, "notebook", "exec"), names)
    assert "stopped after step 8 of 20" in printed.getvalue() and "20/20" in printed.getvalue()
    assert names["grid"].size == (384, 256) and names["preview"].shape == (32, 32, 3)


def test_what_it_shows_is_kept() -> None:
    """Pictures without traces of the machine; no error."""
    outputs = [output for cell in NOTEBOOK["cells"] for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 6 and all(output["output_type"] != "error" for output in outputs)
    assert "stopped after step 8 of 20" in json.dumps(outputs) and "it/s" not in json.dumps(outputs)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_a_notebook_shows_a_result_as_its_picture(backend: str) -> None:
    with qwenimg.load("shapes", backend, "fp32") as pipe:
        result = pipe("a red circle", seed=7, steps=1, width=64, height=64)
    shown = Image.open(io.BytesIO(result._repr_png_()))
    assert np.array_equal(np.asarray(shown), result.pixels) and "parameters" in shown.info  # type: ignore[attr-defined]


@pytest.mark.slow
def test_jupyter_runs_it() -> None:
    """Where it is installed: `pip install nbclient ipykernel`."""
    client, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    client.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert (
        sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())) == 6
    )
