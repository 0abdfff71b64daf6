"""A pipeline of a model that several ranks compute: rank 0 tells the others what it does, and decodes."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Protocol, Unpack

from qwenimg.common.base.errors import UsageError
from qwenimg.common.pipeline import finish, rewriting
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result, Step
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.request import call_options
from qwenimg.common.request.call_types import CallOptions
from qwenimg.common.request.coerce import Embeddings, Loras, Pictures
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.compiling import Decision


class Followers(Protocol):
    """The other ranks, which follow rank 0."""

    def draw(self, request: Request, hashes: Mapping[str, Any]) -> None:
        """Let the other ranks compute the steps of `request`. hashes: of its LoRAs and control networks."""
        ...

    def compile(self, on: bool) -> None:
        """Have them compile the denoiser when it is next loaded, or not."""
        ...

    def announce(self, arguments: Mapping[str, Any]) -> None:
        """Let them call `Pipeline.prepare` with these arguments."""
        ...


class StepsDone(Exception):
    """The end of a run on another rank than 0, which decodes nothing."""


class RankPipeline(Pipeline):
    """The pipeline of one rank. On rank 0 it is called like any other, once it has `followers`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Create a pipeline of an opened model. Arguments as for `Pipeline`."""
        super().__init__(*given, **named)
        self.device = f"{self.engine.group.size} x {self.engine.device}"  # type: ignore[union-attr]
        self.followers: Followers | None = None

    def check(self, prompt: str, **asked: Unpack[CallOptions]) -> Request:
        request = super().check(prompt, **asked)
        if request.controls and self.model.sharing(request).tokens > 1:
            raise UsageError(
                "control: with it devices share the branches of guidance alone: give as many --devices as there are "
                "branches, or leave one of both out"
            )
        if request.upscaler is not None:
            raise UsageError("hires-with: one device enlarges by a network; give lanczos or latent, or no --devices")
        return request

    def compile(self, mode: str = "auto", seconds: float = 0.0) -> Decision:
        decision = super().compile(mode, seconds)
        if self.followers is not None:
            self.followers.compile(decision.on)
        return decision

    def prepare(
        self,
        prompts: Sequence[str],
        clip_skip: int = 0,
        lora: Loras = (),
        lora_mode: str = "auto",
        image: Pictures | None = None,
        embedding: Embeddings = (),
        rewrite: Mapping[str, int] = MappingProxyType({}),  # unused: rank 0 rewrites each before it is drawn
    ) -> None:
        call_options.checked_prompts(prompts)
        if self.followers is not None:
            arguments = {"clip_skip": clip_skip, "lora": lora, "lora_mode": lora_mode, "image": image}
            self.followers.announce({"prompts": list(prompts), "embedding": embedding} | arguments)
        super().prepare(prompts, clip_skip, lora, lora_mode, image, embedding)

    def follow(self, request: Request) -> None:
        """Compute the steps of a request that rank 0 draws, with LoRAs by the same names. Raises QwenimgError."""
        with suppress(StepsDone):
            for _ in self._lock.run(self._generate(request, []), 0.0):
                pass

    def hashes(self, request: Request) -> dict[str, object]:
        """Return the hashes of the LoRAs and control networks of a request. Raises QwenimgError."""
        return self.loras.hashes(request.loras) | self.controls.hashes(request)

    def _generate(self, request: Request, notes: Sequence[str]) -> Generator[Step | Result, None, None]:
        if self.followers is not None:
            request = self._described(request)
            self.followers.draw(request, self.hashes(request))
        yield from super()._generate(request, notes)

    def _described(self, request: Request) -> Request:
        """Return the request with its prompt, which rank 0 alone writes or rewrites: between two words the last
        bits decide, which no other rank needs to have."""
        if request.writer is None and (request.prompt.strip() or self.model.inputs.describe is None):
            return request
        with self._in_memory():
            self._fit.check(request, self._with_inputs(request))
            self.adapt(*self.controls.loras(request))
            self.model.residents.begin()
            return self.model.inputs.described(rewriting.announced(self.model, request))

    def _decoded(self, request: Request, latents: Latents) -> finish.Decoded:
        if self.engine.group is not None and self.engine.group.rank:
            raise StepsDone
        return super()._decoded(request, latents)
