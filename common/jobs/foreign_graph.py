"""ComfyUI's graphs of nodes, in both forms: that of its API, which pictures have as `prompt`, and that of its page.

The API's form is {id: {"class_type": kind, "inputs": {name: value, or [id, slot] for a link}}}. The page's form has a
list of nodes whose values stand in the order of the node's widgets, and a list of links; it is converted to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean

MAX_NODES = 2_000
MAX_LINKS = 20_000
MAX_HOPS = 50  # from the sampler back
HELD = ("value", "text", "string", "seed", "noise_seed", "int", "float", "number")  # where a node keeps one value
_MUTED, _BYPASSED = 2, 4  # modes of a node of the page
_SIZE = ("width", "height", "batch_size")
_APPLY = ("strength", "start_percent", "end_percent")
# The names of a node's widgets, in the order of their values; "" for one that changes nothing.
WIDGETS: Mapping[str, tuple[str, ...]] = {
    "KSampler": ("seed", "", "steps", "cfg", "sampler_name", "scheduler", "denoise"),
    "CheckpointLoaderSimple": ("ckpt_name",),
    "CheckpointLoader": ("config_name", "ckpt_name"),
    "UNETLoader": ("unet_name", "weight_dtype"),
    "CLIPTextEncode": ("text",),
    "CLIPTextEncodeFlux": ("clip_l", "t5xxl", "guidance"),
    "CLIPTextEncodeSDXL": (
        "width", "height", "crop_w", "crop_h", "target_width", "target_height", "text_g", "text_l",
    ),
    "EmptyLatentImage": _SIZE,
    "EmptySD3LatentImage": _SIZE,
    "LoraLoader": ("lora_name", "strength_model", "strength_clip"),
    "LoraLoaderModelOnly": ("lora_name", "strength_model"),
    "ControlNetLoader": ("control_net_name",),
    "DiffControlNetLoader": ("control_net_name",),
    "ControlNetApply": ("strength",),
    "ControlNetApplyAdvanced": _APPLY,
    "ControlNetApplySD3": _APPLY,
    "SetUnionControlNetType": ("type",),
    "ModelPatchLoader": ("name",),
    "QwenImageDiffsynthControlnet": ("strength",),
    "ZImageFunControlnet": ("strength",),
    "IPAdapterModelLoader": ("ipadapter_file",),
    "IPAdapterUnifiedLoader": ("preset",),
    "IPAdapter": ("weight", "start_at", "end_at", "weight_type"),
    "IPAdapterAdvanced": ("weight", "weight_type", "combine_embeds", "start_at", "end_at", "embeds_scaling"),
    "IPAdapterApply": ("weight", "noise", "weight_type", "start_at", "end_at", "unfold_batch"),
    "StyleModelApply": ("strength", "strength_type"),
    "StyleModelLoader": ("style_model_name",),
    "UpscaleModelLoader": ("model_name",),
    "Canny": ("low_threshold", "high_threshold"),
    "CannyEdgePreprocessor": ("low_threshold", "high_threshold", "resolution"),
    "LoadImage": ("image", ""),
    "PrimitiveNode": ("value", ""),
}  # fmt: skip


class NotPlain(Exception):
    """A sound graph that cannot be followed."""


@dataclass(frozen=True, kw_only=True)
class Node:
    kind: str
    inputs: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Graph:
    nodes: Mapping[str, Node]
    seen: set[str] = field(default_factory=set)  # kinds of nodes that were followed

    def chain(self, node: Node, *keys: str) -> Iterator[Node]:
        """Yield the nodes upstream of `node`, each by the first of `keys` that has a link; of a node that passes on
        both prompts, by the one whose output is linked. Raises NotPlain for a circle."""
        for _ in range(MAX_HOPS):
            behind = next((source for key in keys if (source := self._source(node, key))), None)
            if behind is None:
                return
            node, slot = behind
            yield node
            if slot in (0, 1) and {"positive", "negative"} <= node.inputs.keys():
                keys = (("positive", "negative")[slot], *keys[1:])
        raise NotPlain(f"its {keys[0]} runs in a circle")

    def linked(self, node: Node, key: str) -> Node | None:
        """Return the node linked to the input `key` of `node`, or None."""
        source = self._source(node, key)
        return None if source is None else source[0]

    def _source(self, node: Node, key: str) -> tuple[Node, object] | None:
        """Return the node linked to an input and the number of its output."""
        link = node.inputs.get(key)
        if not isinstance(link, list) or not link or (source := self.nodes.get(str(link[0]))) is None:
            return None
        slot = link[1] if len(link) > 1 and type(link[1]) is int else 0
        return source, slot

    def value(self, node: Node, key: str) -> object:
        """Return the value of the input `key`, followed through nodes that hold one value. Raises NotPlain."""
        value = node.inputs.get(key)
        for _ in range(MAX_HOPS):
            if not isinstance(value, list):
                return value
            source = self.nodes.get(str(value[0])) if value else None
            names = [name for name in HELD if source is not None and name in source.inputs]
            if source is None or not names:
                raise NotPlain(f"its {key} comes from a {'missing' if source is None else clean(source.kind, 40)} node")
            self.seen.add(source.kind)
            value = source.inputs[names[0]]
        raise NotPlain(f"its {key} runs in a circle")


def read_graph(data: object, path: Path) -> Graph:
    """Return the graph in JSON of either form. Raises ModelError."""
    if is_page_form(data):
        return _from_page(data, path)
    if not isinstance(data, dict) or not data or len(data) > MAX_NODES:
        raise bad(path, f"its ComfyUI graph is not an object of 1 to {MAX_NODES:,} nodes")
    nodes = {}
    for key, node in data.items():
        kind = node.get("class_type") if isinstance(node, dict) else None
        inputs = node.get("inputs") if isinstance(node, dict) else None
        if not isinstance(kind, str) or not isinstance(inputs, dict):
            raise bad(path, f"its ComfyUI graph has a node {clean(key, 20)!r} without class_type and inputs")
        nodes[key] = Node(kind=kind, inputs=inputs)
    return Graph(nodes=nodes)


def is_page_form(data: object) -> bool:
    """Return whether `data` is a graph as ComfyUI's page saves it."""
    return isinstance(data, dict) and isinstance(data.get("nodes"), list) and "links" in data


def is_api_form(data: object) -> bool:
    """Return whether `data` is a graph as ComfyUI's API takes it."""
    return (
        isinstance(data, dict) and bool(data) and all(isinstance(v, dict) and "class_type" in v for v in data.values())
    )


# The page's form


@dataclass(frozen=True, kw_only=True)
class _PageNode:
    kind: str
    mode: object
    inputs: list[dict[str, Any]]  # that take links
    outputs: list[object]  # the kind of each
    values: object  # of its widgets


def _from_page(data: Any, path: Path) -> Graph:
    rows, links = data["nodes"], _links(data["links"], path)
    if not rows or len(rows) > MAX_NODES:
        raise bad(path, f"its ComfyUI graph has {len(rows):,} nodes; 1 to {MAX_NODES:,} are read")
    nodes = dict(_page_node(row, path) for row in rows)
    if len(nodes) < len(rows):
        raise bad(path, "its ComfyUI graph has two nodes with one id")
    here = {key: node for key, node in nodes.items() if node.mode not in (_MUTED, _BYPASSED)}
    return Graph(nodes={key: Node(kind=node.kind, inputs=_inputs(node, nodes, links)) for key, node in here.items()})


def _page_node(row: object, path: Path) -> tuple[str, _PageNode]:
    table: dict[str, Any] = row if isinstance(row, dict) else {}
    key, kind, inputs, outputs = (table.get(name) for name in ("id", "type", "inputs", "outputs"))
    inputs, outputs = inputs or [], outputs or []
    lists = isinstance(inputs, list) and isinstance(outputs, list)
    if type(key) not in (int, str) or not isinstance(kind, str) or not lists:
        raise bad(path, f"its ComfyUI graph has a node {clean(key, 20)!r} without id, type, inputs and outputs")
    if not all(isinstance(one, dict) for one in (*inputs, *outputs)):
        raise bad(path, f"the inputs of node {clean(key, 20)!r} of its ComfyUI graph, or its outputs, are no objects")
    kinds = [one.get("type") for one in outputs]
    values = table.get("widgets_values")
    return str(key), _PageNode(kind=kind, mode=table.get("mode"), inputs=inputs, outputs=kinds, values=values)


def _links(rows: object, path: Path) -> dict[object, tuple[str, int]]:
    """Return the node and the output at which each link begins, by the link's id."""
    if not isinstance(rows, list) or len(rows) > MAX_LINKS:
        raise bad(path, f"its ComfyUI graph has no list of at most {MAX_LINKS:,} links")
    links: dict[object, tuple[str, int]] = {}
    for row in rows:
        if isinstance(row, dict):
            row = [row.get(name) for name in ("id", "origin_id", "origin_slot")]
        if row is None:  # what is left of a link that was removed
            continue
        if not isinstance(row, list) or len(row) < 3 or type(row[0]) not in (int, str) or type(row[2]) is not int:
            raise bad(path, f"its ComfyUI graph has a broken link {clean(row, 40)}")
        links[row[0]] = str(row[1]), row[2]
    return links


def _inputs(
    node: _PageNode, nodes: Mapping[str, _PageNode], links: Mapping[object, tuple[str, int]]
) -> dict[str, object]:
    """Return the values of a node's widgets, and its links, which take their place."""
    inputs = _widgets(node)
    for one in node.inputs:
        name, origin = one.get("name"), _origin(one.get("link"), nodes, links)
        if isinstance(name, str) and origin is not None:
            inputs[name] = [origin[0], origin[1]]
    return inputs


def _widgets(node: _PageNode) -> dict[str, object]:
    values = node.values
    if isinstance(values, dict):
        return {str(name): value for name, value in values.items()}
    if not isinstance(values, list):
        return {}
    names = WIDGETS.get(node.kind)
    if names is None:
        stated = [one["widget"].get("name") for one in node.inputs if isinstance(one.get("widget"), dict)]
        names = tuple(map(str, stated)) if len(stated) == len(values) else ()
    if node.kind == "KSampler" and len(values) == len(names) - 1:  # before pages had "control after generate"
        names = tuple(filter(None, names))
    found: dict[str, object] = {name: value for name, value in zip(names, values, strict=False) if name}
    if not names:
        tables = (value for value in values if isinstance(value, dict) and "lora" in value)
        found |= {f"lora_{i}": value for i, value in enumerate(tables)}
    return found


def _origin(
    link: object, nodes: Mapping[str, _PageNode], links: Mapping[object, tuple[str, int]]
) -> tuple[str, int] | None:
    """Return where a link begins: before nodes that only pass it on, or are bypassed; None if nowhere."""
    for _ in range(MAX_HOPS):
        if type(link) not in (int, str) or (origin := links.get(link)) is None:
            return None
        node = nodes.get(origin[0])
        if node is None or node.mode == _MUTED:
            return None
        if node.kind == "Reroute":
            link = node.inputs[0].get("link") if node.inputs else None
        elif node.mode == _BYPASSED:
            kind = node.outputs[origin[1]] if 0 <= origin[1] < len(node.outputs) else None
            link = next((one.get("link") for one in node.inputs if one.get("type") == kind), None)
        else:
            return origin
    return None
