"""Times how a language model writes at full width against transformers with its own cache: tokens per second of
processor time, in float32 on one thread, in one process.

    python tools/bench_writing.py            # torch
    python tools/bench_writing.py mlx
    python tools/bench_writing.py --smollm2  # a whole small model, also against llama.cpp: pip install cyllama

Two layers of Qwen2.5-VL's 28 and 8,192 rows of its vocabulary, with random weights. The arms take turns, in an order
that is reversed each time; the tokens that are equal are counted. Also how the time of a token grows with the text
before it, and how much of it is saved when four texts are written at once. Both are loaded three times: one text is as
fast as the memory that its weights lie in, which differs by a tenth from load to load. SmolLM2-135M-Instruct is a file
in 4 bits: llama.cpp multiplies these by inputs that it rounds to 8 bits, transformers and qwenimg widen them to
float32.
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
TURNS, LOADS, TOKENS, PROMPTS = 2, 3, 24, (64, 1000)
Write = Callable[[], tuple[float, list[int]]]
Rates = dict[str, tuple[float, int]]  # of an arm: tokens per second, and tokens that are those of the last arm


def reference(folder: Path) -> Any:
    """transformers' Qwen2, which is this language model for text alone, loaded as its users load it."""
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
    runs: dict[tuple[int, int], list[Rates]] = {(length, rows): [] for length in PROMPTS for rows in (1, 4)}
    for _ in range(LOADS):
        part = open_component(qwen.QWEN2_5_VL, folder, CONFIG, "text_encoder")
        opened, model = open_part(engine, part), reference(folder)
        for (length, rows), rates in runs.items():
            ids = [int(i) for i in np.random.default_rng(length).integers(0, CONFIG.vocab_size, length)]
            arms = {"transformers": theirs(model, ids, rows), engine.name: ours(engine, opened, ids, rows)}
            rates.append(measured(arms, rows))
        part.plan.close()
        del opened, model
    for (length, rows), rates in runs.items():
        report(rates, length, rows)


def whole(engine: Any, folder: Path) -> None:
    file = smollm2.fetched(folder)
    model = open_language_model(file)
    ids = model.chat.ids(model.tokenizer.tokenizer, "You describe pictures in one paragraph.", "A red fox at dawn.")[0]
    arms = {"transformers": theirs(smollm2.reference(file), ids, 1)}
    if find_spec("cyllama"):
        arms["llama.cpp"] = llama(file, ids)
    part = replace(model.component, plan=quantize.decoded(model.component.plan))  # as a command has it
    report([measured({**arms, engine.name: ours(engine, open_part(engine, part), ids, 1)}, 1)], len(ids), 1)


def open_part(engine: Any, part: Any) -> Any:
    precision = bases(KIND)["fp32"]
    return engine.open(part.network, part.config, part.stored(precision), precision)


def measured(arms: dict[str, Write], rows: int) -> Rates:
    """Return the tokens per second of each arm, and how many of its tokens are those of the last arm."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    texts = {}
    for turn in range(TURNS):
        for arm in list(arms)[:: -1 if turn % 2 else 1]:
            took, texts[arm] = arms[arm]()
            seconds[arm].append(took)
    own = texts[list(arms)[-1]]
    equal = {arm: sum(a == b for a, b in zip(text, own, strict=True)) for arm, text in texts.items()}
    return {arm: (rows * TOKENS / statistics.median(took), equal[arm]) for arm, took in seconds.items()}


def report(runs: list[Rates], length: int, rows: int) -> None:
    *peers, own = runs[0]
    rate = statistics.median(run[own][0] for run in runs)
    print(f"{length} tokens before, {rows} at once, tokens per second of processor time: {own} {rate:.1f}")
    for arm in peers:
        ratios = sorted(run[own][0] / run[arm][0] for run in runs)
        each = f" ({', '.join(f'{ratio:.2f}' for ratio in ratios)})" if len(ratios) > 1 else ""
        rate = statistics.median(run[arm][0] for run in runs)
        equal = f"{min(run[arm][1] for run in runs)} of {TOKENS + 1} tokens equal"
        print(f"  {statistics.median(ratios):.2f} of {arm}'s {rate:.1f}{each}; {equal}", flush=True)


if __name__ == "__main__":
    main()
