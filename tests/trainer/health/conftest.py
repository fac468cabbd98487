"""NVML without a GPU: the real Python package over a small C library that stands in for the driver's."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pynvml
import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
QUANTITIES: list[str] = [
    *("energy", "power", "limit", "temperature", "memory_temperature"),
    *("sm_clock", "memory_clock", "max_sm_clock", "reasons", "ecc"),
]
"""In the order of the C library's enum."""


class _Struct(ctypes.Structure):
    _fields_ = [
        ("uuid", ctypes.c_char * 96),
        ("bus", ctypes.c_char * 32),
        ("name", ctypes.c_char * 96),
        ("value", ctypes.c_int64 * len(QUANTITIES)),
        ("error", ctypes.c_int32 * len(QUANTITIES)),
        ("slice_of", ctypes.c_int32),
    ]


class FakeGpu:
    """Handle of a GPU in the library; what is set here is what NVML says next."""

    def __init__(self, struct: Any) -> None:
        self.struct = struct

    def set(self, **values: int) -> None:
        """Quantities, in NVML's units: millijoules, milliwatts, degrees, MHz, bits."""
        for name, value in values.items():
            self.struct.value[QUANTITIES.index(name)] = value

    def refuse(self, error: int, *names: str) -> None:
        """Asking for these (without names: for anything) returns `error` from now on; 0: works again."""
        for name in names or QUANTITIES:
            self.struct.error[QUANTITIES.index(name)] = error


class FakeNvml:
    """The library. `gpus[i]` counts as the machine's GPU number i."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._array = (_Struct * 4).in_dll(library, "fake_gpus")
        ctypes.memset(ctypes.addressof(self._array), 0, ctypes.sizeof(self._array))
        self.fail_init(0)
        self.gpus: list[FakeGpu] = []

    def add(self, uuid: str, bus: str = "", slice_of: int = -1) -> FakeGpu:
        """An H200 at work: 500 W, at its clock. slice_of: index of the GPU that it is a slice of, not counted."""
        struct = self._array[len(self.gpus)]
        struct.uuid, struct.bus, struct.name, struct.slice_of = uuid.encode(), bus.encode(), b"NVIDIA H200", slice_of
        gpu = FakeGpu(struct)
        gpu.set(energy=10**9, power=500_000, limit=700_000, temperature=60, memory_temperature=70)
        gpu.set(sm_clock=1980, memory_clock=3201, max_sm_clock=1980)
        self.gpus.append(gpu)
        count = sum(gpu.struct.slice_of < 0 for gpu in self.gpus)
        ctypes.c_int32.in_dll(self.library, "fake_count").value = count
        return gpu

    def fail_init(self, error: int) -> None:
        """What starting NVML returns."""
        ctypes.c_int32.in_dll(self.library, "fake_init").value = error

    def calls(self, name: str) -> int:
        """How often a quantity was asked for."""
        return (ctypes.c_int32 * len(QUANTITIES)).in_dll(self.library, "fake_calls")[QUANTITIES.index(name)]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled."""
    path = tmp_path_factory.mktemp("nvml") / "nvml.so"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", str(SOURCE), "-o", str(path)], check=True)
    except FileNotFoundError:
        pytest.skip("needs a C compiler")
    return path


@pytest.fixture
def nvml(built: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """The library, where pynvml has the driver's."""
    library = ctypes.CDLL(str(built))
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return FakeNvml(library)
