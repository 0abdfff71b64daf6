"""The noise level of each picture of a step, and the weight that its loss has there."""

from __future__ import annotations

import numpy as np

from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.models.flow_model import FlowModel
from qwenimg.common.request.request import Request
from qwenimg.common.sampling.discrete import DiffusionConfig
from qwenimg.common.sampling.flow_match import shifted
from qwenimg.common.sampling.wuerstchen import CosineConfig

SNR = 5.0  # the most signal to noise that counts (T. Hang et al., "Efficient Diffusion Training via Min-SNR", 2023)
LEAST, MOST = 1e-3, 1 - 1e-3  # levels of a flow model: at 0 and 1 there is nothing to learn
LEAST_TIME = 1e-3  # of Stable Cascade, as its authors train it
EVALUATED = 6  # levels of the loss that is compared between steps


def level(model: DiffusionModel, request: Request, place: float) -> float:
    """Return the noise level at `place`, 0 to 1, of the distribution that a model is trained with at the size of
    `request`: the quantile.

    Of a flow model it is the logistic function of a normal number, shifted as its scheduler shifts the levels of an
    image of this size (P. Esser et al., "Scaling Rectified Flow Transformers", 2024), and a float32 value, as in
    schedules; of a diffusion model each trained timestep is as likely as others, and each time of Stable Cascade's.
    """
    config = model.checkpoint.scheduler
    if isinstance(config, CosineConfig):
        return config.sigma(min(place + LEAST_TIME, 1.0))
    if isinstance(config, DiffusionConfig):
        sigmas = config.levels.sigmas
        return sigmas[min(int(place * len(sigmas)), len(sigmas) - 1)]
    assert isinstance(model, FlowModel)
    base = 1.0 / (1.0 + np.exp(-normal_quantile(place)))
    tokens = request.width * request.height // model.token**2
    mu = model.levels.mu(config, tokens, request.steps) if config.use_dynamic_shifting else 0.0
    return float(np.float32(np.clip(shifted(config, np.array([base], np.float64), mu)[0], LEAST, MOST)))


def normal_quantile(place: float) -> float:
    """Return the number that a standard normal number is below with probability `place`."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(min(max(place, 1e-9), 1 - 1e-9))


def weight(model: DiffusionModel, sigma: float) -> float:
    """Return the weight of the loss of a prediction at a level: 1 for flow models, and for Stable Cascade that of its
    authors (J. Choi et al., "Perception Prioritized Training of Diffusion Models", 2022)."""
    config = model.checkpoint.scheduler
    if isinstance(config, CosineConfig):
        return sigma * sigma / (sigma * sigma + 1.0)
    if not isinstance(config, DiffusionConfig):
        return 1.0
    snr = 1.0 / (sigma * sigma)
    most = min(snr, SNR)
    return {"epsilon": most / snr, "v_prediction": most / (snr + 1.0), "sample": most}[config.prediction_type]
