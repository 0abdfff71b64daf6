"""The parts of a model on a backend: each loaded when it is needed, kept while it is, and checked to fit before.

The text encoder is freed before the transformer is loaded, so the peak of memory is the largest part and not the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.qwen_image.checkpoint import Model
from qwenimg.common.networks import qwen_conditioning, qwen_dit
from qwenimg.common.prompts import qwen
from qwenimg.common.runtime import memory
from qwenimg.common.runtime.engine import VAE, Array, Engine, Modulation, TextEncoder, Transformer
from qwenimg.common.runtime.runtime import Keeper, Notify
from qwenimg.common.weights.precision import Precision

TEXT_TOKENS = 512  # of a prompt that the transformer sees, as in the reference
TEXT_BYTES = 2**30  # of encoded prompts that are kept; a prompt of 512 tokens takes 7.3 MB
KEPT_SCHEDULES = 2  # whose modulation is kept: 442 MB for 50 steps of the 20 B model


class Parts:
    """Text states, transformer, modulation and VAE of one Qwen-Image model."""

    def __init__(self, engine: Engine, model: Model, precision: Precision, notify: Notify):
        self.engine, self.model, self.precision = engine, model, precision
        self.keeper = Keeper(engine, precision, notify)
        self.tokenizer = model.tokenizer
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
        with self.keeper.timed("encode"):
            for prompt in dict.fromkeys([*needed, *self._announced[after:]]):
                if prompt not in needed and self._held() > TEXT_BYTES:
                    break
                if prompt not in self._texts:
                    self._texts[prompt] = self._encode(encoder, qwen.prompt_ids(self.tokenizer, prompt).ids)
        del encoder
        self.engine.release()

    def _held(self) -> int:
        return sum(states.nbytes for states in self._texts.values())

    def _encode(self, encoder: TextEncoder, ids: Sequence[int]) -> NDArray[np.float32]:
        """Text states [1, S, C] without the template's."""
        states = encoder.encode(ids)
        self.keeper.check_finite(states, "text encoder", "text", lambda: encoder.encode(ids))
        kept = self.engine.numpy(states)[:, qwen.DROPPED : qwen.DROPPED + TEXT_TOKENS]
        return np.ascontiguousarray(kept, np.float32)

    def modulation(self, timesteps: tuple[float, ...]) -> Modulation:
        """Once per schedule; later pictures with one of the last few schedules use it again."""
        found = self._modulations.pop(timesteps, None)
        if found is None:
            features = qwen_conditioning.time_rows(
                self.model.transformer_config, timesteps, self.precision.time_dtype()
            )
            self.keeper.notify("stage", "computing modulation")
            while len(self._modulations) >= KEPT_SCHEDULES:
                del self._modulations[next(iter(self._modulations))]
            with self.keeper.timed("modulate"):
                found = self.transformer().modulate(features)
        self._modulations[timesteps] = found
        return found

    def waiting(self) -> int:
        """Bytes of the transformer's weights that stay in memory and are still to be loaded."""
        if self._transformer is not None:
            return 0
        resident = self.model.transformer.only(lambda name: not qwen_dit.timestep_only(name))
        return memory.weight_bytes(resident, self.precision, "transformer")

    def needs(self, texts: Sequence[str], run: int) -> dict[str, int]:
        """Bytes for each part that is to be loaded, and for a run of the transformer that takes `run` beside it."""
        found = {}
        if not all(text in self._texts for text in texts):
            found["the text encoder"] = memory.weight_bytes(self.model.text, self.precision, "text")
        what = "the transformer" if self._transformer is None else "a step of this size"
        return found | {what: self.waiting() + run}

    def _text_encoder(self) -> TextEncoder:
        plan, config = self.model.text, self.model.text_config
        need = memory.weight_bytes(plan, self.precision, "text")
        if self._transformer is not None and need > self.engine.free_memory():
            self.keeper.notify("stage", "freeing the transformer, since the text encoder does not fit beside it")
            self.free_transformer()
        with self.keeper.loading("text encoder", need):
            encoder: TextEncoder = self.engine.open("qwen_vl", config, plan, self.precision)
            return encoder

    def transformer(self, more: int = 0) -> Transformer:
        """The transformer, once it is known that its weights and `more` bytes of a run fit."""
        if self._transformer is not None:
            self.keeper.check_fit("a step of this size", more)
            return self._transformer
        plan = self.model.transformer
        resident = plan.only(lambda name: not qwen_dit.timestep_only(name))
        weights = memory.weight_bytes(resident, self.precision, "transformer")
        with self.keeper.loading("transformer", weights, more):
            self._transformer = self.engine.open("qwen_dit", self.model.transformer_config, plan, self.precision)
        return self._transformer

    def vae(self) -> VAE:
        if self._vae is None:
            self._vae = self.engine.open("qwen_vae", self.model.vae_config, self.model.vae, self.precision)
        return self._vae
