"""Qwen-Image: text states, modulation and velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. What depends on neither step nor latent is made once per run, the modulation once per schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.qwen_image import few_steps, lora_names, memory
from qwenimg.common.families.qwen_image.run import QwenRun
from qwenimg.common.memory.memory import scores
from qwenimg.common.memory.needs import Needs
from qwenimg.common.networks import qwen_conditioning
from qwenimg.common.numbers import sizes
from qwenimg.common.pipeline.inpaint import Latents
from qwenimg.common.pipeline.plan import SamplingPlan, flow_plan
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.prompts import qwen
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime import text_store
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, Modulation, TextEncoder, Transformer
from qwenimg.common.runtime.runtime import Change, Runtime
from qwenimg.common.runtime.text_cache import TextCache
from qwenimg.common.runtime.vae import VAEHalves
from qwenimg.common.weights.lora import Deltas
from qwenimg.common.weights.lora_names import Names

TEXT_TOKENS = 512  # of a prompt that the transformer sees, as in the reference
KEPT_SCHEDULES = 2  # whose modulation is kept: 442 MB for 50 steps of the 20 B model
BATCHED_TOKENS = 1024  # images of at most this many tokens leave a GPU idle: both branches of guidance go in one batch


class QwenImage:
    """A Qwen-Image model for `Pipeline`."""

    batch_guidance: bool | None = None  # both branches in one batch: always, never, or (None) where it pays
    multiple = MULTIPLE
    sees_mask = False

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        self.runtime, self.engine, self.checkpoint = runtime, runtime.engine, checkpoint
        self.schedule_config = checkpoint.scheduler
        self.config, self.vae_config = checkpoint["transformer"].config, checkpoint["vae"].config
        self.scale, self.channels = self.vae_config.scale, self.vae_config.z_dim
        self.texts: TextCache[str, NDArray[np.float32]] = TextCache()
        self.few_steps = few_steps.few_steps(str(checkpoint.source))
        self._transformer: Transformer | None = None
        self._open = checkpoint["transformer"]  # as it was loaded
        self.vae = VAEHalves(runtime, checkpoint["vae"], self.vae_config.base_dim, self._make_room)
        self._modulations: dict[tuple[float, ...], Modulation] = {}

    @cached_property
    def lora_names(self) -> Names:
        return lora_names.names(self.checkpoint)

    @property
    def tokenizer(self) -> Any:
        return self.checkpoint.tokenizers["text_encoder"].tokenizer

    def plan(self, request: Request) -> SamplingPlan:
        rows, columns = sizes.render_size(request.width, request.height, MULTIPLE)
        return flow_plan(self.schedule_config, request, rows * columns // MULTIPLE**2)

    def warnings(self, request: Request) -> list[str]:
        found = []
        texts = {"prompt": request.prompt} | ({"negative prompt": request.negative_prompt} if request.guided else {})
        for name, text in texts.items():
            lost = qwen.prompt_ids(self.tokenizer, text).lost(TEXT_TOKENS)
            if lost:
                found.append(f"the {name} is cut: the model sees its first {TEXT_TOKENS} tokens, not the last {lost}")
        return found

    def needs(self, request: Request, plan: SamplingPlan, shape: tuple[int, int], counted: bool = True) -> Needs:
        timesteps = tuple(self.schedule_config.timestep(sigma) for sigma in plan.asked())
        size = shape[0] * shape[1] // self.config.patch_size**2
        texts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        tokens = [qwen.length(self.tokenizer, text) if counted else TEXT_TOKENS + qwen.DROPPED for text in texts]
        seen = [min(TEXT_TOKENS, count - qwen.DROPPED) for count in tokens]  # by the transformer
        needs = self.runtime.needs(self._loaded(), freed=("transformer", *self.vae.names))
        if request.image is not None:
            self.vae.add_encoding(needs, shape)
        if not all(text in self.texts or self._is_kept(text) for text in texts):
            encoder, more = self.checkpoint["text_encoder"], self._text_bytes(max(tokens))
            needs.make_room({"text encoder": self.runtime.weight_bytes(encoder)}, more)
            encoder = self.runtime.fitted(encoder, needs.left({}) - more)
            weights = {"text encoder": self.runtime.weight_bytes(encoder)}
            needs.add("text", "the text encoder", weights, max(more, self.runtime.loading_bytes(encoder)))
        kept = memory.kept_bytes(self.config, len(texts), size) if request.caches else 0
        together = self.branches(len(texts), size)
        transformer = self._add_steps(needs, together, size + max(seen), timesteps, kept)
        self.vae.add_decoding(needs, shape)
        first, *others = (memory.step_operations(self.config, size + text) for text in seen)
        needs.steps = plan.evaluations * (first + request.cfg_end * sum(others))
        passes = plan.evaluations * (1 + request.cfg_end * (len(texts) - together))
        needs.streamed = passes * self.runtime.streamed_bytes(transformer)
        return needs

    def _text_bytes(self, tokens: int) -> int:
        """Bytes that encoding a prompt of so many tokens, the template's among them, takes beside weights."""
        encoder = self.checkpoint["text_encoder"]
        held = scores(encoder.config.num_attention_heads, 1, tokens, self.engine.workspace.score_bytes)
        return self.runtime.call_bytes(encoder, memory.text_peak(encoder.config, tokens) + held)

    def _add_steps(
        self, needs: Needs, branches: int, tokens: int, timesteps: tuple[float, ...], kept: int
    ) -> Component:
        """Adds the stages of the transformer, and gives it as it is then open; `tokens`: image and text of the longest
        branch; `kept`: bytes that a step cache takes."""
        title = "the transformer" if self._transformer is None else "a step of this size"
        more = self.run_bytes(branches, tokens, timesteps) + kept
        whole = self.runtime.weight_bytes(self.checkpoint["transformer"])
        needs.make_room({"transformer": self._loaded().get("transformer", whole)}, more)
        beside = sum(size for name, size in needs.kept.items() if name != "transformer")
        transformer = self._fitting(needs.room - beside, more)
        weights = {"transformer": self.runtime.weight_bytes(transformer)}
        needs.kept.pop("transformer", None)
        if timesteps not in self._modulations:
            rows = self._modulation_rows(timesteps)
            making = max(rows + self._block_bytes(), self.runtime.loading_bytes(transformer))
            there = weights if self._transformer else {"transformer": self.runtime.opened_bytes(transformer)}
            needs.add("modulation", title, there, making, stays=True)
            needs.kept["modulation"] = rows
        needs.add("denoise", title, weights, self._step_bytes(branches, tokens) + kept, stays=True)
        return transformer

    def _loaded(self) -> dict[str, int]:
        """Bytes of the weights that are in memory, by the names that stages have for them."""
        found = self.vae.loaded
        if self._transformer is not None:
            found["transformer"] = self.runtime.weight_bytes(self._open)
        return found

    def _fitting(self, room: int, more: int) -> Component:
        """The transformer as it is loaded, or as it is to be for `room` bytes, `more` of them for a run."""
        opened = None if self._transformer is None else self._open
        return self.runtime.fitting(self.checkpoint["transformer"], opened, room, more)

    def _seen(self, text: str) -> int:
        """Tokens of a prompt that the transformer sees."""
        return min(TEXT_TOKENS, qwen.length(self.tokenizer, text) - qwen.DROPPED)

    def variant(self, change: Change) -> QwenImage:
        return QwenImage(*self.runtime.changed(self.checkpoint, change, sum(self._loaded().values())))

    def check_weights(self) -> None:
        self.vae.check_weights()

    def adapt(self, deltas: Deltas) -> None:
        before, self.checkpoint = self.checkpoint, self.checkpoint.with_deltas(deltas)
        now = self.checkpoint
        if not before["text_encoder"].plan.same_deltas(now["text_encoder"].plan):
            self.texts.forget()
        if before["transformer"].plan.same_deltas(now["transformer"].plan):
            return
        if not before["transformer"].plan.when(ONCE).same_deltas(now["transformer"].plan):
            self._modulations.clear()
        if self._transformer is not None:
            parts = self._open, now["transformer"]
            self._open = self.runtime.readapt(self._transformer, *parts, "transformer", self.free_transformer)

    @contextmanager
    def prepare(self, request: Request, plan: SamplingPlan, shape: tuple[int, int]) -> Iterator[QwenRun]:
        patch = self.config.patch_size
        grid = (1, shape[0] // patch, shape[1] // patch)
        run = QwenRun(self, request, plan, grid)
        try:
            yield run
        finally:
            run.close()

    # Text

    def announce(self, prompts: Sequence[str], clip_skip: int = 0) -> None:
        self.texts.announce(prompts)
        self._encode_missing(list(prompts)[:1])

    def states(self, prompts: Sequence[str]) -> list[Array]:
        """Of each prompt the text states [1, S, C], on the device."""
        self._encode_missing(prompts)
        return [self.engine.array(self.texts[prompt]) for prompt in prompts]

    def _encode_missing(self, needed: Sequence[str]) -> None:
        missing = [text for text in self.texts.to_encode(needed, self._state_bytes) if not self._taken(text)]
        if not missing:
            return
        encoder = self._text_encoder(max(qwen.length(self.tokenizer, text) for text in missing))
        with self.runtime.clock.timed("encode"):
            for prompt in missing:
                self.texts[prompt] = self._encode(encoder, qwen.prompt_ids(self.tokenizer, prompt).ids)
                if self.runtime.prompts is not None:
                    self.runtime.prompts.put(self._key(prompt), [self.texts[prompt]])
        del encoder
        self.engine.release()

    def _taken(self, prompt: str) -> bool:
        """Whether the states of `prompt` were on the disk, and are in memory now."""
        if self.runtime.prompts is None:
            return False
        shape = (1, self._seen(prompt), self.config.joint_attention_dim)
        found = self.runtime.prompts.get(self._key(prompt), [shape])
        if found is not None:
            self.texts[prompt] = found[0]
        return found is not None

    def _is_kept(self, prompt: str) -> bool:
        return self.runtime.prompts is not None and self.runtime.prompts.has(self._key(prompt))

    def _key(self, prompt: str) -> str | None:
        plan = self.runtime.plan(self.checkpoint["text_encoder"])
        ids = list(qwen.prompt_ids(self.tokenizer, prompt).ids)
        return text_store.key(self.runtime, [plan], [ids, qwen.DROPPED, TEXT_TOKENS])

    def _state_bytes(self, prompt: str) -> int:
        return self._seen(prompt) * int(self.config.joint_attention_dim) * 4

    def _encode(self, encoder: TextEncoder, ids: Sequence[int]) -> NDArray[np.float32]:
        """Text states [1, S, C] without the template's."""
        states = encoder.encode(ids)
        self.runtime.check_finite(states, "text encoder", "text", lambda: encoder.encode(ids))
        kept = self.engine.numpy(states)[:, qwen.DROPPED : qwen.DROPPED + TEXT_TOKENS]
        return np.ascontiguousarray(kept, np.float32)

    def _text_encoder(self, tokens: int = TEXT_TOKENS) -> TextEncoder:
        """For prompts of at most so many tokens."""
        component, more = self.checkpoint["text_encoder"], self._text_bytes(tokens)
        free = self._make_room(self.runtime.weight_bytes(component) + more)
        encoder: TextEncoder = self.runtime.open(self.runtime.fitted(component, free - more), "text encoder")
        return encoder

    def _make_room(self, need: int, kept: str = "") -> int:
        """Frees the transformer and the VAE's halves, but for the component named `kept`, where `need` bytes are not
        free: one of them or the text encoder is to be loaded or used. The bytes that are then free."""
        if need > self._free():
            if self._transformer is not None and kept != "transformer":
                self.runtime.notify("stage", "freeing the transformer, since what comes next does not fit beside it")
                self.free_transformer()
            self.vae.free(kept)
        return self._free()

    def _free(self) -> int:
        loaded = sum(self._loaded().values())
        return self.runtime.room(loaded) - loaded

    # Transformer

    def transformer(self, more: int = 0) -> Transformer:
        """The transformer, once it is known that its weights and `more` bytes of a run fit."""
        held = self._loaded().get("transformer", 0)
        whole = 0 if held else self.runtime.weight_bytes(self.checkpoint["transformer"])
        component = self._fitting(self._make_room(whole + more, "transformer") + held, more)
        if self._transformer is not None and component is self._open:
            self.runtime.check_fit("a step of this size", more)
            return self._transformer
        self.free_transformer()
        self._transformer, self._open = self.runtime.open(component, "transformer", more), component
        return self._transformer

    def modulation(self, timesteps: tuple[float, ...]) -> Modulation:
        """Once per schedule; later pictures with one of the last few schedules use it again."""
        found = self._modulations.pop(timesteps, None)
        if found is None:
            features = qwen_conditioning.time_rows(self.config, timesteps, self.runtime.precision.time_dtype())
            self.runtime.notify("stage", "computing modulation")
            while len(self._modulations) >= KEPT_SCHEDULES:
                del self._modulations[next(iter(self._modulations))]
            with self.runtime.clock.timed("modulate"):
                found = self.transformer().modulate(features)
        self._modulations[timesteps] = found
        return found

    def run_bytes(self, branches: int, tokens: int, timesteps: tuple[float, ...]) -> int:
        """What a run takes besides weights: steps of so many branches at once, and modulation that is still to be
        made."""
        step = self._step_bytes(branches, tokens)
        if timesteps in self._modulations:
            return step
        return self._modulation_rows(timesteps) + max(step, self._block_bytes())

    def _step_bytes(self, branches: int, tokens: int) -> int:
        held = scores(self.config.num_attention_heads, branches, tokens, self.engine.workspace.score_bytes)
        activations = memory.step_peak(self.config, branches, tokens) + held
        return self.runtime.call_bytes(self.checkpoint["transformer"], activations)

    def _modulation_rows(self, timesteps: tuple[float, ...]) -> int:
        return memory.modulation_rows(self.config, self.runtime.plan(self.checkpoint["transformer"]), len(timesteps))

    def _block_bytes(self) -> int:
        transformer = self.checkpoint["transformer"]
        return self.runtime.call_bytes(transformer, memory.block_bytes(self.runtime.plan(transformer)), once=True)

    def branches(self, count: int, tokens: int) -> int:
        """How many of the `count` branches of guidance go in one batch: all, or one after the other.

        Small images leave a GPU idle between kernels, so there both go together if memory allows; large ones gain
        nothing, and texts of different length would need a mask that keeps attention from its fastest kernel.
        """
        together = self.batch_guidance
        if together is None:
            need = memory.step_peak(self.config, count, tokens + TEXT_TOKENS)
            together = self.engine.on_gpu and tokens <= BATCHED_TOKENS and need < self.engine.free_memory() // 2
        return count if together else 1

    # Latents

    def encode(self, pixels: NDArray[np.float32]) -> tuple[Latents, Latents]:
        mean, std = self._statistics()
        center, deviation = self.vae.encode(pixels)
        return ((center - mean) / std).astype(np.float32), (deviation / std).astype(np.float32)

    def decode(self, latents: Latents) -> NDArray[Any]:
        mean, std = self._statistics()
        return self.vae.decode(latents * std + mean)

    def _statistics(self) -> tuple[Latents, Latents]:
        config = self.vae_config
        mean, std = (np.asarray(v, np.float32)[:, None, None] for v in (config.latents_mean, config.latents_std))
        return mean, std

    def free_transformer(self) -> None:
        self._transformer = None
        self.engine.release()

    def renew(self, part: str) -> None:
        self.vae.free()
        if part != "vae":
            self.texts.forget()
            self._modulations.clear()
            self.free_transformer()

    def close(self) -> None:
        self.texts.clear()
        self._modulations.clear()
        self.vae.free()
        self.free_transformer()
        self.checkpoint.close()
