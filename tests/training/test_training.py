"""Training at toy size: it learns, it survives a kill bit for bit, and what it writes draws the same everywhere."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support import oracle
from support.training_runs import SIZE, options
from training import data as train_data
from training import dit as train_dit
from training import folder as train_folder
from training import optimizer as train_optimizer
from training import run as train_run
from training import scenes as shapes
from training import stages as train
from training import text as train_text
from training import tokenizer as bpe
from training import vae as train_vae
from training.config import ShapesConfig, parse_sizes

import qwenimg
from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import DoesNotFit, ModelError, NumericsError, UsageError
from qwenimg.common.families.qwen_image.variants import DRAWS as TEMPLATE
from qwenimg.common.numbers import noise, timesteps
from qwenimg.common.prompts import qwen
from qwenimg.common.sampling.flow_match import by_size
from qwenimg.common.shapes import words as shapes_words
from qwenimg.common.shapes.scenes import HELD_OUT_PAIRS
from qwenimg.common.training.files import COLUMNS

pytestmark = pytest.mark.sample(0)  # it takes a trained model

CPU = torch.device("cpu")
PICTURE = 2  # of 255: float32 in another order of operations
STEPS = 60
VAE_FALL, TEXT_FALL, DIT_FALL = 0.7, 0.9, 0.9  # of the first loss after as many steps; measured 0.57, 0.77 and 0.81


def run(config: ShapesConfig) -> list[str]:
    lines: list[str] = []
    train.train(config, lines.append, device="cpu")
    return lines


def losses(folder: Path, stage: str) -> list[float]:
    rows = (folder / "training" / f"{stage}.csv").read_text().splitlines()
    return [float(row.split(",")[1]) for row in rows[1:]]


@pytest.fixture(scope="module")
def trained(few_measured: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages, with a figure logged for every third step."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_run, "LOG_EVERY", 3)
        run(options("vae", folder, steps=STEPS))
        run(options("text", folder, steps=STEPS, batch=16))
        run(options("dit", folder, steps=STEPS, batch=8))
    return folder


@pytest.fixture(autouse=True, scope="module")
def few_measured() -> Iterator[None]:
    """Eight pictures instead of 64 for the latents' statistics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_vae, "MEASURED", 8)
        yield


@pytest.fixture
def with_parts(trained: Path, tmp_path: Path) -> Path:
    """A folder in which the last stage can start."""
    return copied(trained, tmp_path / "out")


def copied(trained: Path, out: Path) -> Path:
    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.copytree(trained / part, out / part)
    return out


# It learns


def test_loss_falls(trained: Path):
    for stage, fall in (("vae", VAE_FALL), ("text", TEXT_FALL), ("dit", DIT_FALL)):
        found = losses(trained, stage)
        ratio = np.mean(found[-4:]) / np.mean(found[:2])
        print(f"{stage}: loss {found[0]:.3f} -> {found[-1]:.3f}, {ratio:.2f} of the first")
        assert len(found) == 20
        assert ratio < fall


def test_log_and_table(trained: Path):
    table = (trained / "training" / "dit.csv").read_text().splitlines()
    assert table[0] == ",".join(COLUMNS)
    assert [row.split(",")[0] for row in table[1:]] == [str(step) for step in range(3, STEPS + 1, 3)]
    lines = (trained / "training" / "dit.log").read_text().splitlines()
    assert any("images/s" in line and "left" in line for line in lines)
    assert any(line.startswith("memory: activations kept") for line in lines)


# What it writes


def test_both_backends_and_diffusers_draw_the_same(trained: Path):
    latents = noise.normal((1, 16, 4, 6), 5)
    _, expected = oracle.generate(trained, "a red circle", latents, steps=4, guidance=3.0)
    for backend in ("cpu", "mlx"):
        pipe = qwenimg.load(trained, backend=backend, precision="fp32", offline=True)
        found = pipe(
            "a red circle", negative_prompt=" ", latents=latents, width=48, height=32, steps=4, guidance=3.0, seed=0
        )
        difference = np.abs(found.pixels.astype(float) - expected)
        print(f"{backend}: {difference.max():.0f} of 255 at most, {difference.mean():.3f} on average")
        assert expected.std() > 10
        assert difference.max() <= PICTURE


def test_diffusers_reports_no_missing_weight(trained: Path):
    from transformers import Qwen2_5_VLForConditionalGeneration

    _, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(trained / "text_encoder", output_loading_info=True)
    print(info)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_latents_are_standardised(trained: Path):
    encoder = train_vae.Encoder(trained / "vae", CPU)
    latents = encoder(train_data.pictures(0, 8, (128, 128)))
    print(f"mean {latents.mean():.3f}, deviation by channel {latents.std(axis=(0, 2, 3)).round(2)}")
    assert np.abs(latents.mean(axis=(0, 2, 3))).max() < 1e-3  # the same pictures as measured
    assert latents.std(axis=(0, 2, 3)).max() < 1.001  # below 1 by the posterior's own variance


def test_template_is_34_tokens(trained: Path):
    tokenizer = qwen.load(trained / "tokenizer")
    prefix = tokenizer.encode(TEMPLATE.text.split("{}")[0])
    assert len(prefix) == TEMPLATE.dropped
    words = {word: len(tokenizer.encode(word)) for word in (" red", " circle", " background", "红色", "三角形")}
    print(words)
    assert set(words.values()) == {1}


def test_a_word_is_one_token_and_any_text_is_spelled(tmp_path: Path):
    from transformers import Qwen2Tokenizer

    vocabulary = bpe.learn(("red", " red", "圆", "reddish"))
    train_folder.write_tokenizer(tmp_path, vocabulary)
    ours, theirs = qwen.load(tmp_path), Qwen2Tokenizer.from_pretrained(tmp_path)
    for text in ("red", "a red 圆", "reddish 猫 🙂", "\u0000é"):
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert len(ours.encode("red")) == len(ours.encode("圆")) == 1


# Killed and resumed

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
import torch, torch._dynamo  # the latter is what a first step imports, once here for all stages
torch.set_num_threads(1)
from support.training_runs import options
from training import run as train_run
from training import stages as train
from training import vae as train_vae
train_vae.MEASURED = 8
train_run.LOG_EVERY = 1
def tell(text):
    if f" 8/12 " in text:
        os.kill(os.getpid(), signal.SIGKILL)
for stage in sys.argv[3:]:
    if not os.fork():
        train.train(options(stage, Path(sys.argv[2], stage), steps=12, save_every=5), tell, device="cpu")
        os._exit(0)
    print(stage, -os.waitstatus_to_exitcode(os.wait()[1]))
"""
STAGES = ("vae", "text", "dit")


@pytest.fixture(scope="module")
def killed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each stage, whose run was killed in its eighth step of twelve."""
    folder = tmp_path_factory.mktemp("killed")
    copied(trained, folder / "dit")
    folders = ":".join(str(Path(__file__).parents[2] / name) for name in ("src", "tests", "tools"))
    command = [sys.executable, "-c", KILLED, folders, folder, *STAGES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout.split() == [word for stage in STAGES for word in (stage, str(int(signal.SIGKILL)))], ended
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_killed_and_resumed_equals_unbroken(trained: Path, killed: Path, tmp_path: Path, stage: str):
    broken, whole = killed / stage, tmp_path / "whole"
    if stage == "dit":
        copied(trained, whole)
    config = options(stage, broken, steps=12, save_every=5)
    resumed = run(replace(config, resume=True))
    assert any(f"{stage}: steps 5 to 12" in line for line in resumed)
    run(replace(config, out=whole))
    compared = [f"training/{stage}.safetensors", *(str(p.relative_to(whole)) for p in whole.rglob("diffusion*"))]
    print(compared)
    for name in compared:
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name


def test_batches_are_the_same_from_any_step():
    def encode(images: np.ndarray) -> np.ndarray:
        return images[:, :1, ::8, ::8]

    sizes = ((32, 48), (48, 32), (32, 32))
    unbroken = train_data.LatentBatches(3, 8, sizes, encode)
    batches = [unbroken.batch(step) for step in range(20)]
    resumed = train_data.LatentBatches(3, 8, sizes, encode)
    for step in (13, 14, 19):
        again = resumed.batch(step)
        assert again.prompts == batches[step].prompts
        for name in ("latents", "noise", "levels"):
            assert np.array_equal(getattr(again, name), getattr(batches[step], name))
    assert len({batch.noise.tobytes() for batch in batches}) == 20


def test_each_picture_is_used_as_often_as_stated_and_then_never_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_data, "LAG", 4)
    numbers = itertools.count()

    def encode(images: np.ndarray) -> np.ndarray:
        return np.array([next(numbers) for _ in images], np.float32).reshape(-1, 1, 1, 1)

    made = train_data.LatentBatches(3, 2 * train_data.REUSE, ((32, 32),), encode)
    seen = Counter(float(latent) for step in range(200) for latent in made.batch(step).latents.ravel())
    print(Counter(seen.values()))
    assert max(seen.values()) == train_data.REUSE
    whole = 200 - 4 * (train_data.REUSE - 1)  # groups whose uses all lie in these steps
    assert sum(count == train_data.REUSE for count in seen.values()) == 2 * whole


def test_first_lessons_have_one_object_and_plain_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_data, "LAG", 2)
    made = train_data.LatentBatches(3, 4, ((32, 32),), lambda images: images[:, :1, ::8, ::8], simple=20)
    first = {prompt for step in range(14) for prompt in made.batch(step).prompts}  # 14 + 3 * 2 = 20
    later = [prompt for step in range(20, 60) for prompt in made.batch(step).prompts]
    print(sorted(first)[:5], later[:5])
    for prompt in first - {" "}:
        (thing,) = (asked := shapes_words.parse(prompt)).things
        assert None not in (thing.color, thing.size, asked.position, asked.background), prompt
        assert (thing.color, thing.shape) not in HELD_OUT_PAIRS
        assert re.fullmatch(r"an? \w+ \w+ \w+ (in|on|at) the \w+ on an? \w+ background", prompt), prompt
    assert any(not prompt.isascii() for prompt in later)
    assert any(len(shapes_words.parse(prompt).things) == 2 for prompt in later)


def test_half_of_the_noise_levels_are_not_shifted(with_parts: Path):
    """The others by the scheduler's exponential shift, in the form s / (s + (1 - s) / e^mu)."""
    stage = train_dit.DiTStage(options("dit", with_parts, batch=8), CPU, lambda text: None)
    made = stage.batches.batch(0)
    width, height = stage.batches.size(0)
    weight = np.exp(-by_size(stage.schedule, width * height // 256, 1))
    shifted = made.levels / (made.levels + (1 - made.levels) * weight)
    fine = np.arange(8) % 2 == 1
    expected = train_dit.time_features(np.where(fine, made.levels, shifted))
    found = stage.batch(0).features.numpy()  # in the order of the prompts' lengths
    apart = max(np.abs(expected - row).max(1).min() for row in found)
    print(f"{fine.sum()} of {len(found)} not shifted; features {apart:.1e} apart, e^mu {1 / weight:.2f}")
    assert len(found) == 2 * fine.sum() == 8 and weight < 0.5
    assert apart < 1e-4  # float32 of angles up to 1,000


@pytest.mark.parametrize("shape", [(5, 24, 24), (3, 40, 16), (2, 16, 60)])
def test_orthogonal_keeps_the_singular_vectors(shape: tuple[int, int, int]):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    found = u.mT @ train_optimizer.orthogonal(x) @ v.mT
    values = found.diagonal(dim1=1, dim2=2)
    apart = (found - torch.diag_embed(values)).abs().max()
    print(f"singular values {values.min():.2f} to {values.max():.2f}, vectors apart {apart:.1e}")
    assert values.min() > 0.3 and values.max() < 1.25  # the smallest ones of a square matrix need more iterations
    assert apart < 1e-10


def test_muon_by_its_formula():
    """Orthogonal gradients that stay the same: each step goes along them by about the rate, and nowhere else."""
    torch.manual_seed(1)
    weights = {name: torch.nn.Parameter(torch.randn(12, 4)) for name in "ab"}
    start = {name: p.detach().numpy().astype(np.float64) for name, p in weights.items()}
    gradients = {name: torch.linalg.qr(torch.randn(12, 4))[0] for name in "ab"}  # orthogonal, so momentum is too
    optimizer = train_optimizer.Optimizer(weights, ["a", "b"])
    rate = 1e-3
    long = train_optimizer.MUON_RATE * rate
    expected = {name: value.copy() for name, value in start.items()}
    for number in (1, 2):
        optimizer.step(weights, {name: one.clone() for name, one in gradients.items()}, rate, number)
        for name in expected:
            expected[name] *= 1 - long * train_optimizer.DECAY
    for name, p in weights.items():
        step = (expected[name] - p.detach().numpy()) / (long * 3**0.5)  # three times as many rows as columns
        ratio = (step * gradients[name].numpy()).sum() / (gradients[name].numpy() ** 2).sum()
        rest = np.abs(step - ratio * gradients[name].numpy()).max()
        print(f"{name}: {ratio / 2:.3f} of the gradient's direction a step, {rest:.1e} beside it")
        assert 0.65 < ratio / 2 < 1.25
        assert rest < 1e-3


def test_prompts_are_dropped_and_in_two_languages():
    rng = train_data.generator(0, train_data.STEP_KIND, 0)
    scenes = [train_data.shapes.random_scene(rng) for _ in range(3000)]
    prompts = [train_data.prompt(scene, rng, simple=False) for scene in scenes]
    dropped = sum(prompt == " " for prompt in prompts) / 3000
    chinese = sum(not prompt.isascii() for prompt in prompts) / 3000
    print(f"{dropped:.1%} dropped, {chinese:.1%} Chinese")
    assert abs(dropped - train_data.DROPPED) < 0.02
    assert abs(chinese - train_data.CHINESE * (1 - train_data.DROPPED)) < 0.03
    # a colour by itself is of the one object, and is never what a description says
    ones = [
        (prompt, scene.objects[0].color)
        for prompt, scene in zip(prompts, scenes, strict=True)
        if len(scene.objects) == 1
    ]
    alone = {(prompt, color) for prompt, color in ones if prompt != " " and not shapes_words.parse(prompt).things}
    share = sum(pair in alone for pair in ones) / len(ones)
    print(f"{share:.1%} of {len(ones)} prompts of one object are a colour only: {sorted(alone)[:4]}")
    assert abs(share - train_data.COLOR_ONLY * (1 - train_data.DROPPED)) < 0.03
    assert all(shapes_words.parse(f"{prompt} star").things[0].color == color for prompt, color in alone)


# The arithmetic


def test_time_features_are_those_of_inference():
    levels = np.array([0.0, 0.02, 0.3017, 0.75, 1.0])
    expected = np.stack([timesteps.timestep_features(1000 * level) for level in levels])
    difference = np.abs(train_dit.time_features(levels) - expected).max()
    print(f"largest difference {difference:.1e}")
    assert difference < 1e-4  # an angle of 1000 rounded to float32, which inference does and training does not


def test_shift_is_diffusers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    levels = np.linspace(0.01, 1, 37)
    expected = FlowMatchEulerDiscreteScheduler().time_shift(0.4871, 1.0, torch.from_numpy(levels)).numpy()
    assert np.abs(train_dit.shifted(levels, 0.4871) - expected).max() < 1e-12


def gradients(config: ShapesConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step, before the optimiser. The blocks are not the identity."""
    made = train.open_run(config, lambda text: None, CPU)
    with torch.no_grad():
        for parameter in made.learner.parameters.values():
            parameter += 0.02 * torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape)
    return made.learner.gradients(0, "float32", 1.0)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_and_checkpointing_change_no_gradient(with_parts: Path, stage: str):
    config = options(stage, with_parts, batch=6, seed=4)
    loss, expected = gradients(config)
    for changed in (replace(config, checkpointing=True), replace(config, accumulate=4)):
        other, found = gradients(changed)
        error = max(float((found[n] - g).norm() / (g.norm() + 1e-6)) for n, g in expected.items())
        print(f"{stage}: loss {loss:.6f} and {other:.6f}, gradients off by {error:.1e}")
        assert other == pytest.approx(loss, rel=1e-5)
        assert found.keys() == expected.keys()
        assert error < 1e-3  # float32 sums in another order


def test_parts_at_once_give_the_same_gradients(with_parts: Path):
    """Three threads with a third of the batch each; and the threads of a run have the cores that they were given."""
    config = options("dit", with_parts, batch=6, seed=4)
    threads = torch.get_num_threads()
    try:
        made = train.open_run(replace(config, threads=3), lambda text: None, CPU).learner
        assert made.workers is not None and made.workers.count == 3
        for workers in (made.maker, made.workers):
            assert workers.submit(lambda _: torch.get_num_threads(), 0).result() == 1
        assert len(made._parts(0)) == 3
        _, expected = gradients(replace(config, threads=1))
        _, found = gradients(replace(config, threads=3))
    finally:
        torch.set_num_threads(threads)
    error = max(float((found[n] - g).norm() / (g.norm() + 1e-6)) for n, g in expected.items())
    print(f"gradients off by {error:.1e}")
    assert found.keys() == expected.keys()
    assert error < 1e-3  # float32 sums in another order


def test_checkpointing_keeps_less(with_parts: Path):
    kept = []
    for checkpointing in (False, True):
        made = train.open_run(options("dit", with_parts, checkpointing=checkpointing), lambda text: None, CPU)
        made.loop.one()
        kept.append(made.learner.kept["float32"])
    print(f"{kept[0]} bytes, {kept[1]} with checkpointing")
    assert kept[1] < 0.5 * kept[0]


def test_mixed_precision_tells_estimate_and_measurement(with_parts: Path):
    lines = run(options("dit", with_parts, steps=10, precision="default", accumulate=2))
    print("\n".join(lines))
    assert "predict 3-8 bf16" in lines[0]
    assert "memory estimated at 70% of fp32's" in lines[0]
    assert "MB in float32" in lines[-1] and "MB in bfloat16" in lines[-1] and "estimated 70%" in lines[-1]


# Going on from weights


def test_init_goes_on_from_a_folder(trained: Path, tmp_path: Path):
    run(options("dit", tmp_path / "more", init=trained, steps=1, batch=4))
    made = train.open_run(options("dit", tmp_path / "again", init=trained), lambda text: None, CPU)
    stored = load_file(trained / "transformer" / train_folder.STEM)
    for name, value in stored.items():
        assert torch.equal(made.learner.parameters[name], value.float()), name
    for part in (
        "vae/config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/vocab.json",
    ):
        assert (tmp_path / "more" / part).read_bytes() == (trained / part).read_bytes(), part
    vae = train.open_run(options("vae", tmp_path / "third", init=trained), lambda text: None, CPU)
    assert not torch.equal(vae.learner.parameters["quant_conv.weight"], torch.zeros(32, 32, 1, 1))


def test_init_of_another_size(trained: Path, tmp_path: Path):
    with pytest.raises(ModelError, match="is a model of another size"):
        run(options("dit", tmp_path, init=trained, size=replace(SIZE, layers=3)))


def test_words_that_have_changed(with_parts: Path, monkeypatch: pytest.MonkeyPatch):
    run(options("dit", with_parts, steps=1))
    monkeypatch.setattr(train_folder, "vocabulary", lambda: bpe.learn(("hexagon",)))
    with pytest.raises(ModelError, match="of other words than this version's"):
        run(options("dit", with_parts, steps=2, resume=True))


# Errors: one line each, and nothing lost


def test_loss_that_is_not_a_number(with_parts: Path, monkeypatch: pytest.MonkeyPatch):
    real = train_dit.DiTStage.loss
    calls = []

    def loss(self: train_dit.DiTStage, batch: train_dit.Inputs, rows: slice) -> torch.Tensor:
        calls.append(1)
        return real(self, batch, rows) * (float("nan") if len(calls) == 8 else 1)

    monkeypatch.setattr(train_dit.DiTStage, "loss", loss)
    with pytest.raises(NumericsError) as caught:
        run(options("dit", with_parts, steps=10, save_every=5))
    print(caught.value)
    assert str(caught.value).startswith("step 7: the loss is nan in float32; the last checkpoint, ")
    assert "--resume, with a lower --rate" in str(caught.value)
    monkeypatch.undo()
    assert any("steps 5 to 10" in line for line in run(options("dit", with_parts, steps=10, resume=True)))


def test_full_disk(with_parts: Path, monkeypatch: pytest.MonkeyPatch):
    run(options("dit", with_parts, steps=2))
    before = (with_parts / "training" / "dit.safetensors").read_bytes()
    usage = atomic_files.shutil.disk_usage(with_parts)._replace(free=99)
    monkeypatch.setattr(atomic_files.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises((DoesNotFit, ModelError)) as caught:
        run(options("dit", with_parts, steps=4, resume=True))
    print(caught.value)
    assert "\n" not in str(caught.value)
    assert (with_parts / "training" / "dit.safetensors").read_bytes() == before


def test_foreign_checkpoints(with_parts: Path, trained: Path):
    run(options("dit", with_parts, steps=2))
    path = with_parts / "training" / "dit.safetensors"
    with pytest.raises(UsageError, match="a run is there already; go on with --resume"):
        run(options("dit", with_parts))
    with pytest.raises(ModelError, match="is of another run: batch was 4, now it is 6"):
        run(options("dit", with_parts, resume=True, batch=6))
    whole = path.read_bytes()
    for content, part in (
        (whole[:-100], "is not a whole checkpoint"),
        (b"hello", "is not a whole checkpoint"),
        ((trained / "transformer" / train_folder.STEM).read_bytes(), "is not a checkpoint of a training run"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=part):
            run(options("dit", with_parts, resume=True))
        assert path.read_bytes() == content


def test_resume_without_a_checkpoint(with_parts: Path):
    run(options("dit", with_parts, steps=1))
    (with_parts / "training" / "dit.safetensors").unlink()
    with pytest.raises(ModelError, match="no checkpoint here to resume"):
        run(options("dit", with_parts, resume=True))


def test_parts_that_are_not_there_yet(with_parts: Path, tmp_path: Path):
    with pytest.raises(ModelError, match=r"has no vae/ yet; run `python tools/train.py vae"):
        run(options("dit", tmp_path / "empty"))
    shutil.rmtree(with_parts / "text_encoder")
    with pytest.raises(ModelError, match=r"has no text_encoder/ yet; run `python tools/train.py text"):
        run(options("dit", with_parts))


def test_text_encoder_of_another_size(with_parts: Path):
    with pytest.raises(ModelError, match="is a text encoder of another size"):
        run(options("dit", with_parts, size=replace(SIZE, text_layers=2)))


# What the text encoder is asked


def test_answers_about_scenes():
    def told(scene: shapes.Scene) -> dict[str, str]:
        indices = train_text.answers_of(scene)
        return {q: values[i] for (q, values), i in zip(train_text.CLASSES.items(), indices, strict=True)}

    red, blue = ("red", "circle"), ("blue", "star")
    one = told(shapes.one(*red, "large", "left", "gray"))
    assert one == {
        "arrangement": "one",
        "position": "left",
        "background": "gray",
        "first shape": "circle",
        "first color": "red",
        "first size": "large",
        **{f"second {name}": "none" for name in ("shape", "color", "size")},
    }
    three = told(shapes.several(*red, "small", 3, "white"))
    assert (three["arrangement"], three["position"], three["second shape"]) == ("three", "none", "none")
    for relation in ("and", *shapes.RELATIONS):
        found = told(shapes.two(red, relation, blue, ("small", "medium"), "white"))
        assert (found["arrangement"], found["first color"], found["second color"]) == (relation, "red", "blue")
        assert (found["first size"], found["second size"]) == ("small", "medium")


def test_text_stage_goes_on_from_a_folder(trained: Path, tmp_path: Path):
    made = train.open_run(options("text", tmp_path / "text", init=trained), lambda text: None, CPU)
    stored = load_file(trained / "text_encoder" / "model.safetensors")
    layers = [name for name in made.learner.parameters if ".layers." in name]
    for name in layers:
        assert torch.equal(
            made.learner.parameters[name], stored["model." + name.removeprefix("text_encoder.")].float()
        ), name
    assert layers


def test_transformer_stage_leaves_the_text_encoder_alone(with_parts: Path):
    before = (with_parts / "text_encoder" / "model.safetensors").read_bytes()
    made = train.open_run(options("dit", with_parts), lambda text: None, CPU)
    assert not any("embed_tokens" in name for name in made.learner.parameters)
    run(options("dit", with_parts, steps=2))
    assert (with_parts / "text_encoder" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "part"),
    [("100", "multiples of 16"), ("16", "from 32 to 2048"), ("ax3", "is not a side"), ("32x32x32", "is not a side")],
)
def test_sizes_that_no_vae_takes(text: str, part: str, tmp_path: Path):
    with pytest.raises(UsageError, match=part):
        options("vae", tmp_path, sizes=parse_sizes(text))


def test_sizes():
    assert parse_sizes("128, 160x96,96X160") == ((128, 128), (160, 96), (96, 160))


# The command


def test_command_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from train import train as command

    monkeypatch.chdir(tmp_path)
    words = ["vae", "--out", "m", "--batch", "2", "--size", "32", "--backend", "cpu", "--threads", "1"]
    for more in (["--steps", "1"], ["--steps", "2", "--resume"]):
        result = CliRunner().invoke(command, [*words, *more], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert "vae: steps 1 to 2" in (tmp_path / "m" / "training" / "vae.log").read_text()
    assert os.listdir(tmp_path / "m" / "vae")  # noqa: PTH208


def test_command_refuses(tmp_path: Path):
    from train import train as command

    for words, kind in (
        (["--backend", "mlx"], SystemExit),
        (["--phases", "warm=100"], UsageError),
        (["--steps", "0"], UsageError),
        (["--resume"], UsageError),
    ):
        result = CliRunner().invoke(command, ["vae", "--out", str(tmp_path / "new"), *words])
        assert isinstance(result.exception, kind), (words, result.exception)
