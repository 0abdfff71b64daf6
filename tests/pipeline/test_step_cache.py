"""The step cache: calls that reuse against the networks' own blocks run by hand, against diffusers' first-block cache,
and the same calls on both backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.family_cases import BACKENDS, SEEN, see_few_pixels
from support.opened_parts import open_part
from support.recipe_cases import recipe_from_png
from support.relative import relative

import qwenimg
from qwenimg import Pipeline, UsageError
from qwenimg.cli.main import run
from qwenimg.common.jobs.image_options import merged
from qwenimg.common.pictures.pixels import psnr
from qwenimg.common.pipeline.steps.step_cache import StepCache
from qwenimg.common.request import cached_calls
from qwenimg.common.request.request import request_of
from qwenimg.common.sampling.table import SAMPLERS

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 8, "guidance": 3.0, "seed": 7}
PROMPT = "a red circle"
LATENTS = 1e-4  # relative L2 of the final latents of both backends in float32
# A share for each tiny model, whose weights are random, that some calls stay below and some do not.
SHARES = {
    "qwen": 0.9, "sd3": 0.9, "z-image": 0.9, "flux2-base": 1.0, "sd15": 0.1, "pixart": 0.5, "auraflow": 1.0,
    "sana": 0.5, "hunyuan": 0.7, "sd21": 0.2, "sdxl": 0.3, "longcat": 0.8, "chroma": 0.9, "ernie": 0.8, "krea2": 0.9,
    "anima": 0.4, "flux2-dev": 0.9,
}  # fmt: skip
LIKE_OTHERS = ("sd21", "sdxl")
LISTED = ("flux3-base", "flux3-klein", "flux2-kv", "longcat-edit")
"""Whose calls differ by more than they are at most allowed to, or which need a picture: by a list of calls."""

Opened = Callable[[str, str], Pipeline]


@pytest.fixture(scope="module")
def opened(tiny: dict[str, Path]) -> Opened:
    """The tiny model of a kind on a backend, opened once."""
    pipes: dict[tuple[str, str], Pipeline] = {}

    def call(kind: str, backend: str) -> Pipeline:
        if (kind, backend) not in pipes:
            where = "shapes" if kind == "builtin" else tiny[kind]
            pipes[kind, backend] = qwenimg.load(where, backend=backend, precision="fp32")
        return pipes[kind, backend]

    return call


def cached(made: qwenimg.Result) -> frozenset[int]:
    return cached_calls.parse(dict(made.recipe)["cached_calls"])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in LIKE_OTHERS else []) for kind in SHARES]
)
@pytest.mark.sample(0)
def test_both_backends_reuse_in_the_same_calls(opened: Opened, kind: str) -> None:
    made = [opened(kind, backend)(PROMPT, **ASKED, step_cache=SHARES[kind]) for backend in BACKENDS]
    whole = opened(kind, "cpu")(PROMPT, **ASKED)
    error = relative(made[1].latents, made[0].latents)
    print(f"{kind}: {made[0].recipe['step_cache_effect']}; both backends {error:.1e}")
    assert cached(made[0]) == cached(made[1]) and 0 < len(cached(made[0])) < ASKED["steps"]
    assert error <= LATENTS
    assert relative(made[0].latents, whole.latents) > 10 * LATENTS  # else nothing was reused


@pytest.mark.parametrize("kind", LISTED)
@pytest.mark.sample(0)
def test_both_backends_reuse_in_calls_of_a_list(opened: Opened, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    see_few_pixels(monkeypatch)
    picture = {"image": SEEN} if kind in ("longcat-edit", "flux2-kv") else {}
    listed = {"cached_calls": "3,4,7"}
    made = [opened(kind, backend)(PROMPT, **ASKED, **picture, **listed) for backend in BACKENDS]
    whole = opened(kind, "cpu")(PROMPT, **ASKED, **picture)
    error = relative(made[1].latents, made[0].latents)
    print(f"{kind}: {made[0].recipe['step_cache_effect']}; both backends {error:.1e}")
    assert cached(made[0]) == cached(made[1]) == {3, 4, 7} and error <= LATENTS
    assert relative(made[0].latents, whole.latents) > 10 * LATENTS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_off_and_nothing_reused_are_the_whole_run_bit_for_bit(opened: Opened, backend: str) -> None:
    for kind in SHARES.keys() - set(LIKE_OTHERS):
        pipe = opened(kind, backend)
        asked = ASKED | {"steps": 3}
        whole = pipe(PROMPT, **asked)
        for more in ({"step_cache": 0.0}, {"step_cache": 1e-9}, {"cached_calls": "none"}, {"cached_calls": "1"}):
            made = pipe(PROMPT, **asked, **more)
            assert made.latents.tobytes() == whole.latents.tobytes(), (kind, more)
        assert "cached_calls" not in whole.recipe and cached(made) == frozenset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_a_list_is_followed(opened: Opened, backend: str) -> None:
    """That of a recipe makes its picture again, on the other backend too; it chooses for itself no longer."""
    pipe = opened("qwen", backend)
    first = pipe(PROMPT, **ASKED, step_cache=SHARES["qwen"])
    again = pipe(PROMPT, **ASKED, step_cache=0.1, cached_calls=dict(first.recipe)["cached_calls"])
    assert again.latents.tobytes() == first.latents.tobytes() and cached(again) == cached(first)
    assert cached(pipe(PROMPT, **ASKED, cached_calls="2, 5-6,800")) == {2, 5, 6}


BUILT_IN = {"width": 32, "height": 32, "steps": 4, "seed": 3, "step_cache": 0.6}


@pytest.mark.sample(0)
def test_a_sampler_that_asks_twice_counts_calls(opened: Opened) -> None:
    made = [opened("builtin", backend)(PROMPT, **BUILT_IN, sampler="heun") for backend in BACKENDS]
    assert cached(made[0]) == cached(made[1])
    assert "of 7 calls" in made[0].recipe["step_cache_effect"]  # the last step has one


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["builtin", "sd15"])
def test_every_sampler_reuses_in_the_same_calls_on_both_backends(opened: Opened, kind: str) -> None:
    flow, asked = kind == "builtin", BUILT_IN if kind == "builtin" else ASKED | {"step_cache": SHARES[kind]}
    some = list[str]()
    for name in [one.name for one in SAMPLERS.values() if (one.flow or not flow) and not one.adaptive]:
        made = [opened(kind, backend)(PROMPT, **asked, sampler=name) for backend in BACKENDS]
        print(f"{kind} {name}: {made[0].recipe['step_cache_effect'].split(',')[0]}: {made[0].recipe['cached_calls']}")
        assert cached(made[0]) == cached(made[1]) and 1 not in cached(made[0]), name
        some += [name] if cached(made[0]) else []
    assert len(some) > 15  # else there was little to compare


def test_a_sampler_that_chooses_its_steps_is_refused(opened: Opened) -> None:
    with pytest.raises(UsageError, match="step-cache: dpm_adaptive chooses its steps"):
        opened("sd15", "cpu").check(PROMPT, sampler="dpm_adaptive", step_cache=0.1)


@pytest.mark.sample(0)
def test_the_command_compares_with_the_whole_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of seconds and PSNR is in the recipe, and --from makes the same pixels by the recipe's calls."""
    monkeypatch.chdir(tmp_path)
    common = ["-m", "shapes", "--backend", "cpu", "--quiet"]
    drawn = [PROMPT, "-W", "32", "-H", "32", "--steps", "5", "-s", "3", *common]
    assert run([*drawn, "--step-cache", "0.4", "--step-cache-check", "-o", "a.png"]) == 0
    assert run([*drawn, "-o", "whole.png"]) == 0
    assert run(["--from", "a.png", *common, "-o", "again.png"]) == 0
    assert run([*drawn, "--step-cache-check", "-o", "b.png"]) == 2
    assert "--step-cache-check compares what --step-cache draws" in capfd.readouterr().err
    a, whole, again = (np.asarray(Image.open(f"{name}.png")) for name in ("a", "whole", "again"))
    effect = dict(recipe_from_png(Path("a.png")))["step_cache_effect"]
    print(effect)
    assert np.array_equal(a, again) and not np.array_equal(a, whole)
    error = np.mean((a.astype(float) - whole) ** 2)
    assert f"against the whole run PSNR {10 * np.log10(255**2 / error):.1f} dB, " in str(effect)


# By hand


def test_reuse_by_hand_in_qwen_images_transformer(opened: Opened) -> None:
    """Calls of one run, seen by hooks, against the blocks run alone: the first block's update is compared, and what the
    others added in the last whole call is added again."""
    pipe = opened("qwen", "cpu")
    component = open_part(pipe, "transformer")
    blocks, seen = component.model.transformer_blocks, list[dict[str, torch.Tensor]]()

    def into(block: Any, given: Any) -> None:
        seen.append({"in": given[0].clone()})

    def behind(block: Any, given: Any, made: Any) -> None:
        seen[-1]["first"] = made[0].clone()

    def last(block: Any, given: Any, made: Any) -> None:
        seen[-1]["last"] = made[0].clone()

    def final(norm: Any, given: Any) -> None:
        seen[-1]["out"] = given[0].clone()

    hooks = [
        blocks[0].register_forward_pre_hook(into),
        blocks[0].register_forward_hook(behind),
        blocks[-1].register_forward_hook(last),
        component.model.norm_out.register_forward_pre_hook(final),
    ]
    made = pipe(PROMPT, **ASKED, step_cache=SHARES["qwen"])
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2 * ASKED["steps"]  # one call has two branches, in turn
    reused = set[int]()
    kept: list[dict[str, torch.Tensor]] = []
    for call in range(1, ASKED["steps"] + 1):
        pair = seen[2 * call - 2 : 2 * call]
        if "last" in pair[0]:
            assert all(torch.equal(one["out"], one["last"]) for one in pair)
            if kept:
                assert change(pair[0], kept[0]) > SHARES["qwen"]
            kept = pair
            continue
        reused.add(call)
        assert change(pair[0], kept[0]) <= SHARES["qwen"]
        for one, before in zip(pair, kept, strict=True):
            assert torch.equal(one["out"], one["first"] + (before["last"] - before["first"]))
    assert reused == cached(made) and 0 < len(reused) < ASKED["steps"] - 1


def change(now: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    """In float64."""
    a, b = (one["first"].double() - one["in"].double() for one in (now, before))
    return float((a - b).abs().mean() / b.abs().mean())


@pytest.mark.sample(0)
def test_reuse_by_hand_in_a_unet(opened: Opened) -> None:
    """A call that reuses gives the last up block what went into it in the last whole call, and its own skips."""
    pipe = opened("sd15", "cpu")
    unet = open_part(pipe, "unet")
    deep, calls = list[torch.Tensor](), {"mid": 0, "up": 0}

    def into(block: Any, given: Any) -> None:
        deep.append(given[0].clone())
        calls["up"] += 1

    def middle(block: Any, given: Any) -> None:
        calls["mid"] += 1

    hooks = [
        unet.model.up_blocks[-1].register_forward_pre_hook(into),
        unet.model.mid_block.register_forward_pre_hook(middle),
    ]
    made = pipe(PROMPT, **ASKED, cached_calls="3,4,7", sampler="euler")
    for hook in hooks:
        hook.remove()
    assert calls == {"mid": ASKED["steps"] - 3, "up": ASKED["steps"]} and cached(made) == {3, 4, 7}
    same = {i + 1 for i in range(1, len(deep)) if torch.equal(deep[i], deep[i - 1])}
    assert same == {3, 4, 7}


def test_reuse_by_hand_in_z_images_transformer(opened: Opened) -> None:
    """What the layers behind the first added to image, text and pads in the last whole call is added again; the
    refiners always run."""
    pipe, skipped = opened("z-image", "cpu"), {3, 4, 7}
    model = open_part(pipe, "transformer").model
    seen, refined = list[dict[str, torch.Tensor]](), list[int]()

    def behind(block: Any, given: Any, made: Any) -> None:
        seen.append({"first": made.clone()})

    def last(block: Any, given: Any, made: Any) -> None:
        seen[-1]["last"] = made.clone()

    def final(layer: Any, given: Any) -> None:
        seen[-1]["out"] = given[0].clone()

    hooks = [
        model.noise_refiner[0].register_forward_hook(lambda *_: refined.append(1)),
        model.layers[0].register_forward_hook(behind),
        model.layers[-1].register_forward_hook(last),
        model.final_layer.register_forward_pre_hook(final),
    ]
    made = pipe(PROMPT, **(ASKED | {"guidance": 0.0}), cached_calls="3,4,7")
    for hook in hooks:
        hook.remove()
    assert cached(made) == skipped and len(seen) == len(refined) == ASKED["steps"]
    kept: dict[str, torch.Tensor] = {}
    for call, one in enumerate(seen, 1):
        kept = kept if call in skipped else one
        assert ("last" in one) == (call not in skipped)
        stream = one["first"] + (kept["last"] - kept["first"]) if call in skipped else one["last"]
        assert torch.equal(one["out"], stream[:, : one["out"].shape[1]])


@pytest.mark.parametrize("kind", ["flux2-base", "sd3"])
@pytest.mark.sample(0)
def test_reuse_by_hand_in_a_transformer_of_two_streams(opened: Opened, kind: str) -> None:
    """What all blocks behind the first added to the image, and to a reference of FLUX.2, in the last whole call is
    added again, and the text stays as the first block left it."""
    pipe, skipped = opened(kind, "cpu"), {3, 4, 7}
    model = open_part(pipe, "transformer").model
    seen = list[dict[str, torch.Tensor]]()
    hooks = [
        model.transformer_blocks[0].register_forward_hook(
            lambda _, given, made: seen.append({"first": made[0].clone()})
        ),
        getattr(model, "single_transformer_blocks", model.transformer_blocks)[-1].register_forward_hook(
            lambda _, given, made: seen[-1].update(last=made[0].clone())
        ),
        model.norm_out.register_forward_pre_hook(lambda _, given: seen[-1].update(out=given[0].clone())),
    ]
    picture = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    more = {"image": picture} if kind == "flux2-base" else {}
    made = pipe(PROMPT, **(ASKED | {"guidance": 1.0}), **more, cached_calls="3,4,7")
    for hook in hooks:
        hook.remove()
    assert cached(made) == skipped and len(seen) == ASKED["steps"]
    kept: dict[str, torch.Tensor] = {}
    for call, one in enumerate(seen, 1):
        whole = call not in skipped
        assert ("last" in one) == whole
        kept = one if whole else kept
        stream = one["last"] if whole else one["first"] + (kept["last"] - kept["first"])
        assert stream.shape[1] == (1 + len(more)) * one["out"].shape[1]
        assert torch.equal(one["out"], stream[:, : one["out"].shape[1]])


def test_against_diffusers_first_block_cache(opened: Opened, tiny_folder: Path) -> None:
    """The same calls and latents as diffusers' own hook, of one branch (it has a choice for each branch)."""
    from diffusers import FirstBlockCacheConfig
    from support import oracle

    from qwenimg.common.numbers import noise

    share, steps = SHARES["qwen"], ASKED["steps"]
    initial = noise.normal((1, 16, 4, 6), 7)
    reference = oracle.pipeline(tiny_folder, torch.float32).transformer
    runs = list[int]()
    count = reference.transformer_blocks[1].attn.register_forward_hook(lambda *_: runs.append(1))
    reference.enable_cache(FirstBlockCacheConfig(threshold=share))  # also where it ran without one before
    try:
        expected, _ = oracle.generate(tiny_folder, PROMPT, initial, steps=steps, guidance=1.0)
    finally:
        count.remove()
        reference.disable_cache()
    asked = {"width": 48, "height": 32, "steps": steps, "guidance": 1.0, "latents": initial, "seed": 0}
    for backend in BACKENDS:
        made = opened("qwen", backend)(PROMPT, **asked, step_cache=share)
        error = relative(made.latents, expected)
        print(f"{backend}: {len(cached(made))} of {steps} cached, diffusers {steps - len(runs)}, latents {error:.1e}")
        assert len(cached(made)) == steps - len(runs) > 0
        assert error <= LATENTS


# With other options


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_with_what_else_changes_a_run(opened: Opened, backend: str) -> None:
    """Both branches in one batch, the end of guidance, a picture to start from."""
    pipe = opened("qwen", backend)
    share = {"step_cache": SHARES["qwen"]}
    turn = pipe(PROMPT, **ASKED, **share)
    pipe.model.batch_guidance = True
    batch = pipe(PROMPT, **ASKED, **share)
    pipe.model.batch_guidance = None
    assert cached(batch) == cached(turn) and relative(batch.latents, turn.latents) <= LATENTS
    ended = pipe(PROMPT, **ASKED, cached_calls="2-8", cfg_end=0.5)
    assert cached(ended) == {2, 3, 4, 6, 7, 8}  # the first call without guidance has nothing to reuse
    picture = np.random.default_rng(3).integers(0, 256, (32, 48, 3), np.uint8)
    started = pipe(PROMPT, **ASKED, **share, image=picture, strength=0.6)
    assert "of 5 calls" in started.recipe["step_cache_effect"]


def test_what_is_kept_is_planned(opened: Opened) -> None:
    for kind, side in (("qwen", 1024), ("sd15", 1024), ("z-image", 768), ("flux2-base", 1024)):
        pipe = opened(kind, "cpu")
        asked = ASKED | {"width": side, "height": side}
        whole, more = (
            pipe._fit.check(pipe.check(PROMPT, **asked, step_cache=share), pipe.model) for share in (0.0, 0.1)
        )
        peaks = [next(s.activations for s in one.stages if s.name == "denoise") for one in (whole, more)]
        print(kind, *peaks)
        assert 1.1 < peaks[1] / peaks[0] < 1.6


def test_what_a_run_says(opened: Opened) -> None:
    made = opened("qwen", "cpu")(PROMPT, **ASKED, step_cache=SHARES["qwen"])
    recipe = dict(made.recipe)
    assert recipe["step_cache"] == SHARES["qwen"]
    assert recipe["step_cache_effect"].startswith(f"{len(cached(made))} of 8 calls cached, about ")
    assert merged({"step_cache": 0.1, "cached_calls": "2"}, {"step_cache": 0.2}) == {"step_cache": 0.2}


def test_seconds_that_are_saved() -> None:
    """By the median of what whole calls took under the same guidance."""
    cache = StepCache(SimpleNamespace(), request_of({"prompt": "x", "step_cache": 0.1}))  # type: ignore[arg-type]
    for phase, calls, reused, seconds in (
        (1, 1, 0, 9.0),
        (1, 1, 0, 2.0),
        (1, 2, 0, 4.0),
        (1, 2, 1, 3.0),
        (2, 1, 1, 0.5),
    ):
        cache._phase = phase
        cache.calls += calls
        cache.reused += [cache.calls] * reused
        cache.timed(seconds)
    assert cache.saved() == pytest.approx(2 * 2.0 - 3.0)


@pytest.mark.parametrize("text", ["none", "2", "2-4,7", "2,4,6-900"])
def test_lists_of_calls(text: str) -> None:
    assert cached_calls.text(cached_calls.parse(text)) == text


@pytest.mark.parametrize("text", ["0", "3-2", "x", "1,,2", "12345", "2-", "-3"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"cached-calls is .*expected numbers of calls"):
        request_of({"prompt": "x", "cached_calls": text})


def test_psnr() -> None:
    a = np.zeros((4, 5, 3), np.uint8)
    assert psnr(a, a) == np.inf and psnr(a, a + 255) == 0 and psnr(a, a + 5) == pytest.approx(34.15, abs=0.01)
