"""`--from`: a run completed from the recipe in a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from qwenimg.cli.drawing import Run
from qwenimg.common.base.text import clean
from qwenimg.common.hub import origin
from qwenimg.common.jobs.image_options import merged
from qwenimg.common.jobs.legal import check_replay
from qwenimg.common.jobs.replay import Replay, differences, read_replay
from qwenimg.common.request.embedding_text import Embedding
from qwenimg.common.request.parts import PARTS


def with_recipe(run: Run, picture: Path, notify: Callable[[str, str], None], *, keep_policy: bool) -> Run:
    """Return `run` with the options and the model of the recipe in `picture`, or of the workflow there, and notes about
    differences. keep_policy: the recipe sets the precision. Raises UsageError and ModelError."""
    replay = read_replay(picture)
    lines = [("warning", line) for line in replay.messages]

    def later(kind: str, line: str) -> None:
        lines.append((kind, line))

    replay = _with_foreign_files(replay, run, later) if replay.foreign_model is not None else replay
    replay = _with_embeddings(_with_upscaler(_with_loras(replay, run, later), run), run, later)
    opening = origin.with_recorded_parts(run.opening, replay, run.folders)
    opening = origin.with_recorded_model(opening, replay, run.folders)
    images = run.files.images
    inputs: dict[str, object] = {"mask_sha256": run.files.mask, "latents": run.latents}
    inputs |= {"image_sha256": images or None, "more_images_sha256": images[1:] or None}
    inputs |= {part: opening.value(part) for part in PARTS}
    inputs |= {name: run.options.get(name) for name in ("lora", "embedding", "control", "hires_with", "seed")}
    check_replay(replay, inputs, opening.model)
    opening = origin.replayed(opening, replay, picture, run.folders, keep_policy=keep_policy)
    for kind, line in lines:  # not before an error, which is one line
        notify(kind, line)
    return replace(
        run,
        options=merged(replay.options, run.options),
        opening=opening,
        output=replace(run.output, notes=lambda job, recipe: [*replay.messages, *differences(replay, job, recipe)]),
    )


def _with_foreign_files(replay: Replay, run: Run, notify: Callable[[str, str], None]) -> Replay:
    """Return `replay` with the files that another program's recipe names: LoRAs, and the upscaler of the finished
    picture, in the folders of --models-dir and the cache; and the names here of its control networks. What is not here
    is left out, with a warning."""
    from qwenimg.common.hub.lora_search import by_name
    from qwenimg.common.hub.network_search import control_name, upscaler_named

    options, used = dict(replay.options), dict(replay.used)
    if used.pop("lora", None) is not None and "lora" not in run.options:
        found = by_name(run.folders, replay.loras, replay.lora_hashes)
        for line in found.lines:
            notify("warning", f"--from: {line}")
        options |= {"lora": found.loras} if found.loras else {}
    name = used.pop("upscale_with", None)
    if name is not None and "upscale_with" not in run.options:
        path = None if run.folders is None else upscaler_named(name, run.folders)
        by = replay.enlarged_by
        if path is not None:
            options |= {"upscale_with": str(path)} | ({} if by is None else {"upscale": by})
        else:
            times = "" if by is None else f" {by} times as large"
            notify("warning", f"--from: {clean(name, 60)} made it{times}, and is not here: give --upscale-with FILE")
    controls = tuple(replace(one, network=control_name(one.network, run.folders)) for one in replay.controls)
    return replace(replay, options=options, used=used, controls=controls)


def _with_upscaler(replay: Replay, run: Run) -> Replay:
    """Return `replay` with the upscaler of its recipe, if the folders of --models-dir have a file of its name."""
    name = replay.used.get("hires_with")
    if name is None or run.folders is None or "hires_with" in run.options:
        return replay
    from qwenimg.common.hub.network_search import upscaler_named

    path = upscaler_named(name, run.folders)
    used = {key: value for key, value in replay.used.items() if key != "hires_with"}
    return replay if path is None else replace(replay, options=replay.options | {"hires_with": str(path)}, used=used)


def _with_embeddings(replay: Replay, run: Run, notify: Callable[[str, str], None]) -> Replay:
    """Return `replay` with the files of the embeddings of its recipe that the folders of --models-dir have, by their
    content. Another program's that are not here are drawn as words."""
    if not replay.embeddings or "embedding" in run.options:
        return replay
    from qwenimg.common.hub.network_search import embeddings_by_content

    marks = dict(zip(replay.embeddings, replay.embedding_sha256, strict=False))
    found = {} if run.folders is None else embeddings_by_content(run.folders, marks)
    if missing := [clean(name, 60) for name in replay.embeddings if name not in found]:
        if replay.noise_sha256 is not None:
            used = replay.used | {"embedding": "; ".join(missing)}
            return replace(replay, used=used)  # which `check_replay` refuses
        notify("warning", f"--from: not here, and drawn as words unless given by --embedding: {', '.join(missing)}")
    used = {name: value for name, value in replay.used.items() if name != "embedding"}
    given = tuple(Embedding(str(path), name) for name, path in found.items())
    return replace(replay, options=replay.options | ({"embedding": given} if given else {}), used=used)


def _with_loras(replay: Replay, run: Run, notify: Callable[[str, str], None]) -> Replay:
    """Return `replay` with paths for the LoRAs of its recipe, searched in the folders of --models-dir."""
    if "lora" not in replay.used or "lora" in run.options or run.folders is None:
        return replay
    from qwenimg.common.hub.lora_search import located

    loras, lines = located(run.folders, replay.loras, replay.lora_fingerprints)
    for line in lines:
        notify("stage", line)
    used = {name: value for name, value in replay.used.items() if name != "lora"}
    return replace(replay, options=replay.options | {"lora": loras}, used=used)
