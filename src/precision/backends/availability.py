"""Which backends work on this machine, and what they refuse. The plan calls this before anything is built.

    reference            everywhere
    cuda                 Hopper (sm_90): its kernels are written for those tensor cores only; not where the self-test
                         has found its casts wrong; linears and experts are judged separately
    transformer_engine   Transformer Engine 2.20 or later, a GPU with FP8 (sm_89, blocks sm_90), and a scaling out of
                         DelayedScaling, Float8CurrentScaling and Float8BlockScaling

On any GPU it also checks whether Triton can build its launcher. Each function returns None, or a short reason.
"""

import functools
import importlib
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from precision.config import Granularity, Method, ScalingConfig
from precision.hardware import HOPPER, KNOWS_FP8, Gpu
from precision.proof import CASTS, refused

TE_OLDEST, TE_INSTALL = (2, 20), "pip install 'octet[te]'"


def cuda_problem(gpu: Gpu | None) -> str | None:
    """Return why the `cuda` backend cannot run here, or None."""
    if gpu is None:
        return "it needs a Hopper GPU (sm_90) and there is no GPU"
    if gpu.capability != HOPPER:
        return f"it needs a Hopper GPU (sm_90); {gpu.name} is {gpu.sm}"
    return wrong_kernels(CASTS)


def wrong_kernels(op: str) -> str | None:
    """Return the self-test's finding about these kernels, or None."""
    return f"its kernels for {op} are wrong here: {refused[op]}" if op in refused else None


@functools.cache
def build_problem() -> str | None:
    """Return why Triton cannot build its launcher, with the fix: it calls a C compiler (CC, gcc or clang), which needs
    Python's headers."""
    if find_spec("triton") is None:
        return None
    compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if compiler is None:
        return "Triton builds kernels with a C compiler, and there is none; install gcc or clang, or set CC"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as in Triton, for Debian
    command = [compiler, f"-I{sysconfig.get_paths(scheme)['include']}", "-E", "-x", "c", "-o", os.devnull, "-"]
    try:
        done = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, check=False)
    except OSError as error:
        return f"Triton builds kernels with CC={compiler}: {error.strerror}; set CC to a C compiler, or leave it unset"
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"{compiler} fails")
        return f"Triton builds kernels with Python's headers ({said}); install them, as with apt install python3-dev"
    return None


def te_problem(gpu: Gpu | None, scaling: ScalingConfig) -> str | None:
    """Return why `transformer_engine` cannot run here, with the fix if it is not installed."""
    if gpu is None:
        return "Transformer Engine needs a GPU and there is none"
    oldest = HOPPER if scaling.granularity is Granularity.block else KNOWS_FP8
    if gpu.capability < oldest:
        return f"Transformer Engine needs sm_{oldest[0]}{oldest[1]} for this scaling; {gpu.name} is {gpu.sm}"
    return te_refusal(scaling) or te_missing()


def te_scaling(scaling: ScalingConfig) -> ScalingConfig:
    """Return the scaling for Transformer Engine: it has no scales per row, so these become per tensor."""
    if scaling.granularity is Granularity.row:
        return replace(scaling, granularity=Granularity.tensor)
    return scaling


def te_refusal(scaling: ScalingConfig) -> str | None:
    """Return why Transformer Engine has no recipe for a scaling, naming the key."""
    where = "precision.scaling"
    if scaling.granularity is Granularity.row:
        return f"Transformer Engine has no {where}.granularity=row; set tensor or block"
    if scaling.method is Method.current and scaling.margin:
        return f"Transformer Engine keeps no {where}.margin={scaling.margin} with method=current; set 0"
    if scaling.granularity is Granularity.block and not scaling.power_of_two:
        return f"Transformer Engine's blocks have power-of-two scales; set {where}.power_of_two=true"
    return None


@functools.cache
def te_missing() -> str | None:
    """Return why Transformer Engine cannot be imported. Imports it."""
    try:
        found = version("transformer_engine")
    except PackageNotFoundError:
        return f"Transformer Engine is not installed; {TE_INSTALL}"
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < TE_OLDEST:
        return f"Transformer Engine {found} is too old, 2.20 is needed; {TE_INSTALL}"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # its libraries raise many: ImportError, OSError, RuntimeError, AssertionError
        reason = " ".join(str(error).split())[:200]
        return f"Transformer Engine {found} cannot be imported ({type(error).__name__}: {reason}); {TE_INSTALL}"
    return None
