"""Faults in FLUX.2 dev that klein has not: in the guidance that its transformer takes, its text encoder, the template
and its pads before a text, and guidance by a negative prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.families.flux2 import model
from qwenimg.common.families.flux2.texts import InstructionTemplate
from qwenimg.common.numbers import scaled_rope
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.steps.guidance import TRUE_CFG
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from support import mutants_flux2 as flux2
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch

# The guidance that the transformer takes


def _embedding(patch: Patch) -> Any:
    return patch.backend.network("flux2_dit").TimeGuidanceEmbed


def guidance_not_read(patch: Patch) -> None:
    patch.around(
        _embedding(patch), patch.backend.calls, lambda call, own, features: own.timestep_embedder(features[:1])
    )


def guidance_embedded_as_the_time(patch: Patch) -> None:
    """And the other way round."""
    patch.exchanged(_embedding(patch), patch.backend.calls, "timestep_embedder", "guidance_embedder")


def guidance_averaged(patch: Patch) -> None:
    """With the time, for their sum."""
    patch.around(_embedding(patch), patch.backend.calls, lambda call, own, features: call(own, features) / 2)


def _guidance(patch: Patch, change: Callable[[float], float]) -> None:
    patch.around(
        model, "time_rows", lambda made, config, time, dtype, guidance: made(config, time, dtype, change(guidance))
    )


def guidance_1_off(patch: Patch) -> None:
    _guidance(patch, lambda guidance: 1.01 * guidance)


def guidance_not_times_1000(patch: Patch) -> None:
    _guidance(patch, lambda guidance: guidance / 1000)


def time_for_guidance(patch: Patch) -> None:
    patch.around(model, "time_rows", lambda made, config, time, dtype, guidance: made(config, time, dtype, time / 1000))


# The text encoder


def taps_of_klein(patch: Patch) -> None:
    flux2.taps(patch, lambda taps: (9, 18, 27))


def theta_of_others(patch: Patch) -> None:
    patch.around(scaled_rope, "frequencies", lambda made, theta, *rest: made(1e4, *rest))


def pads_see_each_other(patch: Patch) -> None:
    """And are seen by no text."""

    def seen(attended: Any, layer: Any, q: Any, k: Any, v: Any, pads: int) -> Any:
        out = attended(layer, q, k, v, pads)
        if not pads:
            return out
        return patch.backend.join([attended(layer, q[:, :pads], k[:, :pads], v[:, :pads], 0), out[:, pads:]], 1)

    patch.around(patch.backend.network("decoder").Attention, "attended", seen)


# The template


def _filled(patch: Patch, change: Callable[[PromptTokens], PromptTokens]) -> None:
    patch.around(InstructionTemplate, "fill", lambda fill, template, *given: change(fill(template, *given)))


def pads_behind_the_text(patch: Patch) -> None:
    _filled(patch, lambda made: replace(made, ids=made.ids[made.pads :] + made.ids[: made.pads]))


def one_pad_of_512(patch: Patch) -> None:
    """Too few."""
    _filled(patch, lambda made: replace(made, ids=made.ids[1:], pads=made.pads - 1))


def no_token_before_the_text(patch: Patch) -> None:
    """One pad more for it."""
    _filled(
        patch,
        lambda made: PromptTokens((made.ids[0], *made.ids[: made.pads], *made.ids[made.pads + 1 :]), 0, made.pads + 1),
    )


def prompt_not_closed(patch: Patch) -> None:
    _filled(patch, lambda made: PromptTokens((made.ids[0], *made.ids[:-1]), 0, made.pads + 1))


def _instruction(patch: Patch, change: Callable[[str], str]) -> None:
    patch.around(
        InstructionTemplate,
        "fill",
        lambda fill, template, *given: fill(replace(template, text=change(template.text)), *given),
    )


def no_instruction(patch: Patch) -> None:
    _instruction(patch, lambda text: "")


def instruction_on_one_line(patch: Patch) -> None:
    _instruction(patch, lambda text: text.replace("\n", " "))


def markers_as_text(patch: Patch) -> None:
    """Of the template, split into words as a prompt's are."""

    def filled(fill: Any, template: Any, tokenizer: Any, prompt: str) -> PromptTokens:
        ids = tokenizer.plain(f"<s>[SYSTEM_PROMPT]{template.text}[/SYSTEM_PROMPT][INST]{prompt}[/INST]")
        pads = template.limit - len(ids)
        return PromptTokens((*[tokenizer.special(template.pad)] * pads, *ids), 0, pads)

    patch.around(InstructionTemplate, "fill", filled)


def text_without_pads(patch: Patch) -> None:
    patch.around(
        TemplateTexts,
        "states",
        lambda made, texts, prompts: [
            states[:, texts.fill(prompt).pads :] for states, prompt in zip(made(texts, prompts), prompts, strict=True)
        ],
    )


# Guidance by a negative prompt


def _true_cfg(patch: Patch, formula: Callable[..., Any]) -> None:
    patch.set(model, "TRUE_CFG", replace(TRUE_CFG, formula=formula))


def branches_swapped(patch: Patch) -> None:
    _true_cfg(patch, lambda engine, request, both: TRUE_CFG.formula(engine, request, both[::-1]))


def guidance_from_the_prompt(patch: Patch) -> None:
    """pos + s (pos - neg)."""
    _true_cfg(patch, lambda engine, request, both: both[0] + request.true_cfg * (both[0] - both[1]))


def embedded_guidance_for_true_cfg(patch: Patch) -> None:
    """Its scale."""
    _true_cfg(patch, lambda engine, request, both: both[1] + request.guidance * (both[0] - both[1]))


HARDLY_IN_BF16 = ("references_one_apart", "references_in_one_frame")
MUTANTS = (
    Mutant(guidance_not_read, "no embedding of the guidance"),
    Mutant(guidance_embedded_as_the_time, "the embeddings of time and guidance exchanged"),
    Mutant(guidance_averaged, "the mean of the embeddings of time and guidance for their sum"),
    *flux2.BLOCKS,
    Mutant(flux2.taps_one_layer_early, "text states of one layer before"),
    Mutant(flux2.taps_the_last_three, "text states of the last three layers"),
    Mutant(taps_of_klein, "text states of klein's layers"),
    Mutant(shared.text_not_causal, "a Mistral that sees what comes"),
    Mutant(shared.text_rope_of_pairs, "Mistral's RoPE on pairs for halves"),
    Mutant(shared.keys_not_shared, "Mistral's shared heads of keys dealt out in another order"),
    Mutant(flux2.pads_attended, "pads attended"),
    Mutant(pads_see_each_other, "pads that see each other"),
    *flux2.VAE,
    *shared.ARITHMETIC,
    Mutant(theta_of_others, "Mistral's RoPE with theta 10000", picture=True),
    Mutant(guidance_1_off, "the embedded guidance 1 % off", picture=True),
    Mutant(guidance_not_times_1000, "the embedded guidance not times 1000", picture=True),
    Mutant(time_for_guidance, "the time for the guidance", picture=True),
    Mutant(pads_behind_the_text, "pads behind the text", picture=True),
    Mutant(one_pad_of_512, "one pad too few", picture=True),
    Mutant(no_token_before_the_text, "no token before the instruction", picture=True),
    Mutant(prompt_not_closed, "no token behind the prompt", picture=True),
    Mutant(no_instruction, "no instruction", picture=True),
    Mutant(instruction_on_one_line, "the instruction on one line", picture=True),
    Mutant(markers_as_text, "the template's markers as text", picture=True),
    Mutant(text_without_pads, "text without its pads", picture=True),
    Mutant(shared.velocity_sign("flux2_dit"), "the velocity's sign", picture=True),
    *(replace(one, refused=("bf16",)) if one.name in HARDLY_IN_BF16 else one for one in flux2.LOOP),
    Mutant(shared.velocity_of_other_tokens, "the velocity of other tokens", picture=True),
    Mutant(branches_swapped, "the branches of guidance exchanged", picture=True),
    Mutant(guidance_from_the_prompt, "guidance from the prompt's prediction", picture=True),
    Mutant(embedded_guidance_for_true_cfg, "the embedded guidance's scale for the other", picture=True),
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["flux2-dev"], pictures=2, true_cfg=2.5)
