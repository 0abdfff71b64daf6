"""Whether the calls of a denoiser are recorded and replayed as CUDA graphs: as is asked, or where the host takes longer
to launch a call's kernels than the GPU to compute them.
"""

from __future__ import annotations

from qwenimg.common.base.arguments import check_seconds
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.compiling import Decision, check, settled

# Seconds of the host for a kernel that is launched by itself. Measured on a CPU of 2.5 GHz, with next to nothing to
# compute and without a driver: 20e-6 for a UNet's and 25e-6 for the transformer's. Half of that, for faster hosts.
LAUNCH = 10e-6
SLOWER = 2.0  # times its operations at the rate of one product: what a step takes at most, with all that is no product


def launched(checkpoint: Checkpoint | None) -> int:
    """About how many kernels a call of the denoiser is: the parameters that it reads."""
    return sum(len(part.plan.when(ALWAYS).entries) for part in (checkpoint.denoisers if checkpoint else ()))


def decide(mode: str, missing: str, kernels: int, step: float) -> Decision:
    """For steps of a call of so many kernels, whose operations take so many seconds at the rate of one product.
    missing: why there are no graphs here. Raises UsageError and BackendMissing."""
    check("graphs", mode)
    check_seconds(step=step)
    if found := settled("graphs", mode, missing, "use --graphs off"):
        return found
    if missing:
        return Decision(on=False, line=f"--graphs auto: off, since it {missing}")
    host, device = LAUNCH * kernels, SLOWER * step
    on = 0 < device < host
    against = f"launching takes about {host * 1e3:.1f} ms a step, computing at most {device * 1e3:.1f}"
    return Decision(on=on, line=f"--graphs auto: {'on' if on else 'off'}, since {against}")
