"""The tools of an assistant: draw, edit, rewrite, describe, plan and models. Each takes arguments in JSON and returns
text and pictures.

No option that names a file of this machine is among them: pictures come from the folder or in base64.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.cli.assistants.folder import decoded, stem_of
from qwenimg.cli.client_folder import Folder
from qwenimg.common.base.errors import QwenimgError, UsageError
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.schema import request_schema
from qwenimg.common.memory.estimate import summary

if TYPE_CHECKING:
    from qwenimg import Pipeline, Result
    from qwenimg.common.parts.texts.describing import Describer

MOST_PICTURES = 4  # of a call: each is in the answer
MOST_SEEN = 10  # pictures that a model sees
MOST_TOKENS = 300  # of a text
OPTIONS = (
    "prompt", "negative_prompt", "width", "height", "steps", "guidance", "true_cfg", "sampler", "schedule", "seed",
    "cfg_end", "guidance_rescale", "clip_skip", "skip_layers", "layers", "caption",
)  # fmt: skip
"""Options of a picture that a client may give."""
STARTING = ("strength", "mask_blur", "mask_fill", "mask_mode", "only_masked")
"""Further options of `edit`."""
ASKED = {
    "tags": {"type": "boolean", "description": "tags in place of a caption"},
    "ask": {"type": "string", "description": "a question about the picture"},
}
"""What `describe` writes about a picture."""
Progress = Callable[[int, int], None]


class Ended(Exception):
    """The client has gone, or wants the picture no more."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a tool: a text, and pictures as PNG files."""

    text: str
    pictures: tuple[bytes, ...] = ()
    is_error: bool = False


@dataclass(kw_only=True, eq=False)
class Call:
    """A call of a tool, which another thread may end."""

    progress: Progress = lambda done, total: None
    ended: threading.Event = field(default_factory=threading.Event)


class Tools:
    """The tools of one pipeline. One call runs at a time."""

    def __init__(self, pipe: Pipeline, folder: Folder, deadline: float) -> None:
        """Create the tools. deadline: the longest time of a call, in seconds."""
        self.pipe, self.folder, self.deadline = pipe, folder, deadline
        schema = request_schema()["properties"]
        drawn = {name: schema[name] for name in OPTIONS} | {"seed": {"type": "integer", "minimum": 0}}
        drawn |= {
            "count": {"type": "integer", "minimum": 1, "maximum": MOST_PICTURES, "description": "how many pictures"},
            "name": {"type": "string", "description": "the name of the file in the folder, without ending"},
        }
        seen = {"type": "string", "description": "the name of a picture in the folder"}
        base = {"type": "string", "description": "in base64, in place of a file", "contentEncoding": "base64"}
        edited = {
            "image": {"anyOf": [seen, {"type": "array", "items": seen, "maxItems": MOST_SEEN}]},
            "image_base64": base,
            "mask": seen | {"description": "a picture in the folder: white is drawn anew, black is kept"},
            "mask_base64": base,
        }
        self.schemas: dict[str, dict[str, Any]] = {
            "draw": _object(drawn, ["prompt"]),
            "edit": _object(drawn | {name: schema[name] for name in STARTING} | edited, ["prompt"]),
            "rewrite": _object({"prompt": schema["prompt"], "seed": drawn["seed"]}, ["prompt"]),
            "describe": _object({"image": seen, "image_base64": base, **ASKED}, []),
            "plan": _object(drawn, []),
            "models": _object({}, []),
        }
        way = "It edits by an instruction" if pipe.model.inputs.fewest else "It starts from the picture: see strength"
        self.titles = {
            "draw": f"Draw a picture from a text with {pipe.model_name}. It is written into the folder and returned.",
            "edit": f"Draw a picture from a picture and a text with {pipe.model_name}. {way}.",
            "rewrite": "Write a better prompt, by the model's text encoder. Quoted text stays as it is.",
            "describe": "Describe a picture, or answer a question about it, by the model's text encoder.",
            "plan": "Say how much memory and time a picture takes, without drawing it.",
            "models": f"List the models, which of them are here, and the defaults of the open one, {pipe.model_name}.",
        }

    def run(self, name: str, arguments: Mapping[str, Any], call: Call) -> Answer:
        """Return the answer of a tool. Every fault that a client can cause is an answer too."""
        if call.ended.is_set():
            raise Ended
        try:
            if name not in self.schemas:
                raise UsageError(f"no tool {clean(name, 40)!r}; there are {', '.join(self.schemas)}")
            known = self.schemas[name]["properties"]
            for key in arguments:
                if key not in known:
                    taken = ", ".join(known) or "nothing"
                    raise UsageError(f"{name} takes no {clean(key, 40)!r}; it takes {taken}")
            given = {key: value for key, value in arguments.items() if value is not None}
            return getattr(self, name)(given, call)  # type: ignore[no-any-return]
        except (QwenimgError, MemoryError) as error:
            return Answer(text=self.folder.public(clean(str(error) or "out of memory", 300)), is_error=True)

    def draw(self, given: dict[str, Any], call: Call) -> Answer:
        return self._drawn(given, {}, call)

    def edit(self, given: dict[str, Any], call: Call) -> Answer:
        from qwenimg.common.pictures.input import read_image, read_mask

        image, mask = self._sources(given, "image"), self._sources(given, "mask")
        if not image:
            raise UsageError("image is missing; give the name of a picture in the folder, or image_base64")
        pictures: dict[str, Any] = {"image": [read_image(one)[0] for one in image]}
        if mask:
            pictures["mask"] = read_mask(mask[0], pictures["image"][0])[0]
        return self._drawn(given, pictures, call)

    def _sources(self, given: dict[str, Any], name: str) -> list[Path | OpenFile]:
        """Take the pictures `name` out of a call's arguments."""
        file, text = given.pop(name, None), given.pop(f"{name}_base64", None)
        if file is not None and text is not None:
            raise UsageError(f"{name} and {name}_base64 are given; give one")
        if text is not None:
            return [decoded(text, f"{name}_base64")]
        several = file if isinstance(file, list) and name == "image" else [] if file is None else [file]
        if len(several) > MOST_SEEN:
            raise UsageError(f"{name}: {len(several)} pictures; at most {MOST_SEEN} are taken")
        return [self.folder.inside(one, name) for one in several]

    def rewrite(self, given: dict[str, Any], call: Call) -> Answer:
        from qwenimg.common.parts.texts import rewriting

        prompt, seed = self._text(given, "prompt"), given.get("seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UsageError(f"seed is {clean(seed, 40)}; expected a whole number")
        notes: list[str] = []
        with self._describer(call, seeing=False) as describer:
            protocol = describer.writer.protocol
            draft, how = rewriting.Draft(prompt, protocol=protocol), replace(protocol.how, seed=seed)
            describer.check([draft.conversation], how)
            [made] = rewriting.rewrite(
                describer.writer, [draft], how, lambda kind, text: notes.append(text) if kind == "warning" else None
            )
        return Answer(text="\n".join([made.prompt, *(f"warning: {note}" for note in notes)]))

    def describe(self, given: dict[str, Any], call: Call) -> Answer:
        from qwenimg.common.parts.texts.describing import reduced
        from qwenimg.common.pictures.input import read_image
        from qwenimg.common.prompts.describing import Asking

        pictures = self._sources(given, "image")
        if len(pictures) != 1:
            raise UsageError("image is missing; give the name of one picture in the folder, or image_base64")
        tags, question = given.get("tags", False), self._text(given, "ask").strip()
        if not isinstance(tags, bool) or (tags and question):
            raise UsageError("tags is true or false, and beside a question in ask it is left out")
        asking = Asking(task="tags" if tags else "caption", language="en", question=question)
        with self._describer(call, seeing=True) as describer:
            return Answer(text=describer.describe(reduced(read_image(pictures[0])[0]), asking, MOST_TOKENS).text)

    def _text(self, given: Mapping[str, Any], name: str) -> str:
        text = given.get(name, "")
        if not isinstance(text, str):
            raise UsageError(f"{name} is {clean(text, 40)}; expected a text")
        return text

    @contextmanager
    def _describer(self, call: Call, *, seeing: bool) -> Iterator[Describer]:
        """Open the language model of the open model, which a call's end or deadline stops between two tokens."""
        from qwenimg.common.parts.texts.describing import Describer
        from qwenimg.common.parts.texts.writers import OTHER, own_writer
        from qwenimg.common.shapes import builtin

        assert self.pipe.checkpoint is not None
        if self.pipe.model_name == builtin.NAME:
            raise builtin.writes_nothing()
        residents, runtime, until = self.pipe.model.residents, self.pipe.runtime, time.monotonic() + self.deadline

        def check() -> None:
            if call.ended.is_set():
                raise Ended
            if time.monotonic() > until:
                raise UsageError(f"stopped after {self.deadline:g} s, the --deadline")

        if seeing or self.pipe.rewriters.is_own:
            writer = own_writer(residents, self.pipe.checkpoint, seeing, OTHER)
        else:
            writer = self.pipe.rewriters.writer(self.pipe.model, seeing)
        before, runtime.interrupt = runtime.interrupt, check
        try:
            yield Describer(writer=writer)
        finally:
            runtime.interrupt = before
            residents.drop(OTHER)

    def plan(self, given: dict[str, Any], call: Call) -> Answer:
        given.pop("name", None)
        count = self._count(given)
        needs = self.pipe.estimate(given.pop("prompt", "a picture"), **given)
        each = "" if count == 1 else f", {count} pictures so many times as long"
        return Answer(text=f"{self.pipe.model_name} {summary(needs.memory, needs.seconds)}{each}")

    def models(self, given: dict[str, Any], call: Call) -> Answer:
        from qwenimg.cli.commands.models import table

        usual = self.pipe.defaults
        about = {name: getattr(usual, name) for name in ("width", "height", "steps", "guidance")}
        return Answer(text=f"open: {self.pipe.model_name}, {json.dumps(about)}\n\n{table()}")

    def _drawn(self, given: dict[str, Any], pictures: dict[str, Any], call: Call) -> Answer:
        """Return the pictures of a call, each with the next seed. All are written, or those until an error."""
        from qwenimg.common.request.request import random_seed

        prompt, count = given.pop("prompt", ""), self._count(given)
        stem = stem_of(given.pop("name", None), prompt if isinstance(prompt, str) else "")
        options = given | pictures
        seed = options.pop("seed", None)
        first = random_seed() if seed is None else seed
        seeds = [first + i for i in range(count)]
        for one in {seeds[0], seeds[-1]}:
            self.pipe.check(prompt, **options, seed=one)
        until = time.monotonic() + self.deadline
        results: list[tuple[Result, str]] = []
        for index, one in enumerate(seeds):
            result = self._one(prompt, options | {"seed": one}, call, until, index, count)
            path = self.folder.free_name(stem)
            result.save(path)
            results.append((result, path.name))
        return Answer(text="\n".join(_lines(results)), pictures=tuple(result.png() for result, _ in results))

    def _one(self, prompt: str, options: dict[str, Any], call: Call, until: float, index: int, count: int) -> Result:
        from qwenimg import Result

        with closing(self.pipe.stream(prompt, **options)) as events:
            for event in events:
                if isinstance(event, Result):
                    return event
                if call.ended.is_set():
                    raise Ended
                if time.monotonic() > until:
                    raise UsageError(f"stopped at step {event.index} after {self.deadline:g} s, the --deadline")
                call.progress(index * event.total + event.index, count * event.total)
        raise AssertionError("a stream ends with its result")

    def _count(self, given: dict[str, Any]) -> int:
        """Take the number of pictures out of a call's arguments."""
        count = given.pop("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_PICTURES:
            raise UsageError(f"count is {clean(count, 40)}; choose 1 to {MOST_PICTURES}")
        if "seed" in given and (isinstance(given["seed"], bool) or not isinstance(given["seed"], int)):
            raise UsageError(f"seed is {clean(given['seed'], 40)}; expected a whole number")
        return count


def _object(properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def _lines(results: Sequence[tuple[Result, str]]) -> list[str]:
    """Return a line for each picture: its file, its size and its seed, and its warnings."""
    lines = []
    for result, name in results:
        recipe = result.recipe
        lines.append(f"{name}: {recipe['width']}x{recipe['height']}, seed {result.seed}, {recipe['steps']} steps")
        lines += [f"warning: {line}" for line in result.warnings]
    return lines
