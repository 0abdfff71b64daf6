"""Times how a language model writes at full width against transformers with its own cache: tokens per second of
processor time, in float32 on one thread, in one process.

    python tools/bench_writing.py            # torch
    python tools/bench_writing.py mlx
    python tools/bench_writing.py --smollm2  # a whole small model, also against llama.cpp: pip install cyllama

Two layers of Qwen2.5-VL's 28 and 8,192 rows of its vocabulary, with random weights. The arms take turns, in an order
that is reversed each time; the tokens that are equal are counted. Also how the time of a token grows with the text
before it, and how much of it is saved when four texts are written at once. SmolLM2-135M-Instruct is a file in 4 bits:
llama.cpp multiplies these by inputs that it rounds to 8 bits, transformers and qwenimg widen them to float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import write_part

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support import smollm2

import qwenimg.backends
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.parts.components import open_component
from qwenimg.common.parts.language_models import open_language_model
from qwenimg.common.precision.precision import bases
from qwenimg.common.weights import quantize

CONFIG = qwen.QwenVLConfig(num_hidden_layers=2, vocab_size=8192, writes=True)
TURNS, TOKENS, PROMPTS = 5, 24, (64, 1000)
Write = Callable[[], tuple[float, list[int]]]


def reference(folder: Path) -> Any:
    """transformers' Qwen2, which is this language model for text alone, loaded as its users load it: where the system
    puts the pages of a weight changes the time of a token by a tenth."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {name: getattr(CONFIG, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps")}  # fmt: skip
    config = Qwen2Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta})
    config.save_pretrained(folder)
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def theirs(model: Any, ids: list[int], rows: int) -> Write:
    """Greedy steps of the model with its cache, without what `generate` adds."""
    with torch.inference_mode():
        begun = model(input_ids=torch.tensor([ids]), use_cache=True)
    begun.past_key_values.batch_repeat_interleave(rows)

    def written() -> tuple[float, list[int]]:
        kept, tokens = copy.deepcopy(begun.past_key_values), [int(begun.logits[0, -1].argmax())]
        with torch.inference_mode():
            start = time.process_time()
            for _ in range(TOKENS):
                out = model(input_ids=torch.tensor([tokens[-1:]] * rows), past_key_values=kept)
                tokens.append(int(out.logits[0, -1].argmax()))
        return time.process_time() - start, tokens

    return written


def ours(engine: Any, opened: Any, ids: list[int], rows: int) -> Write:
    opening = opened.opening(ids[:-1])

    def written() -> tuple[float, list[int]]:
        opened.forget()
        for _ in range(rows):
            scores = engine.numpy(opened.begin(ids, opening=opening))
        tokens = [int(scores.argmax())]
        start = time.process_time()
        for _ in range(TOKENS):
            tokens.append(int(engine.numpy(opened.follow(tokens[-1:] * rows))[0].argmax()))
        return time.process_time() - start, tokens

    return written


def llama(file: Path, ids: list[int]) -> Write:
    from cyllama.llama import llama_cpp

    llama_cpp.disable_logging()
    llama_cpp.llama_backend_init()
    llama_cpp.ggml_backend_load_all()
    model = llama_cpp.LlamaModel(path_model=str(file))
    context, greedy = llama_cpp.LlamaContextParams(), llama_cpp.LlamaSampler()
    context.n_threads = context.n_threads_batch = 1
    greedy.add_greedy()

    def written() -> tuple[float, list[int]]:
        opened = llama_cpp.LlamaContext(model, context)

        def follow(tokens: list[int], before: int) -> int:
            opened.decode(llama_cpp.llama_batch_get_one(tokens, before))
            return int(greedy.sample(opened, -1))

        tokens = [follow(ids, 0)]
        start = time.process_time()
        for count in range(TOKENS):
            tokens.append(follow(tokens[-1:], len(ids) + count))
        return time.process_time() - start, tokens

    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", default="cpu", choices=["cpu", "mlx"])
    parser.add_argument("--smollm2", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = qwenimg.backends.load(options.backend)
    with tempfile.TemporaryDirectory() as name:
        (whole if options.smollm2 else two_layers)(engine, Path(name))


def two_layers(engine: Any, folder: Path) -> None:
    write_part(folder, qwen.QWEN2_5_VL, CONFIG)
    part = open_component(qwen.QWEN2_5_VL, folder, CONFIG, "text_encoder")
    opened, model = open_part(engine, part), reference(folder)
    for length in PROMPTS:
        ids = [int(i) for i in np.random.default_rng(length).integers(0, CONFIG.vocab_size, length)]
        for rows in (1, 4):
            report({"transformers": theirs(model, ids, rows), engine.name: ours(engine, opened, ids, rows)}, ids, rows)
    part.plan.close()


def whole(engine: Any, folder: Path) -> None:
    file = smollm2.fetched(folder)
    model = open_language_model(file)
    ids = model.chat.ids(model.tokenizer.tokenizer, "You describe pictures in one paragraph.", "A red fox at dawn.")[0]
    arms = {"transformers": theirs(smollm2.reference(file), ids, 1)}
    if find_spec("cyllama"):
        arms["llama.cpp"] = llama(file, ids)
    part = replace(model.component, plan=quantize.decoded(model.component.plan))  # as a command has it
    report({**arms, engine.name: ours(engine, open_part(engine, part), ids, 1)}, ids, 1)


def open_part(engine: Any, part: Any) -> Any:
    precision = bases(KIND)["fp32"]
    return engine.open(part.network, part.config, part.stored(precision), precision)


def report(arms: dict[str, Write], ids: list[int], rows: int) -> None:
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    texts = {}
    for turn in range(TURNS):
        for arm in list(arms)[:: -1 if turn % 2 else 1]:
            took, texts[arm] = arms[arm]()
            seconds[arm].append(took)
    rates = {arm: rows * TOKENS / statistics.median(took) for arm, took in seconds.items()}
    *peers, own = arms
    print(f"{len(ids)} tokens before, {rows} at once, tokens per second of processor time: {own} {rates[own]:.1f}")
    for arm in peers:
        equal = sum(a == b for a, b in zip(texts[arm], texts[own], strict=True))
        ratio = f"{rates[own] / rates[arm]:.2f} of {arm}'s {rates[arm]:.1f}"
        print(f"  {ratio}; {equal} of {len(texts[own])} tokens equal", flush=True)


if __name__ == "__main__":
    main()
