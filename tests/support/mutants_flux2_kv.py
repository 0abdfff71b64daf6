"""Faults in FLUX.2 klein KV that klein has not: in the keys and values of references, which are made once and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.networks.denoisers import flux2_conditioning
from qwenimg.common.parity.sample import SEEN
from support import mutants_flux2 as flux2
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch

FIRST = SEEN[0][0] // 16 * (SEEN[0][1] // 16)
"""Tokens of the first reference."""


def _network(patch: Patch) -> Any:
    return patch.backend.network("flux2_kv_dit")


# References in a block


def _references(patch: Patch, change: Callable[..., Any]) -> None:
    """Makes blocks return change(the original, block, references, modulation, table)."""
    for block in (_network(patch).DoubleBlock, _network(patch).SingleBlock):
        patch.around(block, "run_references", change)


def references_apart(patch: Patch) -> None:
    """Each sees itself alone."""

    def apart(run: Any, block: Any, ref: Any, mod: Any, rope: Any) -> Any:
        if ref.shape[1] <= FIRST:
            return run(block, ref, mod, rope)
        parts = slice(FIRST), slice(FIRST, None)
        (a, known), (b, more) = (run(block, ref[:, part], mod, rope[part]) for part in parts)
        keys, values = (patch.backend.join(list(both), 1) for both in zip(known, more, strict=True))
        return patch.backend.join([a, b], 1), (keys, values)

    _references(patch, apart)


def references_in_one_place(patch: Patch) -> None:
    """That of their first token."""
    _references(patch, lambda run, block, ref, mod, rope: run(block, ref, mod, rope[:1]))


def references_not_updated(patch: Patch) -> None:
    _references(patch, lambda run, block, ref, *own: (ref, run(block, ref, *own)[1]))


def feed_forward_of_the_text(patch: Patch) -> None:
    patch.exchanged(_network(patch).DoubleBlock, "run_references", "ff", "ff_context")


def queries_of_the_text(patch: Patch) -> None:
    patch.exchanged(_network(patch).Attention, "references", "to_q", "add_q_proj")


def values_of_the_text(patch: Patch) -> None:
    patch.exchanged(_network(patch).Attention, "references", "to_v", "add_v_proj")


def norm_of_the_text(patch: Patch) -> None:
    """Of keys."""
    patch.exchanged(_network(patch).Attention, "references", "norm_k", "norm_added_k")


# Keys and values of references


def _kept(patch: Patch, change: Callable[..., Any]) -> None:
    """Makes change(the original, attention, keys, values) be kept."""
    patch.around(_network(patch), "kept", change)


def keys_and_values_exchanged(patch: Patch) -> None:
    _kept(patch, lambda kept, *given: kept(*given)[::-1])


def heads_of_others(patch: Patch) -> None:
    """Of values: each head has the next one's."""
    _kept(patch, lambda kept, attend, k, v: kept(attend, k, patch.backend.lib.roll(v, 1, 2)))


def kept_in_bfloat16(patch: Patch) -> None:
    _kept(patch, lambda kept, *given: tuple(patch.backend.rounded(one) for one in kept(*given)))


def values_scaled_twice(patch: Patch) -> None:
    """By what float16 needs."""
    _kept(patch, lambda kept, attend, k, v: kept(attend, k, attend.values(v)))


def _not_seen(network: str) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        patch.around(patch.backend.network(network), "with_known", lambda made, attend, k, v, known: (k, v))

    plant.__name__ = f"not_seen_in_{network}"
    return plant


def first_reference_alone(patch: Patch) -> None:
    """Is seen by text and image."""
    for network in ("diffusion_transformer", "flux2_dit"):
        patch.around(
            patch.backend.network(network),
            "with_known",
            lambda made, attend, k, v, known: made(
                attend, k, v, None if known is None else tuple(part[:, :FIRST] for part in known)
            ),
        )


# What is kept from step to step


def _model(patch: Patch, change: Callable[..., Any]) -> None:
    """Makes the network predict change(the original, network, inputs, references, tables, known, whether it keeps)."""

    def changed(call: Any, own: Any, latents: Any, features: Any, txt: Any, *rest: Any) -> Any:
        return change(lambda *given: call(own, latents, features, txt, *given), own, features, *rest)

    patch.around(_network(patch).Flux2KVTransformer, patch.backend.calls, changed)


def references_at_the_time_of_the_image(patch: Patch) -> None:
    """Of the first step, for time 0."""
    _model(
        patch,
        lambda call, own, features, references, *rest: call((references[0], own.still(features)), *rest),
    )


def made_anew_for_each_time(patch: Patch) -> None:
    """As klein's are."""
    _model(
        patch,
        lambda call, own, features, references, ropes, known, keeps: call(
            (references[0], own.still(features)), ropes, (), keeps
        ),
    )


def forgotten_after_the_first_step(patch: Patch) -> None:
    _model(
        patch,
        lambda call, own, features, references, ropes, known, keeps: call(
            (None, references[1]) if known else references, ropes, (), keeps
        ),
    )


def blocks_back_to_front(patch: Patch) -> None:
    """What one has kept goes to another."""
    _model(
        patch,
        lambda call, own, features, references, ropes, known, keeps: call(references, ropes, known[::-1], keeps),
    )


def of_the_block_before(patch: Patch) -> None:
    _model(
        patch,
        lambda call, own, features, references, ropes, known, keeps: call(
            references, ropes, [*known[:1], *known[:-1]], keeps
        ),
    )


def references_at_time_1(patch: Patch) -> None:
    """For time 1 of 1000."""
    patch.around(flux2_conditioning, "time_rows", lambda made, config, time, *rest: made(config, time or 1.0, *rest))


def references_modulated_as_text(patch: Patch) -> None:
    patch.exchanged(
        _network(patch).Flux2KVTransformer, "still", "double_stream_modulation_img", "double_stream_modulation_txt"
    )


MUTANTS = (
    *flux2.BLOCKS,
    Mutant(references_apart, "references that see themselves alone"),
    Mutant(references_in_one_place, "references without positions of their own"),
    Mutant(references_not_updated, "references that no block updates"),
    Mutant(feed_forward_of_the_text, "the text's feed-forward for references"),
    Mutant(queries_of_the_text, "the text's queries for references"),
    Mutant(values_of_the_text, "the text's values for references"),
    Mutant(norm_of_the_text, "the text's norm of keys for references"),
    Mutant(keys_and_values_exchanged, "kept keys and values exchanged"),
    Mutant(heads_of_others, "kept values of other heads"),
    Mutant(kept_in_bfloat16, "keys and values kept in bfloat16", refused=("bf16", "fp16")),
    Mutant(values_scaled_twice, "kept values scaled twice", "fp16"),
    Mutant(_not_seen("diffusion_transformer"), "references not seen in blocks of two streams"),
    Mutant(_not_seen("flux2_dit"), "references not seen in blocks of one stream"),
    Mutant(first_reference_alone, "the first reference alone seen"),
    *flux2.QWEN3,
    *flux2.VAE,
    *shared.ARITHMETIC,
    Mutant(references_at_the_time_of_the_image, "references at the time of the first step", picture=True),
    Mutant(made_anew_for_each_time, "references at the time of each step", picture=True),
    Mutant(forgotten_after_the_first_step, "keys and values not kept", picture=True),
    Mutant(blocks_back_to_front, "kept keys and values with the blocks back to front", picture=True),
    Mutant(of_the_block_before, "kept keys and values of the block before", picture=True),
    Mutant(references_at_time_1, "references at time 1 of 1000", picture=True),
    Mutant(references_modulated_as_text, "the text's modulation for references", picture=True),
    Mutant(shared.velocity_sign("flux2_kv_dit"), "the velocity's sign", picture=True),
    *(replace(one, refused=("bf16",)) if one.name == "text_from_one" else one for one in flux2.LOOP),
    *flux2.TEMPLATE,
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["flux2-kv"], pictures=2)
