"""The JSON Schema of the options of an image: a line of a prompt file, or a request to a server."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from qwenimg.common.families.registry import FAMILIES
from qwenimg.common.jobs.image_options import TEXT_OPTIONS
from qwenimg.common.numbers.sizes import MAX_SIDE
from qwenimg.common.request.family_options import FAMILY_OPTIONS
from qwenimg.common.request.option import Option
from qwenimg.common.request.request import Defaults

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[type | None, str] = {int: "integer", float: "number", str: "string"}
_BOUNDS = {False: ("minimum", "maximum"), True: ("exclusiveMinimum", "exclusiveMaximum")}
# Pairs of options that give the same twice.
_EITHER = (("size", "aspect"), ("size", "width"), ("size", "height"), ("aspect", "width"), ("aspect", "height"))


def request_schema() -> dict[str, Any]:
    """Return the schema, in draft 2020-12. It has the program's defaults, and none that depend on the model."""
    return {
        "$schema": DIALECT,
        "title": "qwenimg request",
        "description": f"A picture to make. What is left out is the model's own; sides are at most {MAX_SIDE} pixels.",
        "type": "object",
        "properties": {name: _property(one) for name, one in TEXT_OPTIONS.items()},
        "required": ["prompt"],
        "additionalProperties": False,
        "not": {"anyOf": [{"required": list(names)} for names in _EITHER]},
    }


def _property(one: Option) -> dict[str, Any]:
    kind = _number(one) if one.least is not None else _text(one)
    if one.several:
        kind = {"anyOf": [kind | {"minimum": -1}, {"type": "string", "maxLength": one.longest}]}
    models_own = {field.name for field in fields(Defaults)}
    about: dict[str, Any] = {"description": one.format_help(one.help)}
    if one.kind is not str and not one.several and one.name not in models_own and one.default is not None:
        about["default"] = one.default
    if one.name in FAMILY_OPTIONS:
        about["x-families"] = [family.name for family in FAMILIES if one.name in family.options]
    return about | kind


def _number(one: Option) -> dict[str, Any]:
    least, most = _BOUNDS[bool(one.open)][0], _BOUNDS[one.open == "both"][1]
    return {"type": _TYPES[one.kind], least: one.least, most: one.most}


def _text(one: Option) -> dict[str, Any]:
    if one.names is not None:
        return {"type": "string", "enum": list(one.names())}
    if one.parse is not None:
        each = {"type": "string", "maxLength": one.longest}
        return {"anyOf": [each, {"type": "array", "items": each}]}
    return {"type": "string", "maxLength": one.longest}
