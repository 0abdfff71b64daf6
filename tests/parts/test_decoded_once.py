"""A language model whose weights are quantized in its files: decoded once if that fits, where the backend would decode
them for each token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import tiny_language

from qwenimg import backends
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.numbers.next_token import Decoding
from qwenimg.common.parts.language_models import open_language_model
from qwenimg.common.parts.texts.writers import other_writer
from qwenimg.common.parts.texts.writing import Conversation, Writer
from qwenimg.common.precision.precision import bases
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime

ASKED = [Conversation(system="Decide what the prompt leaves open.", user=one) for one in ("a red cat", "two dogs")]
HOW = Decoding(limit=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_language.write(tmp_path_factory.mktemp("language model"), "smollm2")
    tiny_language.quantize(made)
    return made


def writer(folder: Path, backend: str) -> Writer:
    runtime = Runtime(backends.load(backend), bases(KIND)["fp32"], lambda kind, text: None)
    model = open_language_model(folder)
    return other_writer(Residents(runtime), model.component, model.tokenizer, model.chat, model.stops)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_codes_are_decoded_once_if_that_fits(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planned bytes are those of the plain weights; with a byte less the codes stay, and the texts are the same."""
    ample, scarce = writer(folder, backend), writer(folder, backend)
    wide = ample.stage(ASKED, HOW)
    assert not wide.component.is_quantized and scarce.component.is_quantized
    runtime = ample.runtime
    needed = runtime.weight_bytes(wide.component) + runtime.loading_bytes(wide.component) + wide.splits[0].needed
    for budget, kept in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(scarce.runtime, "budget", lambda loaded, budget=budget: budget)
        assert scarce.stage(ASKED, HOW).component.is_quantized == kept
    sizes = [runtime.weight_bytes(one.stage(ASKED, HOW).component) for one in (ample, scarce)]
    values = sum(int(np.prod(entry.shape)) for entry in ample.component.plan.entries.values())
    assert sizes[0] == 4 * values > sizes[1]
    texts = [one.write(ASKED, HOW) for one in (ample, scarce)]
    print(f"{backend}: {sizes[0]:,} bytes decoded, {sizes[1]:,} as codes: {texts[0][0].whole!r}")
    assert texts[0] == texts[1] and texts[0][0].tokens > 3


def test_codes_stay_where_products_take_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with MLX."""
    from qwenimg.backends import workspaces

    made = writer(folder, "mlx")
    monkeypatch.setattr(made.runtime.engine, "workspace", workspaces.MLX_GPU)
    assert made.stage(ASKED, HOW).component.is_quantized
