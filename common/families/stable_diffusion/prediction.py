"""The prediction of the UNet in one file: noise (eps), velocity (v) or image (x0). Nothing else decides it.

No shape shows it. It is stated by the user, in a YAML of the web UIs beside the file, by tensors that mark the file, or
in its metadata, which programs write in their own words. The first of these that states it counts, in this order; the
others that contradict it, and words that are none of ours, are warned of.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import yaml

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import PREDICTIONS, Prediction
from qwenimg.common.formats.stored import Header

V_PRED, ZERO_SNR = "v_pred", "ztsnr"
"""Tensors without a value that mark a file: of a velocity, and of a schedule that ends at a signal of exactly zero."""
MAX_YAML = 64 << 10  # bytes
_DEPTH, _VALUES = 12, 20_000  # of the JSON in which OneTrainer notes its settings
_WORDS: Mapping[Prediction, tuple[str, ...]] = {
    "eps": ("eps", "epsilon", "noise", "epsprediction", "epsilonprediction", "epspred", "epsilonpred", "prednoise"),
    "v": ("v", "vprediction", "vpred", "velocity", "velocityprediction", "vparam", "vparameterization", "predv"),
    "x0": ("x0", "sample", "xstart", "x0prediction", "sampleprediction", "predx0", "predxstart"),
}
_PREDICTION_OF: Mapping[str, Prediction] = {word: name for name, words in _WORDS.items() for word in words}
_SNR = re.compile(r"(zsnr|ztsnr|zeroterminalsnr)$")
# Keys of the metadata with a word, in their order: the Stability AI model metadata standard, ComfyUI, others
_WORD_KEYS = ("modelspec.prediction_type", "modelspec.predict_key", "prediction_type", "parameterization")
_FLAG_KEYS = ("ss_v_parameterization", "ss_v_prediction", "v_parameterization", "v_prediction", "v_pred")  # of trainers
_SNR_KEYS = ("ss_zero_terminal_snr", "zero_terminal_snr", "ztsnr")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_ONE_TRAINER = "ot_config"
_ONE_TRAINER_SNR = "rescale_noise_scheduler_to_zero_terminal_snr"  # which trains the velocity too
_ONE_TRAINER_FLAGS: Mapping[str, Prediction] = {
    _ONE_TRAINER_SNR: "v", "force_v_prediction": "v", "force_epsilon_prediction": "eps",
}  # fmt: skip
_ARCHITECTURES: Mapping[str, Prediction] = {"stable-diffusion-v2-768-v": "v", "stable-diffusion-v2-512": "eps"}
_SCALINGS: Mapping[str, Prediction] = {"EpsScaling": "eps", "VScaling": "v"}  # classes of SDXL's training code
_TARGET = ("denoiser_config", "params", "scaling_config", "target")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement of the prediction; None for a word that is no prediction. `where` is the place and the word."""

    prediction: Prediction | None
    where: str
    zero_snr: bool = False


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The prediction and the reason for it. `stated`: a file states it, or the user."""

    prediction: Prediction
    reason: str
    stated: bool = True
    zero_snr: str = ""  # the place that states that the schedule ends at a signal of zero
    warnings: tuple[str, ...] = ()


def word(text: str) -> Prediction | None:
    """Return the prediction that `text` is a word for, in any program's spelling; None for another text."""
    return _PREDICTION_OF.get(_plain(text))


def decide(header: Header, given: Prediction | None, usual: Prediction, why: str) -> Decided:
    """Return the prediction of the UNet in a file: the one `given` by the user, else stated in or beside the file, else
    the `usual` one of its type, for the reason `why`."""
    marked = f"tensor {ZERO_SNR}" if ZERO_SNR in header.tensors else ""
    if given is not None:
        return Decided(prediction=given, reason="as given", zero_snr=marked)
    warnings: list[str] = []
    every = list(_statements(header, warnings))
    known = [(one.prediction, one) for one in every if one.prediction is not None]
    prediction, reason = (known[0][0], known[0][1].where) if known else (usual, why)
    name = clean(header.file.path.name, 60)
    for one in every:
        if one.prediction is None:
            words = ", ".join(PREDICTIONS)
            warnings.append(f"{name}: {one.where} is none of {words}; {prediction} is taken: say it with --prediction")
    if other := next(((theirs, one.where) for theirs, one in known if theirs != prediction), None):
        cure = f"--prediction {other[0]} takes the other"
        warnings.append(f"{name}: {reason} ({prediction}), but {other[1]} ({other[0]}); the first counts, {cure}")
    snr = next((one.where for _, one in known if one.zero_snr), "") or next(_flags(header, _SNR_KEYS, True), "")
    return Decided(
        prediction=prediction,
        reason=reason,
        stated=bool(known),
        zero_snr=marked or (snr if prediction == "v" else ""),
        warnings=tuple(warnings),
    )


def _statements(header: Header, warnings: list[str]) -> Iterator[Statement]:
    """Yield the statements in and beside the file, the first of which counts. `warnings` gets one of a YAML that cannot
    be read."""
    yield from _beside(header.file.path, warnings)
    if V_PRED in header.tensors:
        yield Statement(prediction="v", where=f"tensor {V_PRED}")
    for key in _WORD_KEYS:
        text = header.metadata.get(key, "").strip()
        if text and text.lower() not in ("none", "null"):
            yield _stated(text, f"{key} '{clean(text, 40)}' in the metadata", header.metadata)
    yield from (Statement(prediction="v", where=where) for where in _flags(header, _FLAG_KEYS, True))
    yield from (Statement(prediction="eps", where=where) for where in _flags(header, _FLAG_KEYS, False))
    yield from (Statement(prediction=None, where=where) for where in _flags(header, _FLAG_KEYS, None))
    yield from _one_trainer(header)
    architecture = header.metadata.get("modelspec.architecture", "").strip().lower()
    if architecture in _ARCHITECTURES:
        where = f"modelspec.architecture '{architecture}' in the metadata"
        yield Statement(prediction=_ARCHITECTURES[architecture], where=where)


def _stated(text: str, where: str, metadata: Mapping[str, str]) -> Statement:
    """Return what a word states; of a flow, whose velocity is another one, nothing that is known."""
    plain = _plain(text)
    flows = metadata.get("modelspec.noise_process", "").strip().lower() == "flow"
    known = None if flows else _PREDICTION_OF.get(_SNR.sub("", plain))
    return Statement(prediction=known, where=where, zero_snr=known == "v" and bool(_SNR.search(plain)))


def _plain(text: str) -> str:
    return re.sub(r"[\s_.-]+", "", text.lower())


def _flags(header: Header, keys: tuple[str, ...], wanted: bool | None) -> Iterator[str]:
    """Yield the places of the metadata's `keys` that are `wanted`; None: that are no flag."""
    for key in keys:
        text = header.metadata.get(key, "").strip()
        if text and text.lower() not in ("none", "null") and _FLAGS.get(text.lower()) is wanted:
            yield f"{key} '{clean(text, 20)}' in the metadata"


def _one_trainer(header: Header) -> Iterator[Statement]:
    """Yield the settings of OneTrainer, which it notes as JSON."""
    raw = header.metadata.get(_ONE_TRAINER, "").encode()
    try:
        settings = strict_json(raw, _ONE_TRAINER, depth=_DEPTH, values=_VALUES) if raw else None
    except ModelError:
        yield Statement(prediction=None, where=f"{_ONE_TRAINER} of the metadata, which is no JSON that is read here,")
        return
    for key, prediction in _ONE_TRAINER_FLAGS.items():
        if isinstance(settings, dict) and settings.get(key) is True:
            snr = key == _ONE_TRAINER_SNR
            yield Statement(prediction=prediction, where=f"{key} of {_ONE_TRAINER} in the metadata", zero_snr=snr)
            return


# The YAML of the web UIs


def _beside(path: Path, warnings: list[str]) -> Iterator[Statement]:
    """Yield what NAME.yaml beside the file NAME.safetensors states. One that cannot be read is warned of."""
    file = next((file for end in (".yaml", ".yml") if os.path.lexists(file := path.with_suffix(end))), None)
    if file is None:
        return
    shown = clean(file.name, 60)
    try:
        whole = _read_yaml(file)
        params = _at(whole, ("model", "params"))
        parameterization = _at(params, ("parameterization",)) or _at(whole, ("parameterization",))
        target = _at(params, _TARGET)
    except ValueError as error:
        reason = clean(str(error).rpartition(": ")[2], 120)
        warnings.append(f"{shown} beside the model is not read: {reason}; say with --prediction what it states")
        return
    if text := _text(parameterization):
        yield _stated(text, f"parameterization '{clean(text, 40)}' in {shown}", {})
    elif parameterization is not None and parameterization.tag != "tag:yaml.org,2002:null":
        yield Statement(prediction=None, where=f"parameterization in {shown}, which is no text,")
    elif text := _text(target):
        name = text.rpartition(".")[2]
        yield Statement(prediction=_SCALINGS.get(name), where=f"scaling '{clean(name, 40)}' in {shown}")


def _read_yaml(file: Path) -> yaml.Node | None:
    """Return the tree of a file's YAML, of which no value is made: an alias is one node, however often it is named.
    Raise ValueError."""
    with closing(open_regular(file)) as opened:
        if opened.size > MAX_YAML:
            raise ValueError(f"it has {opened.size:,} bytes, of at most {MAX_YAML:,}")
        raw = opened.read(0, opened.size)
    try:
        return yaml.compose(raw.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        raise ValueError(f"line {place.line + 1} is not YAML") from None
    except yaml.YAMLError:
        raise ValueError("it is not YAML") from None


def _at(node: yaml.Node | None, keys: tuple[str, ...]) -> yaml.Node | None:
    """Return the node after `keys`; None if there is none. Raise ValueError if one of them stands twice."""
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        values = [value for name, value in pairs if isinstance(name, yaml.ScalarNode) and name.value == key]
        if len(values) > 1:
            raise ValueError(f"{key} stands twice in it")
        node = values[0] if values else None
    return node


def _text(node: yaml.Node | None) -> str:
    plain = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str"
    return node.value.strip() if plain and node is not None else ""
