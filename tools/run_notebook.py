"""Run docs/notebook.ipynb and write what its cells show into it.

pip install nbclient ipykernel
python tools/run_notebook.py
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"


def main() -> None:
    nbformat, nbclient = import_module("nbformat"), import_module("nbclient")  # no packages of the tests
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells:
        clear(cell)
    data = json.loads(nbformat.writes(notebook))
    NOTEBOOK.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def clear(cell: Any) -> None:
    """Remove what differs between machines: times, progress bars but for their end, texts beside pictures."""
    cell.metadata.pop("execution", None)
    text = "".join(output["text"] for output in cell.get("outputs", []) if output["output_type"] == "stream")
    lines = [re.sub(r" \[\d.*", "", line.rpartition("\r")[2]) for line in text.removesuffix("\n").split("\n") if line]
    rest = [output for output in cell.get("outputs", []) if output["output_type"] != "stream"]
    for output in rest:
        if "image/png" in output.get("data", {}):
            output["data"] = {"image/png": output["data"]["image/png"]}
    if "outputs" in cell:
        shown = {"output_type": "stream", "name": "stdout", "text": "\n".join(lines) + "\n"}
        cell.outputs = [*([type(cell)(shown)] if lines else []), *rest]


if __name__ == "__main__":
    main()
