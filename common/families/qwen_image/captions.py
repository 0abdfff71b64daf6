"""The description of a picture by Qwen-Image-Layered's text encoder, for a request without a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.encoders import decoder, qwen_vl_vision, vision_tower
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig
from qwenimg.common.parts.components import renaming
from qwenimg.common.parts.texts import levels
from qwenimg.common.parts.texts.captions import Describing
from qwenimg.common.pictures.patches import QWEN2_VL
from qwenimg.common.prompts.chat import QWEN_VL
from qwenimg.common.runtime.checkpoint import Component

LIMIT = 512  # tokens of a caption, as published


NETWORK = replace(qwen_vl_vision.NETWORK, stated={"writes": True})
"""The text encoder, with head and vision tower."""

# Its texts as published, with their breaks of lines
_CHAT = replace(
    QWEN_VL,
    text="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{system}{pictures}{user}<|im_end|>\n<|im_start|>assistant\n",
)
TEXTS = {
    "en": (
        "# Image Annotator\nYou are a professional\nimage annotator. Please write an image caption based on the input "
        "image:\n1. Write the caption using natural,\ndescriptive language without structured formats or rich text.\n"
        "2. Enrich caption details by including: \n - Object\nattributes, such as quantity, color, shape, size, "
        "material, state, position, actions, and so on\n - Vision Relations\nbetween objects, such as spatial "
        "relations, functional relations, possessive relations, attachment relations, action\nrelations, comparative "
        "relations, causal relations, and so on\n - Environmental details, such as weather, lighting,\ncolors, "
        "textures, atmosphere, and so on\n - Identify the text clearly visible in the image, without translation or\n"
        "explanation, and highlight it in the caption with quotation marks\n3. Maintain authenticity and accuracy:\n"
        " - Avoid\ngeneralizations\n - Describe all visible information in the image, while do not add information "
        "not explicitly shown in\nthe image\n"
    ),
    "zh": (
        "# 图像标注器\n你是一个专业的图像标注器。请基于输入图像，撰写图注:\n1.\n使用自然、描述性的语言撰写图注，"
        "不要使用结构化形式或富文本形式。\n2. 通过加入以下内容，丰富图注细节：\n - 对象的属性：如数量、颜色、形状、"
        "大小、位置、材质、状态、动作等\n -\n对象间的视觉关系：如空间关系、功能关系、动作关系、从属关系、"
        "比较关系、因果关系等\n"
        " - 环境细节：例如天气、光照、颜色、纹理、气氛等\n - 文字内容：识别图像中清晰可见的文字，不做翻译和解释，"
        "用引号在图注中强调\n3.\n保持真实性与准确性：\n - 不要使用笼统的描述\n -\n描述图像中所有可见的信息，但不要加入"
        "没有在图像中出现的内容\n"
    ),
}  # fmt: skip


def lacks(paths: Iterable[Path]) -> str:
    """Return what the files of a text encoder lack to describe a picture; "": nothing. Raises ModelError."""
    rename = renaming(NETWORK, QwenVLVisionConfig(writes=True))
    names = {rename(key) or "" for path in paths for key in peek(path).tensors}
    if decoder.HEAD not in names:
        return f"head ({decoder.HEAD})"
    return "" if any(name.startswith(vision_tower.PREFIX) for name in names) else "vision tower"


def check(text: Component) -> None:
    """Raise ModelError for a text encoder that cannot describe a picture."""
    if text.config.writes:
        return
    paths = [file.path for file in text.plan.files]
    raise ModelError(
        f"{clean(paths[0])}: the text encoder has no {lacks(paths)}, by which it would describe the picture: give a "
        "prompt, or a whole text encoder (--text-encoder)"
    )


def describing() -> Describing:
    """Return how the text encoder is asked."""
    return Describing(texts=TEXTS, chat=_CHAT, form=QWEN2_VL, limit=LIMIT, alone=levels.alone)
