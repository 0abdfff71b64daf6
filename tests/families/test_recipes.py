"""The table of models, against what the issue and the pipeline say."""

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest

from qwenimg.common.families import catalog
from qwenimg.common.families.qwen_image.checkpoint import open_folder
from qwenimg.common.families.qwen_image.family import FAMILY as QWEN_IMAGE
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.request.request import Defaults

TOTAL = 57.7e9  # bytes: 40.9 GB of transformer, 16.6 GB of text encoder, 0.25 GB of VAE


@pytest.mark.parametrize(
    ("name", "repo"), [("qwen-image", "Qwen/Qwen-Image"), ("qwen-image-2512", "Qwen/Qwen-Image-2512")]
)
def test_the_two_models(name, repo):
    known = catalog.find(name)
    assert known is catalog.find(repo) is catalog.find(name.upper()) is catalog.find(repo.lower())
    assert (known.name, known.repo, known.family) == (name, repo, "qwen-image")
    assert (known.width, known.height, known.steps, known.guidance) == (1328, 1328, 50, 4.0)
    assert known.negative_prompt == " "
    assert known.bytes == pytest.approx(TOTAL, rel=0.01)


def test_a_known_name_changes_only_the_size():
    """What the model card does not say differently is what holds for other models. The later Edits say 40 steps."""
    plain = Defaults()
    assert (plain.width, plain.height, plain.steps, plain.guidance, plain.negative_prompt) == (1024, 1024, 50, 4.0, " ")
    for known in (known for known in catalog.KNOWN.values() if known.family == "qwen-image" and known.repo):
        assert (known.steps, known.guidance, known.negative_prompt) == (
            40 if "edit-25" in known.name else plain.steps,
            plain.guidance,
            plain.negative_prompt,
        )


def test_the_trained_sizes_belong_to_the_published_width(tiny_folder):
    """However the model came, and with layers left out; a model of another width draws its aspects at its own size."""
    tiny = open_folder(tiny_folder)
    for config, expected in (
        (QwenDiTConfig(), (1664, 928)),
        (QwenDiTConfig(num_layers=40), (1664, 928)),
        (tiny["transformer"].config, (1360, 768)),
    ):
        transformer = replace(tiny["transformer"], config=config)
        changed = replace(tiny, components={**tiny.components, "transformer": transformer})
        found = QWEN_IMAGE.defaults(changed)
        assert found.size(Fraction(16, 9)) == expected
    tiny.close()


@pytest.mark.parametrize(
    ("name", "other", "size", "guidance", "parameters"),
    [
        # parameters of UNet, text encoders and VAE, each published in float32
        ("sd15", "SD1.5", 512, 7.5, 859.521e6 + 123.06e6 + 83.654e6),
        ("sdxl", "sdxl-base", 1024, 5.0, 2567.464e6 + 123.06e6 + 694.66e6 + 83.654e6),
        ("sdxl-refiner", "sdxl-refiner", 1024, 5.0, 2259.527e6 + 694.66e6 + 83.654e6),
    ],
)
def test_stable_diffusion(name, other, size, guidance, parameters):
    known = catalog.find(name)
    assert known is catalog.find(other) is catalog.find(known.repo)
    assert (known.width, known.height, known.steps, known.guidance) == (size, size, 50, guidance)
    assert known.negative_prompt == "" and known.bytes == pytest.approx(4 * parameters, rel=0.01)


def test_the_built_in_model():
    known = catalog.find("shapes")
    assert known is catalog.find("shapes-v1") is catalog.find("Shapes") is catalog.BUILT_IN
    assert known.repo is None and known.width % 16 == known.height % 16 == 0
    assert (known.steps, known.guidance, known.negative_prompt) == (20, 3.0, " ")
    assert catalog.find("None") is None


def test_the_default_and_the_keys():
    assert {catalog.DEFAULT, catalog.FIRST} <= catalog.KNOWN.keys()
    assert all(key == known.name == key.lower() for key, known in catalog.KNOWN.items())
    assert not catalog.KNOWN.keys() & catalog.REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("z-image-edit", "edits images"),
        ("sd21", "no repository"),
    ],
)
def test_refused_names_say_why(name, part):
    assert part in catalog.refusal(name)
    assert catalog.find(name) is None


@pytest.mark.parametrize("name", ["qwen-image", "Qwen/Qwen-Image-2512", "someone/sdk", "", "flux"])
def test_other_names_are_not_refused(name):
    assert catalog.refusal(name) is None


def test_import_is_light():
    code = "import sys, qwenimg.common.families.catalog, qwenimg.common.hub.resolve\n"
    code += "print([m for m in ('numpy', 'torch', 'mlx', 'huggingface_hub', 'tokenizers', 'PIL') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
