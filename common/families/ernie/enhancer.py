"""The prompt enhancer of ERNIE-Image: a Ministral 3 of 3B that was trained to make long prompts of short ones, in the
folder `pe` of the published models, and in a file of ComfyUI.

It is asked by one instruction, the chat template's own, in Chinese, and by the prompt with the size of the picture as
JSON. Temperature, top-p and limit are those of its model card; diffusers takes a top-p of 0.95. It puts texts in
quotation marks of its own choice.
"""

from __future__ import annotations

import json
import re

from qwenimg.common.families.ernie.known import SMALL_FILES
from qwenimg.common.families.prompt_writer import PromptWriterFiles
from qwenimg.common.numbers.next_token import Decoding
from qwenimg.common.prompts.rewriting import Protocol

INSTRUCTION = (
    "你是一个专业的文生图 Prompt 增强助手。你将收到用户的简短图片描述及目标生成分辨率，请据此扩写为一段内容丰富、"
    "细节充分的视觉描述，以帮助文生图模型生成高质量的图片。仅输出增强后的描述，不要包含任何解释或前缀。"
)
PROTOCOL = Protocol(
    name="ernie",
    system=lambda task, language: INSTRUCTION,
    user=lambda prompt, width, height: json.dumps(
        {"prompt": prompt, "width": width, "height": height}, ensure_ascii=False
    ),
    takes_size=True,
    how=Decoding(temperature=0.6, top_p=0.8, limit=2048),
    keeps_marks=False,
)
ENHANCER = PromptWriterFiles(
    folder="pe",
    named=re.compile(r"^pe$|ernie.*(prompt.?enhancer|[-_.]pe\b)"),
    like="ernie-image",
    small_files=SMALL_FILES,
    protocol=PROTOCOL,
)
