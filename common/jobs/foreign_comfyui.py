"""ComfyUI's graph of nodes: one KSampler, and the nodes that lead to it, as far as they name what is here.

From that node the model, its LoRAs, IP-Adapters and control networks, the two prompts and the size are followed back.
All other nodes that may change the result are counted. A graph whose prompt, seed or sampler cannot be found this way
is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.foreign import Foreign, file_name
from qwenimg.common.jobs.foreign_graph import Graph, Node, NotPlain, read_graph

LOADERS = {"CheckpointLoaderSimple": "ckpt_name", "CheckpointLoader": "ckpt_name", "UNETLoader": "unet_name"}
# Nodes that change nothing in the result, or whose values are read.
PLAIN = {
    "KSampler", "CLIPTextEncode", "ConditioningZeroOut", "VAEDecode", "VAELoader", "VAEEncode", "CLIPLoader",
    "DualCLIPLoader", "EmptyLatentImage", "SaveImage", "PreviewImage", "LoadImage", "Note", "MarkdownNote",
    "PrimitiveNode", "CLIPVisionLoader", *LOADERS,
}  # fmt: skip
FLOW = ("ModelSamplingAuraFlow", "ModelSamplingSD3", "ModelSamplingFlux", "EmptySD3LatentImage")
TEXTS = {"CLIPTextEncode": "text", "CLIPTextEncodeFlux": "t5xxl", "CLIPTextEncodeSDXL": "text_g"}
# Nodes with a control network, and where the network's file is named.
CONTROLS = ("ControlNetApply", "ControlNetApplyAdvanced", "ControlNetApplySD3", "ControlNetInpaintingAliMamaApply")
PATCHES = ("QwenImageDiffsynthControlnet", "ZImageFunControlnet")  # on the way of the model
_NETWORKS = {
    "ControlNetLoader": "control_net_name",
    "DiffControlNetLoader": "control_net_name",
    "ModelPatchLoader": "name",
}
UNION = "SetUnionControlNetType"
KINDS = {
    "openpose": "openpose",
    "depth": "depth",
    "hed/pidi/scribble/ted": "softedge",
    "canny/lineart/anime_lineart/mlsd": "lineart",
    "normal": "normal",
    "segment": "segment",
    "tile": "tile",
    "repaint": "inpaint",
    "auto": "",
}
"""Its kinds of pictures of a Union, and ours."""
PREPROCESSORS = {"Canny": "canny", "CannyEdgePreprocessor": "canny", "ImageInvert": "invert"}
_THRESHOLDS = (100, 200)
# Nodes that pass a picture on, in another size.
_RESIZED = ("ImageScale", "ImageScaleBy", "ImageScaleToTotalPixels", "ImageResize+", "PrepImageForClipVision")
ADAPTERS = ("IPAdapter", "IPAdapterAdvanced", "IPAdapterApply")
# What IP-Adapters take over, by the parts of the model in which they count; () for all.
WEIGHTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "standard", "original", "channel penalty"), ()),
    **dict.fromkeys(("style transfer", "style transfer (SDXL)", "strong style transfer"), ("style",)),
    **dict.fromkeys(("composition", "composition (SDXL)"), ("composition",)),
    "style and composition": ("style", "composition"),
}
# The file that its loader takes for a preset, for Stable Diffusion 1.x and XL.
PRESETS = {
    "LIGHT": ("ip-adapter_sd15_light_v11", ""),
    "STANDARD": ("ip-adapter_sd15", "ip-adapter_sdxl_vit-h"),
    "VIT-G": ("ip-adapter_sd15_vit-G", "ip-adapter_sdxl"),
    "PLUS FACE": ("ip-adapter-plus-face_sd15", "ip-adapter-plus-face_sdxl_vit-h"),
    "PLUS": ("ip-adapter-plus_sd15", "ip-adapter-plus_sdxl_vit-h"),
    "FULL FACE": ("ip-adapter-full-face_sd15", ""),
}
LARGE = 768 * 768  # pixels of a picture: more are drawn by SDXL
_Putter: TypeAlias = Callable[[Foreign, Graph, Node], tuple[str, bool]]
LORA_TABLE = re.compile(r"lora_[0-9]{1,4}", re.ASCII | re.IGNORECASE)


def read(data: object, path: Path) -> Foreign:
    """Return the recipe of the graph in JSON, of either form; `refused` gives the reason if it is not plain. Raises
    ModelError."""
    recipe = Foreign(program="ComfyUI", path=path)
    graph = read_graph(data, path)
    try:
        _put_all(recipe, graph, _sampler(graph))
    except NotPlain as error:
        recipe.refused = str(error)
    unknown = sum(node.kind not in PLAIN | graph.seen for node in graph.nodes.values())
    if unknown:
        recipe.left_out.append(f"{counted(unknown, 'node')} of {len(graph.nodes)} that may change it")
    return recipe


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
    _put_start(recipe, graph, sampler)
    _put_model(recipe, graph, sampler)
    _put_controls(recipe, graph, sampler)
    _put_enlarger(recipe, graph)
    if any(node.kind in FLOW for node in graph.nodes.values()) and "schedule" in recipe.fields:
        recipe.fields["schedule"] = "model"
        recipe.notes.append("its model is one of flow, whose own schedule is taken")


def _prompt(graph: Graph, sampler: Node, role: str) -> object:
    """Return the text that `role`, positive or negative, leads to."""
    source = "nowhere"
    for node in graph.chain(sampler, role, "conditioning"):
        if node.kind in TEXTS:
            graph.seen.add(node.kind)
            return graph.value(node, TEXTS[node.kind])
        if node.kind == "ConditioningZeroOut":
            return ""
        source = f"a {clean(node.kind, 40)} node"
    raise NotPlain(f"its {role} prompt comes from {source}")


def _put_model(recipe: Foreign, graph: Graph, sampler: Node) -> None:
    for node in reversed([*graph.chain(sampler, "model")]):
        if node.kind in LOADERS:
            recipe.put_model(graph.value(node, LOADERS[node.kind]))
        elif "lora_name" in node.inputs:
            _put(recipe, graph, node, _put_lora)
        elif tables := [one for key, one in node.inputs.items() if LORA_TABLE.fullmatch(key) and isinstance(one, dict)]:
            graph.seen.add(node.kind)
            for one in tables:
                if one.get("on", True) is True and not recipe.put_lora(one.get("lora"), one.get("strength", 1)):
                    recipe.left_out.append(f"LoRA {one.get('lora')}")
        elif node.kind in PATCHES:
            _put(recipe, graph, node, _put_control)
        elif node.kind in ADAPTERS:
            _put(recipe, graph, node, _put_adapter)


def _put(recipe: Foreign, graph: Graph, node: Node, puts: _Putter) -> None:
    """Set what `node` does by `puts`, which returns its name and whether it was set; else name it as left out."""
    graph.seen.add(node.kind)
    try:
        name, done = puts(recipe, graph, node)
    except NotPlain as error:
        name, done = f"{node.kind}: {error}", False
    if not done:
        recipe.left_out.append(name)


def _put_lora(recipe: Foreign, graph: Graph, node: Node) -> tuple[str, bool]:
    name, strength = graph.value(node, "lora_name"), graph.value(node, "strength_model")
    done = recipe.put_lora(name, 1.0 if strength is None else strength)
    of_text = graph.value(node, "strength_clip") if "clip" in node.inputs else 0
    if done and strength and of_text not in (None, strength):
        recipe.note_text_strength(recipe.loras[-1].source, of_text)
    return f"LoRA {name} {strength}", done


# Control networks and IP-Adapters


def _put_controls(recipe: Foreign, graph: Graph, sampler: Node) -> None:
    """Set the control networks that the positive prompt passes, and name the ones that only the negative passes."""
    nodes = list(graph.chain(sampler, "positive", "conditioning"))
    others = list(graph.chain(sampler, "negative", "conditioning"))
    for node in reversed(nodes):
        if node.kind in CONTROLS:
            _put(recipe, graph, node, _put_control)
            if node.kind != "ControlNetApply" and not any(node is other for other in others):
                recipe.notes.append("one of its control networks sees the prompt alone, not the negative one")
        elif node.kind == "StyleModelApply":
            _put(recipe, graph, node, _put_style)
        elif node.kind == "FluxGuidance" and recipe.fields.get("guidance") == 1:
            graph.seen.add(node.kind)
            recipe.put("guidance", graph.value(node, "guidance"))
            recipe.fields.pop("negative_prompt", None)  # which a cfg of 1 does not use
    if any(node.kind in CONTROLS and not any(node is one for one in nodes) for node in others):
        recipe.left_out.append("a control network of the negative prompt alone")


def _put_style(recipe: Foreign, graph: Graph, node: Node) -> tuple[str, bool]:
    """Set FLUX.1 Redux."""
    loader, seen = graph.linked(node, "style_model"), graph.linked(node, "clip_vision_output")
    name = None if loader is None else graph.value(loader, "style_model_name")
    strength = graph.value(node, "strength")
    graph.seen.update(one.kind for one in (loader, seen) if one is not None)
    title = f"style model {name}"
    if seen is not None:
        _picture(recipe, graph, seen, "image", title)
    if strength not in (None, 1):
        recipe.notes.append(
            "the strength of its style model is that of the picture alone there, of the prompt too here"
        )
    return title, recipe.put_control(name, "", 1 if strength is None else strength)


def _put_control(recipe: Foreign, graph: Graph, node: Node) -> tuple[str, bool]:
    network, kind, name = graph.linked(node, "control_net") or graph.linked(node, "model_patch"), "", None
    if network is not None and network.kind == UNION:
        graph.seen.add(UNION)
        kind = KINDS.get(str(graph.value(network, "type")), "")
        network = graph.linked(network, "control_net")
    if network is not None and network.kind in _NETWORKS:
        graph.seen.add(network.kind)
        name = graph.value(network, _NETWORKS[network.kind])
    numbers = [graph.value(node, key) for key in ("strength", "start_percent", "end_percent")]
    scale, start, end = (usual if one is None else one for one, usual in zip(numbers, (1, 0, 1), strict=True))
    title = "control network" if name is None else f"control network {name}"
    if scale == 0:
        return title, True
    made = _picture(recipe, graph, node, "image", title)
    recipe.mask |= graph.linked(node, "mask") is not None
    recipe.picture |= graph.linked(node, "inpaint_image") is not None
    if (start, end) != (0, 1):
        recipe.notes.append("the window of its controls is counted in steps here, there in noise levels")
    return f"{title} {scale}", recipe.put_control(name, made or kind, scale, start, end)


def _put_adapter(recipe: Foreign, graph: Graph, node: Node) -> tuple[str, bool]:
    weight, start, end = (graph.value(node, key) for key in ("weight", "start_at", "end_at"))
    weight, start, end = (usual if one is None else one for one, usual in ((weight, 1), (start, 0), (end, 1)))
    name, by_layer = _adapter_file(recipe, graph, node), graph.value(node, "weight_type")
    title = f"IP-Adapter {clean(name, 60)}"
    if weight == 0:
        return title, True
    if by_layer is not None and not (isinstance(by_layer, str) and by_layer in WEIGHTS):
        recipe.notes.append(f"the weights of {title} by layer ({clean(by_layer, 30)}) are even here")
    _picture(recipe, graph, node, "image", title)
    parts = WEIGHTS.get(by_layer, ()) if isinstance(by_layer, str) else ()
    if not recipe.put_control(name, "", weight, start, end, *parts):
        return f"{title} {weight}", False
    added = ["mask"] if graph.linked(node, "attn_mask") is not None else []
    if (batch := graph.linked(node, "image")) is not None and batch.kind == "ImageBatch":
        added = ["also", *added]
    for role in added:
        recipe.put_control(name, role, 1)
    if graph.linked(node, "image_negative") is not None:
        recipe.left_out.append(f"the negative picture of {title}")
    return title, True


def _adapter_file(recipe: Foreign, graph: Graph, node: Node) -> object:
    """Return the name of the file of an IP-Adapter: what its loader says, or the one of a preset."""
    for loader in graph.chain(node, "ipadapter"):
        graph.seen.add(loader.kind)
        if loader.kind == "IPAdapterModelLoader":
            return graph.value(loader, "ipadapter_file")
        if loader.kind == "IPAdapterUnifiedLoader":
            preset = str(graph.value(loader, "preset"))
            files = next((files for start, files in PRESETS.items() if preset.startswith(start)), ("", ""))
            large = recipe.fields.get("width", 512) * recipe.fields.get("height", 512) > LARGE
            return files[large] or files[0] or None
    return None


def _picture(recipe: Foreign, graph: Graph, node: Node, key: str, title: str) -> str:
    """Return the preprocessor between a picture and the input `key` of `node`, and note what else made it."""
    made = ""
    for source in graph.chain(node, key, "image", "images", "pixels", "image1"):
        if source.kind in PREPROCESSORS and not made:
            graph.seen.add(source.kind)
            made = PREPROCESSORS[source.kind]
            thresholds = source.inputs.get("low_threshold"), source.inputs.get("high_threshold")
            if made == "canny" and thresholds != _THRESHOLDS:
                recipe.notes.append(f"the edges for {clean(title, 60)} are found by the thresholds 100 and 200 here")
        elif source.kind in (*_RESIZED, "ImageBatch"):
            graph.seen.add(source.kind)
        elif source.kind.startswith("LoadImage"):
            graph.seen.add(source.kind)
            name = source.inputs.get("image")
            shown = f" of {clean(file_name(name), 40)}" if isinstance(name, str) and file_name(name) else ""
            recipe.notes.append(f"{clean(title, 60)} needs its picture{shown}, which is not in the recipe")
            break
        else:
            graph.seen.add(source.kind)
            kind = clean(source.kind, 40)
            recipe.notes.append(f"the picture of {clean(title, 60)} is one that {kind} made: give it as that made it")
            break
    return made


# The beginning and the end


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


def _put_enlarger(recipe: Foreign, graph: Graph) -> None:
    """Set the upscaler that makes the finished picture larger, if there is one."""
    for node in (node for node in graph.nodes.values() if node.kind == "ImageUpscaleWithModel"):
        loader = graph.linked(node, "upscale_model")
        drawn = any(source.kind == "VAEDecode" for source in graph.chain(node, "image", "images"))
        if loader is None or loader.kind != "UpscaleModelLoader" or not drawn or recipe.enlarger is not None:
            continue
        name = recipe.text("upscaler", graph.value(loader, "model_name"), 1_000)
        recipe.enlarger = file_name(name) or None
        graph.seen.update({node.kind, loader.kind})
