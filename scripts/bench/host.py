"""Time the kernels' operators on the host: Python, from the call to the launch. Needs Triton, and no GPU.

    python scripts/bench/host.py                      all recipes
    python scripts/bench/host.py fp8_delayed --repeat 2000

A step of a small model waits for this, unless `cuda_graph=true` replays it. Kernels are compiled for a Hopper GPU, and
launches do nothing; the tensors are small and in host memory. The table has microseconds a call, and its launches. The
driver's time for a launch (5 to 7 us) is not included.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import frame
import measure
import torch
from layers import OURS as RECIPES
from layers import config_of
from torch import Tensor

from precision.errors import UserError
from trainer.launch.command_line import Parser, guarded

T, D, F, E, K = 256, 256, 128, 4, 2  # tokens, features, an expert's width, experts, chosen
WARM_UP = 20


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"some of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--repeat", type=int, default=500, help="calls of each (default: 500)")
    options = parser.parse_args()
    unknown = [name for name in options.recipes if name not in RECIPES]
    if unknown:
        raise UserError(f"{unknown[0]}: no recipe to measure; name some of {', '.join(RECIPES)}")
    frame.check_positive(options, "repeat")
    measure.header()
    launches = fake_hopper()
    rows: dict[str, dict[str, str]] = {}
    for recipe in options.recipes or RECIPES:
        for name, call in calls(recipe).items():
            micro, count = timed(call, options.repeat, launches)
            rows.setdefault(name, {"operator": name})[recipe] = f"{micro:.1f} ({count:g})"
    measure.say(measure.table(list(rows.values())))


def fake_hopper() -> list[int]:
    """Make Triton compile for a Hopper GPU and launch nothing. Returns the number of launches, which keeps counting."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("Triton is missing, so there are no kernels to launch: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1: the interpreter compiles and launches nothing; unset it")
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver

    class Hopper:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    launches = [0]

    def launch(*args: Any) -> None:
        launches[0] += 1

    def load(kernel: Any) -> None:
        kernel.module = kernel.function = 0

    driver.set_active(Hopper())  # type: ignore[arg-type]
    setattr(CompiledKernel, "_init_handles", load)  # noqa: B010  (plain assignments do not fit their types)
    setattr(CompiledKernel, "run", property(lambda kernel: launch))  # noqa: B010
    from precision.kernels import grouped_gemm

    grouped_gemm.multiprocessors = lambda device: 132
    return launches


def calls(recipe: str) -> dict[str, Callable[[], object]]:
    """Return the operators that a block of this recipe calls, each as a function without arguments."""
    from precision.config import Method
    from precision.formats import BY_NAME
    from precision.kernels import ffn_ops, ops
    from precision.kernels.common import MODES, Cast

    scaling, fp8 = config_of(recipe).scaling, recipe != "bf16"
    one, place = torch.ones(()), torch.zeros((), dtype=torch.int64)
    x, gain, rstd = torch.zeros(T, D, dtype=torch.bfloat16), torch.ones(D), torch.ones(T)
    if not fp8:
        how = back = None
    else:
        mode, delayed = MODES[scaling.granularity], scaling.method is Method.delayed
        formats = BY_NAME[scaling.forward.value], BY_NAME[scaling.backward.value]
        how, back = (Cast(fmt, mode, delayed, scaling.margin, scaling.power_of_two) for fmt in formats)
    words = how.text if how else ""

    def weight(*shape: int) -> tuple[Tensor, Tensor]:
        """Return the data of a stack, and scales of its kind."""
        G, N, C = shape
        data = torch.zeros(shape, dtype=how.fmt.dtype if how else torch.bfloat16)
        kinds = {0: (0,), 1: (G,), 2: (G, N, 1), 3: (G, N // 128, C // 128)}
        return data, torch.ones(kinds[how.mode if how else 0])

    data, inv = (x, torch.empty(0)) if how is None else ops.cast(x, one, one.clone(), words)
    w1, w2, w1_back, w2_back = weight(E, 2 * F, D), weight(E, D, F), weight(E, D, 2 * F), weight(E, F, D)
    expert, share, none = torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K), torch.empty(0)
    both = f"{words} {back.text}" if back else ""
    made = {
        "rms_norm": lambda: ops.rms_norm(x, gain, 1e-6, one, one.clone(), words, not fp8, place),
        "rms_norm_backward": lambda: ops.rms_norm_backward(x, x, gain, rstd),
    }
    if how is not None and back is not None:
        made |= {
            "cast": lambda: ops.cast(x, one, one, words, place),
            "cast_transposed": lambda: ops.cast_transposed(x, one, one, back.text, place),
            "transpose": lambda: ops.transpose(data, inv, words),
        }

        def forward() -> Any:
            return ffn_ops.ffn_forward(
                data, inv, *w1, *w2, expert, share, none.bfloat16(), one, one, both, -1, place, none, True
            )

        _, y1, y1_inv, h_inv, kept, *routing = forward()
        saved, how_back = (data, inv, y1, y1_inv, h_inv, kept, routing), (both, torch.float32, place, place)
        given = *saved, *w1_back, *w2_back, one, one, *how_back
        made |= {"experts, forward": forward, "experts, backward": lambda: ffn_ops.ffn_backward(x, *given)}
    return made


@torch.no_grad()
def timed(call: Callable[[], object], repeat: int, launches: list[int]) -> tuple[float, float]:
    """Return the microseconds of a call, and its launches."""
    for _ in range(WARM_UP):
        call()
    before, began = launches[0], time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - began) / repeat * 1e6, (launches[0] - before) / repeat


if __name__ == "__main__":
    sys.exit(guarded(run))
