"""The FLUX.1 models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import Download

_flux = partial(
    KnownModel, family="flux", license="FLUX.1 dev Non-Commercial", bytes=33_760_000_000, memory=20_000_000_000
)
SCHNELL = _flux(
    name="flux-schnell",
    repo="black-forest-labs/FLUX.1-schnell",
    title="FLUX.1 schnell, 12B",
    license="Apache-2.0",
    purpose="pictures from English text in 4 steps",
    steps=4,
    guidance=0.0,
    bytes=33_740_000_000,
    aliases=("flux", "flux.1-schnell"),
    files=("flux1-schnell", "flux1-schnell-fp8"),
)
DEV = _flux(
    name="flux-dev",
    repo="black-forest-labs/FLUX.1-dev",
    title="FLUX.1 dev, 12B",
    purpose="pictures with more detail than schnell's, in 28 steps",
    gated=True,
    steps=28,
    guidance=3.5,
    aliases=("flux.1-dev",),
    files=("flux1-dev", "flux1-dev-fp8"),
)
KONTEXT = _flux(
    name="flux-kontext",
    repo="black-forest-labs/FLUX.1-Kontext-dev",
    title="FLUX.1 Kontext dev, 12B",
    purpose="edits a picture by what the prompt says: -i",
    gated=True,
    steps=28,
    guidance=2.5,
    aliases=("flux.1-kontext-dev", "flux.1-kontext"),
    files=("flux1-kontext-dev", "flux1-dev-kontext_fp8_scaled"),
)
FILL = _flux(
    name="flux-fill",
    repo="black-forest-labs/FLUX.1-Fill-dev",
    title="FLUX.1 Fill dev, 12B",
    purpose="draws the masked part of a picture: -i and --mask",
    gated=True,
    steps=50,
    guidance=30.0,
    aliases=("flux.1-fill-dev", "flux.1-fill"),
    files=("flux1-fill-dev",),
)
CANNY = _flux(
    name="flux-canny",
    repo="black-forest-labs/FLUX.1-Canny-dev",
    title="FLUX.1 Canny dev, 12B",
    purpose="keeps to the edges of a picture: --control canny@PICTURE",
    gated=True,
    steps=50,
    guidance=30.0,
    aliases=("flux.1-canny-dev", "flux.1-canny"),
    files=("flux1-canny-dev",),
)
DEPTH = _flux(
    name="flux-depth",
    repo="black-forest-labs/FLUX.1-Depth-dev",
    title="FLUX.1 Depth dev, 12B",
    purpose="keeps to the depth of a picture: --control PICTURE",
    gated=True,
    steps=30,
    guidance=10.0,
    aliases=("flux.1-depth-dev", "flux.1-depth"),
    files=("flux1-depth-dev",),
)
KNOWN = (SCHNELL, DEV, KONTEXT, FILL, CANNY, DEPTH)
_lora = partial(Download, license="FLUX.1 dev Non-Commercial", controls="flux", bytes=1_240_000_000)
CONTROL_LORAS = (
    _lora(
        name="flux-canny-lora",
        repo="black-forest-labs/FLUX.1-Canny-dev-lora",
        title="a LoRA with which FLUX.1 dev sees a picture of edges, 0.6B",
        purpose="--control by canny edges; gated",
        files=("flux1-canny-dev-lora.safetensors",),
    ),
    _lora(
        name="flux-depth-lora",
        repo="black-forest-labs/FLUX.1-Depth-dev-lora",
        title="a LoRA with which FLUX.1 dev sees a picture of depth, 0.6B",
        purpose="--control by depth; gated",
        files=("flux1-depth-dev-lora.safetensors",),
    ),
)
REDUX = Download(
    name="flux-redux",
    repo="black-forest-labs/FLUX.1-Redux-dev",
    title="FLUX.1 Redux, and its image encoder",
    bytes=985_600_000,
    license="FLUX.1 dev Non-Commercial",
    purpose="--ip-adapter, a picture as a prompt of FLUX.1; gated",
    files=("flux1-redux-dev.safetensors", "image_encoder/model.safetensors", "image_encoder/config.json"),
    controls="flux",
    is_ip_adapter=True,
)
"""By the names of its files. Its size follows from the shapes, in 16 bits; the files themselves were not seen."""
ADAPTERS = (REDUX,)
_control = partial(
    Download,
    license="FLUX.1 dev Non-Commercial",
    controls="flux",
    files=("config.json", "diffusion_pytorch_model.safetensors"),
)
CONTROLS = (
    *CONTROL_LORAS,
    _control(
        name="flux-controlnet-union-pro-2",
        repo="Shakker-Labs/FLUX.1-dev-ControlNet-Union-Pro-2.0",
        title="a ControlNet for FLUX.1 dev, 2.1B",
        bytes=4_280_000_000,
        purpose="--control by canny or soft edges, depth, a pose or a grey picture",
    ),
    _control(
        name="flux-controlnet-union-pro",
        repo="Shakker-Labs/FLUX.1-dev-ControlNet-Union-Pro",
        title="a ControlNet Union for FLUX.1 dev, 3.3B",
        bytes=6_600_000_000,
        purpose="--control by pictures of seven kinds, as KIND@PICTURE",
    ),
    _control(
        name="flux-controlnet-union",
        repo="InstantX/FLUX.1-dev-Controlnet-Union",
        title="the first ControlNet Union for FLUX.1 dev, 3.3B",
        bytes=6_600_000_000,
        purpose="--control by pictures of seven kinds, as KIND@PICTURE",
    ),
    *(
        _control(
            name=f"flux-controlnet-{name}",
            repo=repo,
            title="a ControlNet for FLUX.1 dev, 1.8B",
            bytes=3_580_000_000,
            purpose=f"--control by {purpose}",
        )
        for name, repo, purpose in (
            ("canny", "InstantX/FLUX.1-dev-Controlnet-Canny", "canny edges"),
            ("upscaler", "jasperai/Flux.1-dev-Controlnet-Upscaler", "the picture itself, small or blurred"),
            ("normals", "jasperai/Flux.1-dev-Controlnet-Surface-Normals", "normals of surfaces"),
        )
    ),
)
# Published ControlNets: their blocks of two streams and of one, and their kinds of pictures
CONTROL_LAYERS = {
    "flux-controlnet-union-pro-2": (6, 0, None),
    "flux-controlnet-union-pro": (5, 10, 10),
    "flux-controlnet-union": (5, 10, 10),
    **dict.fromkeys((f"flux-controlnet-{name}" for name in ("canny", "upscaler", "normals")), (5, 0, None)),
}
# Why others are not supported
REFUSED = {
    "flux.1-redux-dev": f"goes beside a model: pull {REDUX.name}, and give it with --ip-adapter {REDUX.name}",
}
