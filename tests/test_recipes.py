"""The table of models, against what the issue and the pipeline say."""

import subprocess
import sys

import pytest

from qwenimg.common import recipes
from qwenimg.common.request import Defaults

TOTAL = 57.7e9  # bytes: 40.9 GB of transformer, 16.6 GB of text encoder, 0.25 GB of VAE


@pytest.mark.parametrize(
    ("name", "repo"), [("qwen-image", "Qwen/Qwen-Image"), ("qwen-image-2512", "Qwen/Qwen-Image-2512")]
)
def test_the_two_models(name, repo):
    recipe = recipes.find(name)
    assert recipe is recipes.find(repo) is recipes.find(name.upper()) is recipes.find(repo.lower())
    assert (recipe.name, recipe.repo, recipe.family) == (name, repo, "qwen-image")
    assert (recipe.width, recipe.height, recipe.steps, recipe.guidance) == (1328, 1328, 50, 4.0)
    assert recipe.negative_prompt == " "
    assert recipe.bytes == pytest.approx(TOTAL, rel=0.01)


def test_a_recipe_changes_only_the_size():
    """What the model card does not say differently is what holds without a recipe."""
    plain = Defaults()
    assert (plain.width, plain.height, plain.steps, plain.guidance, plain.negative_prompt) == (1024, 1024, 50, 4.0, " ")
    for recipe in recipes.RECIPES.values():
        assert (recipe.steps, recipe.guidance, recipe.negative_prompt) == (
            plain.steps,
            plain.guidance,
            plain.negative_prompt,
        )


def test_the_default_and_the_keys():
    assert recipes.DEFAULT in recipes.RECIPES
    assert all(key == recipe.name == key.lower() for key, recipe in recipes.RECIPES.items())
    assert not recipes.RECIPES.keys() & recipes.REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("qwen-image-edit", "edits images"),
        ("Qwen/Qwen-Image-Edit-2509", "edits images"),
        ("qwen-image-edit-2511", "edits images"),
        ("qwen-image-layered", "layers"),
        ("Qwen-Image-2.1", "different architecture"),
        ("sdxl", "Stable Diffusion is not built yet"),
        ("SD15", "Stable Diffusion is not built yet"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "Stable Diffusion is not built yet"),
    ],
)
def test_refused_names_say_why(name, part):
    assert part in recipes.refusal(name)
    assert recipes.find(name) is None


@pytest.mark.parametrize("name", ["qwen-image", "Qwen/Qwen-Image-2512", "someone/sdk", "", "flux"])
def test_other_names_are_not_refused(name):
    assert recipes.refusal(name) is None


def test_import_is_light():
    code = "import sys, qwenimg.common.recipes, qwenimg.common.hub as h; h.needed('x')\n"
    code += "print([m for m in ('numpy', 'torch', 'mlx', 'huggingface_hub', 'tokenizers', 'PIL') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
