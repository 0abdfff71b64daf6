"""The Python in README and docs: it passes mypy --strict, so that the types that the package ships are right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.rules import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:pipe|pipe\.\w+|qwenimg\.load)\([^`]*\))`")
HEAD = 'import qwenimg\n\npipe = qwenimg.load("shapes")\n'


def snippets() -> dict[str, str]:
    """{name of a page: its Python, blocks and calls in the text}, as one file that a reader could type."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = [code for language, code in BLOCK.findall(text) if language == "python"]
        calls = [" ".join(call.split()) for call in INLINE.findall(BLOCK.sub("", text)) if "..." not in call]
        if blocks or calls:
            found[page.stem.replace("-", "_")] = "\n".join([*blocks, HEAD, *calls, ""])
    return found


def strict(folder: Path, files: dict[str, str]) -> str:
    """What mypy --strict says of `files`, against the package as it is installed."""
    for name, code in files.items():
        (folder / f"page_{name}.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(folder / "cache")]
    pages = [f"page_{name}.py" for name in files]
    return subprocess.run([*command, *pages], cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snippets")


@pytest.mark.sample(0)
def test_the_python_of_every_page_passes_mypy(folder: Path) -> None:
    found = snippets()
    assert {"README", "python", "weights"} <= found.keys()
    assert "Success: no issues found" in strict(folder, found)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ('pipe("x", image=5)', "[call-overload]"),
        ('pipe("x", lora=[("a", "b")])', "[list-item]"),
        ('pipe("x", stps=5)', "[call-overload]"),
        ('pipe(["x"]).image', "[attr-defined]"),
        ('qwenimg.load("x", device="cuda")', "[arg-type]"),
        ('qwenimg.load("x", quantize=8.5)', "[arg-type]"),
        ('pipe("x").images.size', "[attr-defined]"),
        ('with qwenimg.load("x") as other:\n    other.imagine()', "[attr-defined]"),
    ],
)
@pytest.mark.sample(0)
def test_mypy_knows_what_a_call_takes(folder: Path, code: str, told: str) -> None:
    # a file for each: to mypy's cache, one that is written again within a second with the same size is the same
    assert told in strict(folder, {f"wrong_{len([*folder.glob('page_wrong_*')])}": HEAD + code + "\n"})


SCRIPT = """
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import qwenimg
from qwenimg.diffusers import EulerDiscreteScheduler, QwenImageLayeredPipeline, QwenImagePipeline
from qwenimg.diffusers import StableDiffusionXLImg2ImgPipeline as Img2Img

pipe = QwenImagePipeline.from_pretrained("Qwen/Qwen-Image", torch_dtype="bfloat16", quantize=8).to("mps")
pipe.enable_model_cpu_offload()
made = pipe("a cat", num_inference_steps=4, true_cfg_scale=4.0, negative_prompt=" ", generator=7)
image: Image.Image = made.images[0]
result: qwenimg.Result = made.results[0]
array: NDArray[np.float32] = pipe(["a cat", "a dog"], output_type="np", seed=3).images
first: list[Image.Image] = pipe("a cat", return_dict=False)[0]
layer: Image.Image = QwenImageLayeredPipeline.from_pretrained(Path("layered"))(image).images[0][1]
other: Img2Img = Img2Img.from_pipe(pipe)
again = other("a dog", image=array[0], strength=0.4)
other.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, use_karras_sigmas=True)
other.load_lora_weights("styles", weight_name="ink.safetensors")
other.set_adapters("ink", 0.7)
"""


@pytest.mark.sample(1)
def test_mypy_knows_the_names_of_diffusers(folder: Path) -> None:
    assert "Success: no issues found" in strict(folder, {"diffusers": SCRIPT})
    wrong = {
        'pipe("x", num_inference_stps=4)': "did you mean",
        'pipe("x", width="8")': "[call-overload]",
        'pipe("x").images.size': "[attr-defined]",
        "from qwenimg.diffusers import NoSuchPipeline": "[attr-defined]",
        'QwenImagePipeline.from_pretrained("x", quantise=8)': "Unexpected keyword",
    }
    lines = strict(folder, {"wrong_diffusers": SCRIPT + "\n".join(wrong) + "\n"}).splitlines()
    for number, (code, told) in enumerate(wrong.items(), 1 + SCRIPT.count("\n")):
        found = [line for line in lines if line.startswith(f"page_wrong_diffusers.py:{number}: error")]
        assert any(told in line for line in found), (code, found)
