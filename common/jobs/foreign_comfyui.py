"""ComfyUI's `prompt`, a graph of nodes: one KSampler, and the plain nodes that lead to it.

From that node the model, its LoRAs, the two prompts and the size are followed back. All other nodes that may change the
result are counted. A graph whose prompt, seed or sampler cannot be found this way is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.foreign import Foreign

MAX_NODES = 2_000
MAX_HOPS = 50  # from the sampler back
LOADERS = {"CheckpointLoaderSimple": "ckpt_name", "CheckpointLoader": "ckpt_name", "UNETLoader": "unet_name"}
# Nodes that change nothing in the result, or whose values are read.
PLAIN = {
    "KSampler", "CLIPTextEncode", "ConditioningZeroOut", "VAEDecode", "VAELoader", "VAEEncode", "CLIPLoader",
    "DualCLIPLoader", "EmptyLatentImage", "SaveImage", "PreviewImage", "LoadImage", "Note", "MarkdownNote", *LOADERS,
}  # fmt: skip
FLOW = ("ModelSamplingAuraFlow", "ModelSamplingSD3", "ModelSamplingFlux", "EmptySD3LatentImage")
HELD = ("value", "text", "string", "seed", "noise_seed", "int", "float", "number")  # where a node keeps one value


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
        """Yield the nodes upstream of `node`, each by the first of `keys` that has a link. Raises NotPlain for a
        circle."""
        for _ in range(MAX_HOPS):
            behind = next((source for key in keys if (source := self.linked(node, key))), None)
            if behind is None:
                return
            yield behind
            node = behind
        raise NotPlain(f"its {keys[0]} runs in a circle")

    def linked(self, node: Node, key: str) -> Node | None:
        """Return the node linked to the input `key` of `node`, or None."""
        link = node.inputs.get(key)
        return self.nodes.get(str(link[0])) if isinstance(link, list) and link else None

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


def read(data: object, path: Path) -> Foreign:
    """Return the recipe of the graph `data`; `refused` gives the reason if it is not plain. Raises ModelError."""
    recipe = Foreign(program="ComfyUI", path=path)
    graph = Graph(nodes=_nodes(data, path))
    try:
        _put_all(recipe, graph, _sampler(graph))
    except NotPlain as error:
        recipe.refused = str(error)
    unknown = sum(node.kind not in PLAIN | graph.seen for node in graph.nodes.values())
    if unknown:
        recipe.left_out.append(f"{counted(unknown, 'node')} of {len(graph.nodes)} that may change it")
    return recipe


def _nodes(data: object, path: Path) -> dict[str, Node]:
    """Return the nodes, checked."""
    if not isinstance(data, dict) or not data or len(data) > MAX_NODES:
        raise bad(path, f"its ComfyUI graph is not an object of 1 to {MAX_NODES:,} nodes")
    nodes = {}
    for key, node in data.items():
        kind = node.get("class_type") if isinstance(node, dict) else None
        inputs = node.get("inputs") if isinstance(node, dict) else None
        if not isinstance(kind, str) or not isinstance(inputs, dict):
            raise bad(path, f"its ComfyUI graph has a node {clean(key, 20)!r} without class_type and inputs")
        nodes[key] = Node(kind=kind, inputs=inputs)
    return nodes


def _sampler(graph: Graph) -> Node:
    kinds = [node.kind for node in graph.nodes.values() if "sampler" in node.kind.lower()]
    if kinds != ["KSampler"]:
        listed = clean(", ".join(sorted(kinds)) or "none", 80)
        raise NotPlain(f"its samplers are {listed}; a graph with one KSampler is read")
    return next(node for node in graph.nodes.values() if node.kind == "KSampler")


def _put_all(recipe: Foreign, graph: Graph, sampler: Node) -> None:
    for key, option in (("seed", "seed"), ("steps", "steps"), ("cfg", "guidance")):
        recipe.put(option, graph.value(sampler, key))
    recipe.put_sampler(graph.value(sampler, "sampler_name"), graph.value(sampler, "scheduler"))
    recipe.put("prompt", _prompt(graph, sampler, "positive"))
    recipe.put("negative_prompt", _prompt(graph, sampler, "negative"))
    _put_model(recipe, graph, sampler)
    _put_start(recipe, graph, sampler)
    if any(node.kind in FLOW for node in graph.nodes.values()) and "schedule" in recipe.fields:
        recipe.fields["schedule"] = "model"
        recipe.notes.append("its model is one of flow, whose own schedule is taken")


def _prompt(graph: Graph, sampler: Node, role: str) -> object:
    """Return the text that `role`, positive or negative, leads to."""
    source = "nowhere"
    for node in graph.chain(sampler, role, "conditioning"):
        if node.kind == "CLIPTextEncode":
            return graph.value(node, "text")
        if node.kind == "ConditioningZeroOut":
            return ""
        source = f"a {clean(node.kind, 40)} node"
    raise NotPlain(f"its {role} prompt comes from {source}")


def _put_model(recipe: Foreign, graph: Graph, sampler: Node) -> None:
    for node in graph.chain(sampler, "model"):
        if node.kind in LOADERS:
            recipe.put_model(graph.value(node, LOADERS[node.kind]))
        elif "lora_name" in node.inputs:
            graph.seen.add(node.kind)
            recipe.left_out.append(f"LoRA {node.inputs['lora_name']} {node.inputs.get('strength_model', '')}".strip())


def _put_start(recipe: Foreign, graph: Graph, sampler: Node) -> None:
    """Set the size of an empty latent; anything else is an initial image."""
    start = graph.linked(sampler, "latent_image")
    if start is None or not start.kind.startswith("Empty"):
        recipe.picture = True
        recipe.put("strength", graph.value(sampler, "denoise"))
        return
    graph.seen.add(start.kind)
    for key in ("width", "height"):
        recipe.put(key, graph.value(start, key))
    batch = graph.value(start, "batch_size")
    if batch not in (None, 1):
        recipe.notes.append("it is one of a batch; the noise here is that of the batch's first picture")
