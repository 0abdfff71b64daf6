"""The Stable Diffusion 1.x, 2.x and XL models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import Download

_sd = partial(KnownModel, family="stable-diffusion", dtype="float32")
KNOWN = (
    _sd(
        name="sd15",
        repo="stable-diffusion-v1-5/stable-diffusion-v1-5",
        title="Stable Diffusion 1.5",
        license="CreativeML Open RAIL-M",
        purpose="small pictures on small machines; inpainting by -i and --mask",
        width=512,
        height=512,
        steps=50,
        guidance=7.5,
        bytes=4_270_000_000,
        memory=4_000_000_000,
        aliases=("sd1.5", "sd-1.5"),
        files=("v1-5-pruned", "v1-5-pruned-emaonly", "v1-5-pruned-emaonly-fp16"),
    ),
    _sd(
        name="sdxl",
        repo="stabilityai/stable-diffusion-xl-base-1.0",
        title="Stable Diffusion XL 1.0",
        license="CreativeML Open RAIL++-M",
        purpose="pictures of 1024 pixels on ordinary machines",
        steps=50,
        guidance=5.0,
        bytes=13_880_000_000,
        memory=8_000_000_000,
        aliases=("sdxl-base",),
        files=("sd_xl_base_1.0", "sd_xl_base_1.0_0.9vae", "stable-diffusion-xl-base-1-0"),
    ),
    _sd(
        name="sdxl-turbo",
        repo="stabilityai/sdxl-turbo",
        title="SDXL Turbo",
        license="Stability AI Community",
        purpose="pictures of 512 pixels in 1 to 4 steps",
        width=512,
        height=512,
        steps=1,
        guidance=0.0,
        bytes=13_880_000_000,
        memory=8_000_000_000,
    ),
    _sd(
        name="sdxl-refiner",
        repo="stabilityai/stable-diffusion-xl-refiner-1.0",
        title="the refiner of Stable Diffusion XL 1.0",
        license="CreativeML Open RAIL++-M",
        purpose="ends pictures of sdxl: --refiner sdxl-refiner",
        steps=50,
        guidance=5.0,
        bytes=12_150_000_000,
        memory=8_000_000_000,
    ),
)
_FOLDER = ("config.json", "diffusion_pytorch_model.safetensors")
_for_sd15 = partial(
    Download,
    title="a ControlNet for Stable Diffusion 1.5, 0.4B",
    bytes=1_450_000_000,
    license="OpenRAIL",
    files=_FOLDER,
    controls="stable-diffusion",
)
_for_sdxl = partial(
    Download,
    title="a ControlNet for SDXL, 1.3B",
    bytes=5_000_000_000,
    license="OpenRAIL++",
    files=_FOLDER,
    controls="stable-diffusion",
)
_union = partial(_for_sdxl, bytes=2_510_000_000, license="Apache-2.0")
_OF_KINDS = "--control by KIND@PICTURE: a pose, depth, canny or soft edges, lines, a drawing, normals, segments"
SDXL_CONTROLS = "sdxl-controlnet-"  # the start of their names
CONTROLS = (
    *(
        _for_sd15(name=f"sd15-controlnet-{kind}", repo=f"lllyasviel/control_{version}_sd15_{kind}", purpose=purpose)
        for kind, version, purpose in (
            ("canny", "v11p", "--control by canny edges"),
            ("depth", "v11f1p", "--control by depth"),
            ("openpose", "v11p", "--control by a pose"),
            ("lineart", "v11p", "--control by line art"),
            ("softedge", "v11p", "--control by soft edges"),
            ("scribble", "v11p", "--control by a drawing"),
            ("tile", "v11f1e", "--control by the picture itself, to add details to it"),
            ("inpaint", "v11p", "--control by a picture with --mask, to paint it anew there"),
        )
    ),
    *(
        _for_sdxl(name=f"{SDXL_CONTROLS}{kind}", repo=f"diffusers/controlnet-{kind}-sdxl-1.0", purpose=purpose)
        for kind, purpose in (("canny", "--control by canny edges"), ("depth", "--control by depth"))
    ),
    _union(
        name=f"{SDXL_CONTROLS}union",
        repo="xinsir/controlnet-union-sdxl-1.0",
        purpose=_OF_KINDS,
    ),
    _union(
        name=f"{SDXL_CONTROLS}union-promax",
        repo="brad-twinkl/controlnet-union-sdxl-1.0-promax",
        purpose=f"{_OF_KINDS}, tile; with --mask, inpaint",
    ),
)
SDXL_ADAPTER = "sdxl"  # in their names
BIG_G = "ip-adapter_sdxl"  # the only one that sees by ViT-bigG
_VIT_H = ("models/image_encoder/model.safetensors", "models/image_encoder/config.json")
_adapter = partial(
    Download,
    repo="h94/IP-Adapter",
    title="an IP-Adapter for Stable Diffusion 1.x, and its image encoder",
    license="Apache-2.0",
    controls="stable-diffusion",
    is_ip_adapter=True,
)
_adapter_xl = partial(_adapter, title="an IP-Adapter for SDXL, and its image encoder")
_PICTURE, _FACE = "--ip-adapter, a picture as a prompt", "--ip-adapter, a face as a prompt"
_CLOSER = f"{_PICTURE}, closer to it"
ADAPTERS = (
    *(
        _adapter(
            name=f"ip-adapter{kind}_sd15",
            bytes=size,
            purpose=purpose,
            files=(f"models/ip-adapter{kind}_sd15.safetensors", *_VIT_H),
        )
        for kind, size, purpose in (
            ("", 2_574_600_000, _PICTURE),
            ("-plus", 2_628_200_000, _CLOSER),
            ("-plus-face", 2_628_200_000, _FACE),
            ("-full-face", 2_573_600_000, _FACE),
        )
    ),
    *(
        _adapter_xl(
            name=f"ip-adapter{kind}_sdxl_vit-h",
            bytes=size,
            purpose=purpose,
            files=(f"sdxl_models/ip-adapter{kind}_sdxl_vit-h.safetensors", *_VIT_H),
        )
        for kind, size, purpose in (
            ("", 3_228_000_000, _PICTURE),
            ("-plus", 3_378_000_000, _CLOSER),
            ("-plus-face", 3_378_000_000, _FACE),
        )
    ),
    _adapter_xl(
        name=BIG_G,
        bytes=4_393_000_000,
        purpose=f"{_PICTURE}, by a larger encoder",
        files=(f"sdxl_models/{BIG_G}.safetensors", *(f"sdxl_{path}" for path in _VIT_H)),
    ),
)
"""IP-Adapters by the names of their files. Sizes are those of the repository's listing, with the encoder."""
_WHY = "has no repository of its maker any more; give its folder, its file, or a hub id that you trust"
# Why others are not supported
REFUSED = {
    "sd21": _WHY,
    "sd2.1": _WHY,
    "sd-2.1": _WHY,
    "ip-adapter": f"a repository of IP-Adapters: pull one of them by its name, such as {ADAPTERS[0].name}",
}
