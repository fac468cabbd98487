"""The cast saturates, rounds once to nearest even and keeps NaN; codes are read back exactly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision.formats import BF16, BY_NAME, E4M3, E5M2, Format, fp8_values, saturating_cast

anything = st.floats(width=32) | st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-38, 3.4e38, math.inf, -math.inf, math.nan, 448.0, 464.0, 57344.0]
)
scales = st.floats(2.0**-100, 2.0**100, width=32)


def grid(fmt: Format) -> np.ndarray:
    """Every finite value of an FP8 format, sorted, from its definition rather than from a library."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if fmt is E4M3 else (5, 2, 15)
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            value = mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
        else:
            value = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        special = exponent == (1 << exponent_bits) - 1 and (fmt is E5M2 or mantissa == 7)
        if not special:
            values.append(value)
    return np.array(sorted({*values, *(-v for v in values)}))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_range_is_that_of_the_format(fmt: Format) -> None:
    values = grid(fmt)
    assert values.max() == fmt.max
    assert values[values > 0].min() == fmt.smallest


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@given(xs=st.lists(anything, min_size=1, max_size=40), scale=scales)
def test_cast_saturates_and_rounds_to_the_nearest(fmt: Format, xs: list[float], scale: float) -> None:
    x = torch.tensor(xs, dtype=torch.float32)
    cast = saturating_cast(x, torch.tensor(scale), fmt).to(torch.float64).numpy()
    values = grid(fmt)
    for original, got in zip(x, cast, strict=True):
        exact = (original * torch.tensor(scale, dtype=torch.float32)).double().item()
        if math.isnan(exact):
            assert math.isnan(got)
            continue
        assert got in values, "never an infinity, never a NaN out of a number"
        clamped = min(max(exact, -fmt.max), fmt.max)
        assert abs(got - clamped) == np.abs(values - clamped).min()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_halfway_cases_go_to_the_even_code(fmt: Format) -> None:
    values = torch.arange(0, 0x7C if fmt is E5M2 else 0x7F, dtype=torch.uint8).view(fmt.dtype).double()
    middles = (values[:-1] + values[1:]) / 2
    codes = saturating_cast(middles.float(), torch.tensor(1.0), fmt).view(torch.uint8)
    assert (codes % 2 == 0).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_code_reads_back_exactly(fmt: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    read, truth = fp8_values(codes), codes.to(torch.float64)
    assert read.dtype == torch.float32  # on a CPU
    assert torch.equal(read.isnan(), truth.isnan())
    assert torch.equal(read.double().nan_to_num(nan=0.0), truth.nan_to_num(nan=0.0))
    numbers = ~truth.isnan()
    assert torch.equal(torch.signbit(read)[numbers], torch.signbit(truth)[numbers])


def test_cast_leaves_its_input_alone() -> None:
    x = torch.tensor([1.0, 1e9])
    saturating_cast(x, torch.tensor(2.0), E4M3)
    assert x.tolist() == [1.0, 1e9]


def test_formats_go_by_name() -> None:
    assert BY_NAME["bf16"] is BF16 and not BF16.is_fp8 and E4M3.is_fp8 and str(E5M2) == "e5m2"
