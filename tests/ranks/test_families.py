"""Pictures of every family by several ranks, as threads: the latents of one process."""

from __future__ import annotations

import queue
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.family_cases import see_few_pixels
from support.relative import relative
from support.thread_ranks import SECONDS, ThreadGroup, opened, together
from support.tiny_control import write_control_lora, write_controlnet, write_patches
from support.tiny_controlnet import write_controlnet as write_unet_controlnet
from support.tiny_flux_control import write_controlnet as write_flux_controlnet
from support.tiny_ip_adapter import write_adapter
from support.tiny_model import tiny_dit
from support.tiny_sd import _SMALL, UNETS

from qwenimg import NumericsError, UsageError
from qwenimg.common.families.qwen_image import captions
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.texts.captions import CaptionTexts
from qwenimg.common.pipeline.result import Result
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request import cached_calls
from qwenimg.common.request.request import Request

# Branches on ranks of their own are computed as on one, except by the UNet, which alone has both in a batch: 1.2e-6
# apart. With fewer tokens at once a library may multiply in another order: 9e-7 after three steps, in Z-Image alone.
APART = 3e-6
SIZE: dict[str, Any] = {"width": 80, "height": 112, "steps": 3, "seed": 3, "negative_prompt": "blue"}  # 35 tokens
GUIDED: dict[str, dict[str, Any]] = {
    "qwen": {"guidance": 3.0},
    "z-image": {"guidance": 3.0, "cfg_truncation": 0.7},
    "flux-dev": {"guidance": 3.0, "true_cfg": 2.0},
    "sd3": {"guidance": 3.0, "cfg_end": 0.5},
    "longcat": {"guidance": 3.0},
    "ovis": {"guidance": 3.0},
    "chroma": {"guidance": 3.0},
    "auraflow": {"guidance": 3.0},
    "flux2-dev": {"guidance": 3.0, "true_cfg": 2.0},
    "ernie": {"guidance": 3.0},
    "sd15": {"guidance": 3.0, "sampler": "euler_a"},
}

# Of a step cache, at which some calls of these loud models are reused, and branches that decide alone differ.
THRESHOLD = {"qwen": 1.0, "z-image": 1.0, "sd15": 0.3}


def latents(folder: Path, group: ThreadGroup | None, asked: dict[str, Any]) -> np.ndarray | None:
    """Of a run on one rank; None where another one decodes."""
    asked = {"prompt": "a red circle"} | asked
    with closing(opened(folder, group, precision="fp32")) as pipe:
        request = pipe.check(**asked)
        if group is not None and group.rank:
            pipe.follow(request)
            return None
        result = list(pipe.stream(**asked))[-1]
        assert isinstance(result, Result)
        assert pipe.headline().startswith("cpu on CPU" if group is None else f"cpu on {group.size} x CPU")
        return result.latents


def check(folder: Path, ranks: int, asked: dict[str, Any], exactly: bool, expected: np.ndarray) -> None:
    found, *others = together(ranks, lambda group: latents(folder, group, asked))
    assert others == [None] * (ranks - 1)
    error = relative(found, expected)
    print(f"{ranks} ranks: {error:.1e}")
    assert error == 0 if exactly else error <= APART


@pytest.mark.parametrize("kind", GUIDED)
@pytest.mark.sample(0)
def test_branches_then_tokens_then_both(kind: str, tiny: dict[str, Path]) -> None:
    asked = SIZE | GUIDED[kind]
    expected = latents(tiny[kind], None, asked)
    assert expected is not None
    check(tiny[kind], 2, asked, kind != "sd15", expected)
    if kind == "sd15":
        with pytest.raises(UsageError, match="this picture has 2"):
            check(tiny[kind], 3, asked, True, expected)
        return
    check(tiny[kind], 3, asked, False, expected)
    if kind == "qwen":
        check(tiny[kind], 6, asked, False, expected)


@pytest.mark.parametrize(("ranks", "guidance"), [(2, 0.0), (4, 3.0)])
@pytest.mark.sample(0)
def test_queries_that_share_keys(tiny: dict[str, Path], ranks: int, guidance: float) -> None:
    """Four heads on two ranks of a branch; each pair has keys of its own."""
    asked = SIZE | {"guidance": guidance}
    expected = latents(tiny["krea2"], None, asked)
    assert expected is not None
    check(tiny["krea2"], ranks, asked, False, expected)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.sample(0)
def test_parts_of_a_prompt_are_branches_and_change_together(tiny: dict[str, Path], ranks: int) -> None:
    """Three branches, of which two ranks compute two and then the third."""
    asked = SIZE | {"guidance": 3.0, "prompt": "a [red|blue] circle AND a small dog :0.5"}
    expected = latents(tiny["sd15"], None, asked)
    assert expected is not None
    check(tiny["sd15"], ranks, asked, False, expected)


def check_references(folder: Path, count: int) -> None:
    """Tokens of pictures behind the image's."""
    picture = np.random.default_rng(3).integers(0, 256, (36, 52, 3), np.uint8)
    asked = SIZE | {"guidance": 1.0, "image": [picture, picture[:, ::-1].copy()][:count], "steps": 2}
    expected = latents(folder, None, asked)
    assert expected is not None
    check(folder, 3, asked, False, expected)


@pytest.mark.sample(0)
def test_references_are_shared_too(tiny: dict[str, Path]) -> None:
    check_references(tiny["flux2-klein"], 2)


@pytest.mark.slow
def test_references_with_a_modulation_of_their_own(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    see_few_pixels(monkeypatch)
    check_references(tiny["qwen-2511"], 2)


@pytest.mark.slow
def test_layers_are_tokens_like_others(tiny_layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = np.random.default_rng(3).integers(0, 256, (64, 48, 4), np.uint8)
    asked = {"image": picture, "steps": 2, "seed": 3, "guidance": 3.0, "layers": 2}
    expected = latents(tiny_layered, None, asked)
    assert expected is not None
    check(tiny_layered, 2, asked, True, expected)
    check(tiny_layered, 3, asked, False, expected)


@pytest.mark.parametrize("kind", ["qwen21", "pixart", "sana", "hunyuan"])
@pytest.mark.sample(0)
def test_a_model_that_shares_branches_alone(tiny: dict[str, Path], kind: str) -> None:
    expected = latents(tiny[kind], None, SIZE | {"guidance": 3.0})
    assert expected is not None
    check(tiny[kind], 2, SIZE | {"guidance": 3.0}, True, expected)
    with pytest.raises(UsageError, match="here devices share only the branches of guidance"):
        check(tiny[kind], 3, SIZE | {"guidance": 3.0}, True, expected)


@pytest.mark.sample(0)
def test_a_third_branch(tiny: dict[str, Path]) -> None:
    """Skip-layer guidance, in some of the steps: of 3 ranks two repeat a branch where there is one."""
    asked = SIZE | {"guidance": 3.0, "steps": 6, "cfg_end": 0.8, "skip_layers": "1"}
    with closing(opened(tiny["sd3"], None, precision="fp32")) as pipe:
        assert len(pipe.model.guidance.branches(pipe.check("x", **asked))) == 3
    expected = latents(tiny["sd3"], None, asked)
    assert expected is not None
    check(tiny["sd3"], 3, asked, True, expected)


def cached(folder: Path, ranks: int, asked: dict[str, Any]) -> tuple[np.ndarray, str]:
    """The latents, and the calls that a step cache has spared."""

    def drawn(group: ThreadGroup | None) -> Any:
        with closing(opened(folder, group, precision="fp32")) as pipe:
            if group is not None and group.rank:
                pipe.follow(pipe.check("a red circle", **asked))
                return None
            result = list(pipe.stream("a red circle", **asked))[-1]
            assert isinstance(result, Result)
            return result.latents, result.recipe["cached_calls"]

    return drawn(None) if ranks == 1 else together(ranks, drawn)[0]


@pytest.mark.parametrize("kind", ["qwen", "z-image", "sd15"])
@pytest.mark.sample(0)
def test_a_step_cache_takes_the_decisions_of_one_device(kind: str, tiny: dict[str, Path]) -> None:
    """By the update of the prompt's branch: the other branch, which other ranks have, would often decide otherwise."""
    asked = SIZE | GUIDED[kind] | {"steps": 12, "step_cache": THRESHOLD[kind]}
    expected, calls = cached(tiny[kind], 1, asked)
    print(f"cached calls: {calls}")
    assert 2 <= len(cached_calls.parse(calls)) <= 10, "some of 12 are, and some are not"
    for ranks in (2, 3)[: 1 if kind == "sd15" else 2]:
        found, theirs = cached(tiny[kind], ranks, asked)
        error = relative(found, expected)
        print(f"{ranks} ranks: {error:.1e}")
        assert theirs == calls and (error == 0 if ranks == 2 and kind != "sd15" else error <= APART)
    repeated, _ = cached(tiny[kind], 2, {**asked, "step_cache": 0.0, "cached_calls": calls})
    assert relative(repeated, expected) <= APART, "a repeated picture follows the list"


@pytest.mark.sample(0)
def test_ranks_that_decide_alone_are_caught(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SIZE | GUIDED["qwen"] | {"steps": 12, "step_cache": THRESHOLD["qwen"]}
    expected, _ = cached(tiny["qwen"], 1, asked)
    monkeypatch.setattr(ThreadGroup, "summed", lambda group, numbers: list(numbers))
    error = relative(cached(tiny["qwen"], 2, asked)[0], expected)
    print(f"each by its own branch: {error:.1e}")
    assert error > APART


@pytest.mark.parametrize(("ranks", "words"), [(2, "step 1: "), (3, "transformer, step 1: a value that is not finite")])
@pytest.mark.sample(1)
def test_values_that_are_not_finite_end_all_ranks(
    ranks: int, words: str, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share tokens do not search for the operation: none would find it where the others do."""
    call = Pass.__call__
    monkeypatch.setattr(Pass, "__call__", lambda one, *given: call(one, *given) * float("nan"))
    with pytest.raises(NumericsError, match=words):
        together(ranks, lambda group: latents(tiny["qwen"], group, SIZE | {"guidance": 3.0}))


def test_the_plan_of_a_rank(tiny: dict[str, Path]) -> None:
    """Half of the passes and operations by two ranks; a part of the activations by three."""

    def planned(group: ThreadGroup | None) -> tuple[float, int, float]:
        with closing(opened(tiny["qwen"], group, precision="fp32")) as pipe:
            asked = SIZE | {"width": 512, "height": 512, "guidance": 3.0}
            request = pipe.check("a red circle", **asked)
            stages = pipe.model.stages(request, pipe.model.plan(request), LatentShape(1, 64, 64))
            stage = next(one for one in stages if one.name == "denoise")
            return stage.operations, stage.splits[0].activations, stage.splits[0].passes

    alone, two, three = planned(None), together(2, planned)[1], together(3, planned)[1]
    print(alone, two, three)
    assert two == (alone[0] / 2, alone[1], alone[2] / 2)
    assert three[0] == alone[0] / 3 and alone[1] / 3 < three[1] < alone[1] and three[2] == alone[2]


def test_the_passes_of_a_rank(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks computes one branch of three steps: three calls in place of six."""
    calls, call = list[int](), Pass.__call__
    monkeypatch.setattr(Pass, "__call__", lambda one, *given: (calls.append(0), call(one, *given))[1])
    together(2, lambda group: latents(tiny["qwen"], group, SIZE | {"guidance": 3.0}))
    assert len(calls) == 2 * 3


@pytest.mark.parametrize("kind", ["union", "patches", "lora", "flux"])
@pytest.mark.sample(0)
def test_control_beside_branches(kind: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    model = "flux-dev" if kind == "flux" else "qwen"
    nets = {
        "union": lambda: write_controlnet(tmp_path / "net"),
        "flux": lambda: write_flux_controlnet(tmp_path / "net"),
        "patches": lambda: write_patches(tmp_path / "net.safetensors"),
        "lora": lambda: write_control_lora(tmp_path / "lora.safetensors", tiny_dit()),
    }
    net = nets[kind]()
    picture = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
    asked = SIZE | GUIDED[model] | {"control": (net, picture)}
    expected = latents(tiny[model], None, asked)
    assert expected is not None
    without = latents(tiny[model], None, SIZE | GUIDED[model])
    assert without is not None and relative(without, expected) > 0.01
    check(tiny[model], 2, asked, True, expected)
    with pytest.raises(UsageError, match="share the branches of guidance alone"):
        together(3, lambda group: latents(tiny[model], group, asked))


@pytest.mark.parametrize("kinds", [("network",), ("adapter",), ("network", "adapter")], ids="-".join)
@pytest.mark.sample(1)
def test_sd_control_beside_branches(kinds: tuple[str, ...], tiny: dict[str, Path], tmp_path: Path) -> None:
    """A ControlNet and an IP-Adapter on two ranks, each with one branch: the latents of one process."""
    picture = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
    controls = {
        "network": lambda: (write_unet_controlnet(tmp_path / "net", UNETS["sd15"] | _SMALL), picture, 0.8),
        "adapter": lambda: (write_adapter(tmp_path, "sd15"), [picture, picture[::-1]], 0.6),
    }
    asked = SIZE | GUIDED["sd15"] | {"control": [controls[kind]() for kind in kinds]}
    expected, without = (latents(tiny["sd15"], None, one) for one in (asked, SIZE | GUIDED["sd15"]))
    assert expected is not None and without is not None and relative(without, expected) > 0.01
    check(tiny["sd15"], 2, asked, False, expected)


@pytest.mark.sample(0)
def test_rank_0_describes_the_picture_for_all(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One caption, which the other rank gets as the prompt, and the latents of one process."""
    monkeypatch.setattr(captions, "LIMIT", 12)
    picture = np.random.default_rng(3).integers(0, 256, (70, 96, 4), np.uint8)
    asked: dict[str, Any] = SIZE | {"width": 96, "height": 64, "image": picture, "layers": 1, "guidance": 3.0}
    written, write = list[object](), CaptionTexts._write
    monkeypatch.setattr(CaptionTexts, "_write", lambda self, *given: (written.append(0), write(self, *given))[1])
    orders: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def drawn(group: ThreadGroup | None) -> Result | None:
        with closing(opened(tiny["qwen-layered"], group, precision="fp32")) as pipe:
            if group is not None and group.rank:
                pipe.follow(orders.get(timeout=SECONDS))
                return None
            if group is not None:
                pipe.followers = SimpleNamespace(draw=lambda request, hashes: orders.put(request))
            result = list(pipe.stream("", **asked))[-1]
            assert isinstance(result, Result)
            return result

    alone, together_ = drawn(None), together(2, drawn)
    assert alone is not None and together_[1] is None and len(written) == 2, "one for each picture"
    assert alone.recipe["prompt"] == together_[0].recipe["prompt"] != ""
    assert np.array_equal(alone.latents, together_[0].latents) and orders.empty()
