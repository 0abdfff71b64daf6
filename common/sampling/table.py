"""All samplers, with our names and the names that other programs use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.sampling import adaptive, cfgpp, multistep, ode, sde
from qwenimg.common.sampling.types import States


@dataclass(frozen=True, kw_only=True)
class ScheduleRule:
    """The rule by which a sampler's published scheduler builds the model's own schedule."""

    times: Literal["sigma", "whole", "lambda", "distilled"] = "sigma"
    """The spacing of the trained times: as in schedulers in sigma; in whole timesteps; in lambda, with one step more,
    the last left out; or on the steps of a distilled model's teacher."""
    exact_from_afar: bool = False
    """True if a run may start from any level, however large: no level is capped."""
    rounds_karras: bool = False
    """True if times are rounded where the levels are spread by T. Karras et al.'s rule."""
    last: Literal["zero", "configured", "before", "lowest"] = "configured"
    """The level at the end of a run: 0; the configured one; the level a step before the last one's time; or the lowest
    trained one."""
    between: Literal["", "half", "jump"] = ""
    """The levels in between: half-way in time, for PNDM; the level that a step jumps to, for TCD."""

    @property
    def scaled(self) -> bool:
        """True if diffusers runs the sampler on x / sqrt(sigma^2 + 1)."""
        return self.times != "sigma"


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A sampler: `function(x, schedule, denoise, noise)` yields x after each step and goes on from the x that is sent
    back; the last x is the result."""

    name: str
    title: str
    order: int
    """Order of accuracy: half the step divides the error by 2 to this power. A stochastic sampler's is the order of its
    results' distribution, a multistep sampler's the order of its rule, which the first steps do not have yet."""
    evaluations: str
    """The evaluations of the model in a step, in words."""
    calls: int = 1
    """The most evaluations in a step between two levels: prompts that change count them."""
    source: str
    function: Callable[..., States]
    stochastic: bool = False
    flow: bool = True
    """True if it has a form for flow models."""
    rule: ScheduleRule = ScheduleRule()
    """The rule of its published scheduler for the model's own schedule."""
    adaptive: bool = False
    """True if it chooses its steps by looking at x: its function then takes `to_host` too."""

    def described(self) -> dict[str, str | int | bool]:
        """Return the sampler's properties for a table."""
        return {
            "name": self.name,
            "title": self.title,
            "order": self.order,
            "stochastic": self.stochastic,
            "evaluations": self.evaluations,
            "flow": self.flow,
            "source": self.source,
        }

    def row(self) -> tuple[str, ...]:
        """Return the properties in words."""
        words = (
            "yes" if value is True else "-" if value is False else str(value) for value in self.described().values()
        )
        return tuple(words)


_KARRAS = "Karras et al. 2022"
_SONG = "J. Song et al. 2021"
_CROWSON = "Crowson 2022, k-diffusion"
_LU = "Lu et al. 2022, DPM-Solver"
_LU_PP = "Lu et al. 2022, DPM-Solver++"
_ZHANG = "Q. Zhang, Chen 2023, DEIS"
_CHUNG = "Chung et al. 2024, CFG++"

_WHOLE_TIMES = ScheduleRule(times="whole", exact_from_afar=True, last="before")
_IN_LAMBDA = ScheduleRule(times="lambda", rounds_karras=True)
_IN_LAMBDA_ABOVE_ZERO = ScheduleRule(times="lambda", rounds_karras=True, last="lowest")
_TO_ZERO = ScheduleRule(last="zero")
_TO_ZERO_ROUNDED = ScheduleRule(last="zero", rounds_karras=True)

_ALL = (
    Sampler(name="ddim", title="DDIM", order=1, evaluations="1", source=_SONG, function=ode.ddim, rule=_WHOLE_TIMES),
    Sampler(
        name="ddpm", title="DDPM", order=1, evaluations="1", source="Ho et al. 2020", function=sde.ddpm,
        rule=ScheduleRule(times="whole", exact_from_afar=True),
        stochastic=True, flow=False,
    ),
    Sampler(
        name="pndm", title="PNDM", order=2, evaluations="1, first 2", source="L. Liu et al. 2022",
        function=multistep.pndm, rule=ScheduleRule(times="whole", last="before", between="half"),
    ),
    Sampler(name="euler", title="Euler", order=1, evaluations="1", source=_KARRAS, function=ode.euler),
    Sampler(
        name="euler_ancestral", title="Euler ancestral", order=1, evaluations="1", source=_CROWSON,
        function=sde.euler_ancestral, stochastic=True,
    ),
    Sampler(
        name="heun", title="Heun", order=2, evaluations="2, last 1", calls=2, source=_KARRAS, function=ode.heun,
        rule=_TO_ZERO,
    ),
    Sampler(
        name="heunpp2", title="HeunPP2", order=1, evaluations="3, last 2 and 1", calls=3, source="Carzit 2023",
        function=ode.heunpp2,
    ),
    Sampler(name="lms", title="LMS", order=4, evaluations="1", source=_CROWSON, function=multistep.lms, rule=_TO_ZERO),
    Sampler(
        name="dpm2", title="DPM2", order=2, evaluations="2, last 1", calls=2, source=_KARRAS, function=ode.dpm2,
        rule=_TO_ZERO_ROUNDED,
    ),
    Sampler(
        name="dpm2_ancestral", title="DPM2 ancestral", order=2, evaluations="2, last 1", calls=2, source=_CROWSON,
        function=sde.dpm2_ancestral, rule=_TO_ZERO_ROUNDED, stochastic=True,
    ),
    Sampler(
        name="dpmpp_2s_ancestral", title="DPM++ 2S ancestral", order=2, evaluations="2, last 1", calls=2, source=_LU_PP,
        function=sde.dpmpp_2s_ancestral, stochastic=True,
    ),
    Sampler(
        name="dpmpp_sde", title="DPM++ SDE", order=2, evaluations="2, last 1", calls=2, source=_LU_PP,
        function=sde.dpmpp_sde, stochastic=True,
    ),
    Sampler(
        name="dpmpp_2m", title="DPM++ 2M", order=2, evaluations="1", source=_LU_PP,
        function=multistep.dpmpp_2m, rule=_IN_LAMBDA,
    ),
    Sampler(
        name="dpmpp_2m_sde", title="DPM++ 2M SDE", order=2, evaluations="1", source=_LU_PP,
        function=sde.dpmpp_2m_sde, rule=_IN_LAMBDA, stochastic=True,
    ),
    Sampler(
        name="dpmpp_2m_sde_heun", title="DPM++ 2M SDE Heun", order=2, evaluations="1", source=_LU_PP,
        function=sde.dpmpp_2m_sde_heun, rule=_IN_LAMBDA, stochastic=True,
    ),
    Sampler(
        name="dpmpp_3m_sde", title="DPM++ 3M SDE", order=2, evaluations="1", source="Crowson 2023, k-diffusion",
        function=sde.dpmpp_3m_sde, rule=_IN_LAMBDA, stochastic=True,
    ),
    Sampler(
        name="dpm_fast", title="DPM fast", order=3, evaluations="1 on average", source=_LU,
        function=adaptive.dpm_fast, flow=False,
    ),
    Sampler(
        name="dpm_adaptive", title="DPM adaptive", order=3, evaluations="3, its own steps", source=_LU,
        function=adaptive.dpm_adaptive, flow=False, adaptive=True,
    ),
    Sampler(
        name="unipc", title="UniPC", order=3, evaluations="1", source="Zhao et al. 2023",
        function=multistep.unipc, rule=_IN_LAMBDA,
    ),
    Sampler(
        name="deis", title="DEIS", order=2, evaluations="1", source=_ZHANG, function=multistep.deis,
        rule=_IN_LAMBDA_ABOVE_ZERO,
    ),
    Sampler(
        name="sa_solver", title="SA-Solver", order=2, evaluations="1", source="Xue et al. 2023",
        function=sde.sa_solver, rule=_IN_LAMBDA_ABOVE_ZERO, stochastic=True,
    ),
    Sampler(name="ipndm", title="iPNDM", order=2, evaluations="1", source=_ZHANG, function=multistep.ipndm),
    Sampler(
        name="ipndm_v", title="iPNDM-v", order=4, evaluations="1", source=_ZHANG, function=multistep.ipndm_v
    ),
    Sampler(
        name="res_multistep", title="RES multistep", order=2, evaluations="1", source="Q. Zhang et al. 2023, RES",
        function=multistep.res_multistep,
    ),
    Sampler(
        name="lcm", title="LCM", order=1, evaluations="1", source="Luo et al. 2023", function=sde.lcm,
        rule=ScheduleRule(times="distilled", exact_from_afar=True, last="zero"),
        stochastic=True,
    ),
    Sampler(
        name="tcd", title="TCD", order=1, evaluations="1", source="Zheng et al. 2024", function=sde.tcd,
        rule=ScheduleRule(times="distilled", exact_from_afar=True, last="lowest", between="jump"),
        stochastic=True, flow=False,
    ),
    Sampler(
        name="euler_cfgpp", title="Euler CFG++", order=1, evaluations="1", source=_CHUNG,
        function=cfgpp.euler_cfgpp,
    ),
    Sampler(
        name="euler_ancestral_cfgpp", title="Euler ancestral CFG++", order=1, evaluations="1", source=_CHUNG,
        function=cfgpp.euler_ancestral_cfgpp, stochastic=True,
    ),
    Sampler(
        name="dpmpp_2s_ancestral_cfgpp", title="DPM++ 2S ancestral CFG++", order=2, evaluations="2, last 1", calls=2,
        source=_CHUNG, function=cfgpp.dpmpp_2s_ancestral_cfgpp, stochastic=True,
    ),
    Sampler(
        name="dpmpp_2m_cfgpp", title="DPM++ 2M CFG++", order=2, evaluations="1", source=_CHUNG,
        function=cfgpp.dpmpp_2m_cfgpp,
    ),
)  # fmt: skip
SAMPLERS: Mapping[str, Sampler] = MappingProxyType({sampler.name: sampler for sampler in _ALL})

# Other programs' names, in the spelling that `_plain` returns
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "plms": "pndm",
        "eulera": "euler_ancestral",
        "dpm2a": "dpm2_ancestral",
        "heun2": "heun",
        "heunpp": "heunpp2",
        "dpmpp2sa": "dpmpp_2s_ancestral",
        "dpmsolverpp": "dpmpp_2m",
        "dpmsolverpp2m": "dpmpp_2m",
        "dpmsolversde": "dpmpp_sde",
        "unipcbh2": "unipc",
        "res2m": "res_multistep",
        "euleracfgpp": "euler_ancestral_cfgpp",
        "dpmpp2sacfgpp": "dpmpp_2s_ancestral_cfgpp",
    }
)
_SCHEDULES = ("karras", "exponential", "beta")


def find(name: str) -> Sampler:
    """Return the sampler of a name in any spelling: dpmpp_2m, "DPM++ 2M", dpmpp2m, k_dpmpp_2m. Raises UsageError."""
    known = {_plain(ours): ours for ours in SAMPLERS} | dict(ALIASES)
    plain = _plain(name)
    if plain in known:
        return SAMPLERS[known[plain]]
    for schedule in _SCHEDULES:
        sampler = known.get(plain.removesuffix(schedule))
        if plain.endswith(schedule) and sampler:
            raise UsageError(f"no sampler {clean(name, 40)!r}; use --sampler {sampler} --schedule {schedule}")
    near = dict.fromkeys(known[close] for close in get_close_matches(plain, known, n=3, cutoff=0.5))
    advice = f"did you mean {' or '.join(near)}?" if near else "`qwenimg samplers` lists them"
    raise UsageError(f"no sampler {clean(name, 40)!r}; {advice}")


def _plain(name: str) -> str:
    """Return the name's lower-case letters and digits, without the prefixes and suffixes of other programs."""
    plain = re.sub("[^a-z0-9]", "", name.lower().replace("+", "p"))
    return plain.removeprefix("sample").removeprefix("k").removesuffix("gpu")
