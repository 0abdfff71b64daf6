"""The parts of a model on a backend: each loaded when it is needed, kept while it is, and checked to fit before.

The text encoder is freed before the transformer is loaded, so the peak of memory is the largest part and not the sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from qwenimg.common import conditioning, memory, tokenizers
from qwenimg.common.backend import VAE, Array, Engine, Modulation, TextEncoder, Transformer
from qwenimg.common.errors import DoesNotFit, NumericsError
from qwenimg.common.model import Model
from qwenimg.common.models import qwen_dit
from qwenimg.common.precision import Precision
from qwenimg.common.probes import first_non_finite

TEXT_TOKENS = 512  # of a prompt that the transformer sees, as in the reference
TEXT_BYTES = 2**30  # of encoded prompts that are kept; a prompt of 512 tokens takes 7.3 MB
KEPT_SCHEDULES = 2  # whose modulation is kept: 442 MB for 50 steps of the 20 B model

Notify = Callable[[str, str], None]


class Parts:
    """Text states, transformer, modulation and VAE of one model. `timing` sums seconds by stage."""

    def __init__(self, engine: Engine, model: Model, precision: Precision, notify: Notify):
        self.engine, self.model, self.precision, self.notify = engine, model, precision, notify
        self.tokenizer = tokenizers.load(model.folder / "tokenizer")
        self.tokenizer.check_vocabulary(model.text_config.vocab_size)
        self.timing: dict[str, float] = {}
        self._texts: dict[str, NDArray[np.float32]] = {}
        self._announced: list[str] = []
        self._transformer: Transformer | None = None
        self._vae: VAE | None = None
        self._modulations: dict[tuple[float, ...], Modulation] = {}

    def announce(self, prompts: Sequence[str]) -> None:
        """Encodes as many of `prompts` as TEXT_BYTES hold now, the rest in its turn."""
        self._announced = list(dict.fromkeys(prompts))
        self._encode_missing(self._announced[:1])

    def states(self, prompts: Sequence[str]) -> list[Array]:
        """Of each prompt the text states [1, S, C], on the device."""
        self._encode_missing(prompts)
        return [self.engine.array(self._texts[prompt]) for prompt in prompts]

    def has_modulation(self, timesteps: tuple[float, ...]) -> bool:
        return timesteps in self._modulations

    def free_transformer(self) -> None:
        self._transformer = None
        self.engine.release()

    def close(self) -> None:
        """Frees everything and closes the model's files."""
        self._texts.clear()
        self._modulations.clear()
        self._vae = None
        self.free_transformer()
        self.model.close()

    def _encode_missing(self, needed: Sequence[str]) -> None:
        """Encodes `needed`, and of what was announced as much as TEXT_BYTES hold, unless all that is needed is there.

        The states are kept in the system's memory, where thousands of prompts do not take the device's."""
        if all(prompt in self._texts for prompt in needed):
            return
        if self._held() > TEXT_BYTES // 2:
            self._texts = {prompt: self._texts[prompt] for prompt in needed if prompt in self._texts}
        after = self._announced.index(needed[0]) if needed[0] in self._announced else len(self._announced)
        encoder = self._text_encoder()
        with self.timed("encode"):
            for prompt in dict.fromkeys([*needed, *self._announced[after:]]):
                if prompt not in needed and self._held() > TEXT_BYTES:
                    break
                if prompt not in self._texts:
                    self._texts[prompt] = self._encode(encoder, tokenizers.prompt_ids(self.tokenizer, prompt).ids)
        del encoder
        self.engine.release()

    def _held(self) -> int:
        return sum(states.nbytes for states in self._texts.values())

    def _encode(self, encoder: TextEncoder, ids: Sequence[int]) -> NDArray[np.float32]:
        """Text states [1, S, C] without the template's."""
        states = encoder.encode(ids)
        if not self.engine.finite(states):
            where = first_non_finite(self.engine, lambda: encoder.encode(ids))
            raise NumericsError(f"text encoder: non-finite value at {where}; {self.way_out('text')}")
        kept = self.engine.numpy(states)[:, tokenizers.DROPPED : tokenizers.DROPPED + TEXT_TOKENS]
        return np.ascontiguousarray(kept, np.float32)

    def way_out(self, component: str) -> str:
        """What to do about a value that is not finite."""
        dtype = self.precision.compute_dtype(component)
        if dtype == "float16":
            return "float16 does not hold this model, use --precision bf16 or fp32"
        return "try --precision fp32" if dtype == "bfloat16" else "the weights or the input are at fault"

    def modulation(self, timesteps: tuple[float, ...]) -> Modulation:
        """Once per schedule; later pictures with one of the last few schedules use it again."""
        found = self._modulations.pop(timesteps, None)
        if found is None:
            features = conditioning.time_rows(self.model.transformer_config, timesteps, self.precision.time_dtype())
            self.notify("stage", "computing modulation")
            while len(self._modulations) >= KEPT_SCHEDULES:
                del self._modulations[next(iter(self._modulations))]
            with self.timed("modulate"):
                found = self.transformer().modulate(features)
        self._modulations[timesteps] = found
        return found

    def _text_encoder(self) -> TextEncoder:
        plan, config = self.model.text, self.model.text_config
        need = memory.weight_bytes(plan, self.precision, "text")
        if self._transformer is not None and need > self.engine.free_memory():
            self.notify("stage", "freeing the transformer, since the text encoder does not fit beside it")
            self.free_transformer()
        with self._loading("text encoder", need):
            return self.engine.text_encoder(config, plan, self.precision)

    def transformer(self, more: int = 0) -> Transformer:
        """The transformer, once it is known that its weights and `more` bytes of a run fit."""
        if self._transformer is not None:
            self._check_fit("a step of this size", more)
            return self._transformer
        plan = self.model.transformer
        resident = plan.only(lambda name: not qwen_dit.timestep_only(name))
        weights = memory.weight_bytes(resident, self.precision, "transformer")
        with self._loading("transformer", weights, more):
            self._transformer = self.engine.transformer(self.model.transformer_config, plan, self.precision)
        return self._transformer

    def vae(self) -> VAE:
        if self._vae is None:
            self._vae = self.engine.vae(self.model.vae_config, self.model.vae, self.precision)
        return self._vae

    @contextmanager
    def _loading(self, component: str, weights: int, more: int = 0) -> Iterator[None]:
        """Tells, checks that `weights` and `more` bytes are free, and times."""
        self.notify("stage", f"loading {component} ({weights / 1e9:.1f} GB)")
        self._check_fit(f"the {component}", weights + more)
        with self.timed(f"load {component}"):
            yield

    def _check_fit(self, what: str, need: int) -> None:
        """Raises DoesNotFit before anything is allocated."""
        free = self.engine.free_memory()
        if need > free:
            raise DoesNotFit(
                f"{what} takes {need / 1e9:.1f} GB in {self.precision.name}, {free / 1e9:.1f} GB are free on "
                f"{self.engine.device}; choose a smaller size, close other programs, or use --precision bf16, not fp32"
            )

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timing[stage] = self.timing.get(stage, 0.0) + time.perf_counter() - start
