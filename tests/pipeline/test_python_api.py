"""The library as a user meets it: names, help, mistakes, and a result that shows and saves itself."""

from __future__ import annotations

import copy
import inspect
import pydoc
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.recipe_cases import recipe_from_png

import qwenimg
from qwenimg import Pipeline, QwenimgError, Result, UnknownOption, UsageError
from qwenimg.common.base import errors
from qwenimg.common.request.call_types import CallOptions
from qwenimg.common.request.request import OPTIONS, Request

SMALL: dict[str, Any] = {"width": 32, "height": 32, "steps": 1, "seed": 7}


@pytest.fixture(scope="module")
def pipe(tiny_folder: Path) -> Pipeline:
    return qwenimg.load(tiny_folder, backend="cpu", precision="fp32")


@pytest.fixture(scope="module")
def result(pipe: Pipeline) -> Result:
    return pipe("a red\ncircle " * 30, **SMALL)


def test_every_kind_of_error_is_public() -> None:
    kinds = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, QwenimgError)}
    assert kinds <= set(qwenimg.__all__) and all(getattr(qwenimg, name) is getattr(errors, name) for name in kinds)
    assert set(qwenimg.__all__) <= set(dir(qwenimg))


# Options


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("num_inference_steps", "did you mean steps?"),
        ("guidance_scale", "did you mean guidance?"),
        ("true_cfg_scale", "did you mean true_cfg?"),
        ("num_images_per_prompt", "a call makes one picture; call once for each seed"),
        ("generator", "did you mean seed?"),
        ("negativ_prompt", "did you mean negative_prompt?"),
        ("heigth", "did you mean height?"),
        ("Seed", "did you mean seed?"),
        ("zzz", "help(pipe) lists the known ones"),
        ("x\x1b[31m" + "y" * 500, "help(pipe) lists the known ones"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(pipe: Pipeline, name: str, told: str) -> None:
    """Whatever its value: None too is no reason to take it."""
    for call in (pipe, pipe.stream, pipe.check):
        for value in (30, None):
            with pytest.raises(UnknownOption, match=re.escape(told)) as caught:
                call("a ring", **{name: value})
            assert isinstance(caught.value, TypeError) and isinstance(caught.value, UsageError)
            assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize("method", ["__call__", "stream", "check"])
def test_help_and_completion_show_every_option(pipe: Pipeline, method: str) -> None:
    function = getattr(Pipeline, method)
    parameters = inspect.signature(function).parameters
    before = ["self", "prompt"] if method == "check" else ["self", "prompt", "wait"]
    assert list(parameters) == [*before, *CallOptions.__annotations__]
    for name in CallOptions.__annotations__:
        assert parameters[name].kind is parameters[name].KEYWORD_ONLY and parameters[name].default is None
        assert re.search(rf"^    {name}: \S.{{5}}", function.__doc__, re.MULTILINE), name
    assert "steps: the number of steps, 1 to 1000" in pydoc.plain(pydoc.render_doc(pipe))
    assert "refine_at" in pydoc.plain(pydoc.render_doc(getattr(pipe, method)))
    assert {*CallOptions.__annotations__} | {"prompt"} == {*OPTIONS}
    fields = {one.field for one in OPTIONS.values()}
    more = {"more_images", "template", "negative_template", "family_options", "upscaler", "goes_on_from", "inversions"}
    more |= {"writer", "rewritten"}
    assert Request.__dataclass_fields__.keys() - fields == more


def test_a_pipeline_is_called_by_what_its_signature_says(pipe: Pipeline) -> None:
    bound = inspect.signature(pipe).bind("a ring", steps=1, seed=2, width=32, height=32)
    assert pipe(*bound.args, **bound.kwargs).seed == 2
    with pytest.raises(TypeError):
        inspect.signature(pipe).bind("a ring", num_inference_steps=1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("device", "did you mean backend?"),
        ("dtype", "did you mean precision?"),
        ("torch_dtype", "did you mean precision?"),
        ("load_in_8bit", "did you mean quantize?"),
        ("local_files_only", "did you mean offline?"),
        ("unet", "did you mean transformer?"),
        ("seed", "give it to a call, as in pipe(prompt, seed=...)"),
        ("quantise", "did you mean quantize?"),
        ("Backend", "did you mean backend?"),
        ("zzz", "known are model, backend, precision"),
        ("x\x1b[31m" + "y" * 500, "known are model, backend, precision"),
    ],
)
def test_load_names_the_nearest_of_an_unknown_keyword(name: str, told: str) -> None:
    for value in (8, None):
        with pytest.raises(UnknownOption, match=re.escape(told)) as caught:
            qwenimg.load("no such model", **{name: value})  # type: ignore[arg-type]
        assert isinstance(caught.value, TypeError) and str(caught.value).isprintable()
        assert len(str(caught.value)) < 400 and "unknown" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("to", "give backend= and precision= to qwenimg.load"),
        ("from_pretrained", "qwenimg.load(MODEL) opens a model"),
        ("load_lora_weights", "give lora= to a call"),
        ("enable_model_cpu_offload", "max_memory= of qwenimg.load sets a limit"),
        ("scheduler", "give sampler= and schedule= to a call"),
        ("load_textual_inversion", "give embedding= to a call"),
        ("QwenImagePipeline", "from qwenimg.diffusers import QwenImagePipeline"),
    ],
)
def test_a_name_of_diffusers_is_answered(pipe: Pipeline, name: str, told: str) -> None:
    for owner in (pipe, qwenimg):
        with pytest.raises(AttributeError, match=re.escape(told)):
            getattr(owner, name)
        assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match=r"^Pipeline has no attribute 'zzz'$"):
        pipe.zzz  # noqa: B018


# Seeds and prompts


def test_a_list_of_prompts_is_a_list_of_pictures(pipe: Pipeline) -> None:
    made = pipe(["a ring", "a star"], **SMALL)
    assert [one.recipe["prompt"] for one in made] == ["a ring", "a star"]
    for one in made:
        assert one.latents.tobytes() == pipe(one.recipe["prompt"], **SMALL).latents.tobytes()
    unseeded = pipe(("a ring", "a ring"), **{name: value for name, value in SMALL.items() if name != "seed"})
    assert unseeded[0].seed != unseeded[1].seed
    drawn = pipe.runtime.clock.seconds
    for wrong, told in (([], "empty list"), (["a ring", 7], "expected a list of texts"), (["a ring", ""], "is empty")):
        with pytest.raises(UsageError, match=told):
            pipe(wrong, **SMALL)  # type: ignore[arg-type]
    assert pipe.runtime.clock.seconds == drawn


def test_without_a_seed_each_picture_has_another_one(pipe: Pipeline) -> None:
    plain = {name: value for name, value in SMALL.items() if name != "seed"}
    one, two = (pipe("a red circle", **plain) for _ in range(2))
    assert one.seed != two.seed and one.recipe["seed"] == one.seed  # equal once in 4 billion runs
    assert not np.array_equal(one.latents, two.latents)
    again = pipe("a red circle", **plain, seed=one.seed)
    assert again.latents.tobytes() == one.latents.tobytes()
    assert all(0 <= pipe.check("x").seed < 2**32 for _ in range(100))


@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
def test_an_empty_prompt_is_refused_as_on_the_command_line(pipe: Pipeline, prompt: str) -> None:
    with pytest.raises(UsageError, match="the prompt is empty; say what to draw"):
        pipe(prompt, **SMALL)


def test_bits_may_be_a_number(tiny_folder: Path) -> None:
    by_number, by_text = (qwenimg.load(tiny_folder, "cpu", "fp32", quantize=bits) for bits in (8, "8"))
    one, two = by_number("a ring", **SMALL), by_text("a ring", **SMALL)
    assert one.latents.tobytes() == two.latents.tobytes() and dict(one.recipe)["quantize"] == "8"
    for value, told in ((5, "5"), (True, "quantize is True; expected 8, 6 or 4"), (8.0, "expected 8, 6 or 4")):
        with pytest.raises(UsageError, match=told):
            qwenimg.load(tiny_folder, quantize=value)  # type: ignore[arg-type]


# Results


def test_a_result_is_one_line(result: Result, pipe: Pipeline) -> None:
    shown = repr(result)
    assert shown.startswith("<Result 32x32, seed 7, steps 1, tiny-qwen-image, 'a red") and len(shown) < 200
    for one in (shown, repr([result]), repr(pipe)):
        assert one.isprintable() and "array" not in one
    assert [image.tobytes() for image in result.images] == [result.image.tobytes()] == [result.pixels.tobytes()]
    assert result.seed == 7 and repr(pipe) == f"<Pipeline {pipe.headline()}>"


def test_a_result_saves_itself_with_its_recipe(result: Result, tmp_path: Path) -> None:
    from PIL import Image

    written = result.save(tmp_path / "a")
    assert written == tmp_path / "a.png" and written.is_absolute()
    assert recipe_from_png(written)["seed"] == 7
    assert np.array_equal(np.asarray(Image.open(written)), result.pixels)
    before = written.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        result.save(str(written), metadata=False)
    assert written.read_bytes() == before
    result.save(written, overwrite=True, metadata=False)
    assert Image.open(written).info == {} and [file.name for file in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("name", ["a.bmp", "", "no/such/a.png", "b/", ".", "x" * 300 + ".png", "nul\0.png", None])
def test_what_cannot_be_saved_is_one_line(result: Result, tmp_path: Path, name: Any) -> None:
    path = name if not name or name.startswith(".") else f"{tmp_path}/{name}"
    with pytest.raises(UsageError) as caught:
        result.save(path)
    assert str(caught.value).isprintable() and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [5, b"x", [], {}, True, 10**5000, 1j, float("nan"), type, np.zeros(3)],
    ids=lambda value: type(value).__name__,
)
def test_load_takes_no_value_of_another_kind(value: Any) -> None:
    for name in ("model", "backend", "precision", "refiner", "transformer", "text_encoder", "vae", "tokenizer"):
        given = {"model": "shapes"} | {name: value}
        with pytest.raises(UsageError, match=f"{name} is .*expected a text") as caught:
            qwenimg.load(**given)
        assert len(str(caught.value)) < 100 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "value", ["x" * 100_000, "\x1b[2J", "\ud800", "bf16," + "\0" * 9000], ids=("long", "escape", "surrogate", "null")
)
def test_texts_that_are_no_name_are_told_in_short(pipe: Pipeline, tiny_folder: Path, value: str) -> None:
    calls = (
        lambda: qwenimg.load(tiny_folder, backend=value),
        lambda: qwenimg.load(tiny_folder, precision=value),
        lambda: pipe("a red circle", schedule=value, **SMALL),
        lambda: pipe("a red circle", sampler=value, **SMALL),
    )
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        print(caught.value)
        assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


@pytest.mark.parametrize("kind", ["<U3", "complex64", "bool", "datetime64[s]", "S2"])
def test_latents_of_another_kind(pipe: Pipeline, kind: str) -> None:
    """They were a ValueError of NumPy, or their imaginary part was left out."""
    with pytest.raises(UsageError, match="latents are of"):
        pipe("a red circle", latents=np.zeros((1, 16, 4, 4), kind), **SMALL)


@pytest.mark.parametrize("shape", [(0, 0, 3), (0, 5, 3), (5, 0, 3)])
def test_a_picture_without_pixels(pipe: Pipeline, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="expected uint8"):
        pipe("a red circle", image=np.zeros(shape, np.uint8), **SMALL)


def test_a_result_is_an_array_and_says_where_its_image_is() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    result = Result(pixels=pixels, latents=np.zeros((1, 4, 1, 1), np.float32), recipe=cast(Any, {"seed": 1}))
    assert np.array_equal(np.asarray(result), pixels) and np.asarray(result, np.float32).dtype == np.float32
    assert np.shares_memory(np.asarray(result), pixels) and not np.shares_memory(np.array(result, copy=True), pixels)
    with pytest.raises(AttributeError, match=r"result\.image, a PIL image: result\.image\.show$"):
        result.show()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = result.nothing  # type: ignore[attr-defined]
    assert copy.deepcopy(result).seed == 1


@pytest.mark.parametrize(("name", "does"), [
    ("generate", "qwenimg.load"), ("list_models", "qwenimg models"), ("Error", "qwenimg.QwenimgError"),
])  # fmt: skip
def test_names_that_people_try(name: str, does: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(does)):
        getattr(qwenimg, name)


def test_an_address_is_no_model() -> None:
    with pytest.raises(qwenimg.ModelError, match=r"`qwenimg pull Qwen/Qwen-Image` gets it"):
        qwenimg.load("https://huggingface.co/Qwen/Qwen-Image")
