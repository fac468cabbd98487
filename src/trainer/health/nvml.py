"""One GPU as NVML, the driver's own library, reports it: power, energy, temperatures, clocks and why they are reduced.

NVML numbers all GPUs of a machine, torch those in CUDA_VISIBLE_DEVICES in that order, so their indices differ. Both
know the GPU's UUID. `find` matches it first, then the address on the PCI bus; if NVML reports a single GPU (a
container), it takes that one. A slice of a GPU (MIG) has no meter of its own: the whole GPU is read, and `Gpu.sliced`
is true.

Any call may fail: the GPU lacks the sensor, the driver lacks the function, or a container may not call it. Such a
quantity is None and not queried again; the others continue. A GPU that has fallen off the bus raises `GpuLost`.

No call touches the GPU's queue or waits for it. But a call may take milliseconds, and many if the driver is in trouble:
call it from a separate thread (`power`, or a bench's meter), never in a training step.

Reasons for a reduced clock (`Gpu.reasons`, a bit mask):

    POWER_CAP    at its power limit: normal under full load
    THERMAL      too hot, core or memory: the driver or the board lowers the clock
    HARDWARE     the board protects itself: too hot, too much current, the power supply's brake; clocks halve or worse

Harmless reasons are not among them: idling, and clocks set by an administrator. THERMAL and HARDWARE overlap: a board
that is too hot has both.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

POWER_CAP = 0x04
THERMAL = 0x20 | 0x40  # by software, by hardware
HARDWARE = 0x08 | 0x40 | 0x80  # slowdown (some GPUs report only this), thermal, power brake
THROTTLED = POWER_CAP | THERMAL | HARDWARE
IDLE = 0x01

_NEVER = ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "INVALID_ARGUMENT", "DEPRECATED")
_GONE = ("GPU_IS_LOST", "RESET_REQUIRED", "UNINITIALIZED", "DRIVER_NOT_LOADED")


class Unavailable(Exception):
    """NVML is missing or does not know this GPU. The message has the reason and what to do."""


class GpuLost(Exception):
    """NVML no longer reaches the GPU."""


def find(device: "torch.device") -> "Gpu":
    """Return the GPU that torch calls `device`. Raises `Unavailable` if NVML is missing or does not know it."""
    return find_by(*identity(device))


def identity(device: "torch.device") -> tuple[str, str]:
    """Return UUID and PCI address of a GPU as torch reports them, "" where unknown; ("", "") for a CPU."""
    if device.type != "cuda":
        return "", ""
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", "") or "")
    address = ""
    if hasattr(properties, "pci_bus_id"):
        address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return uuid, address


def find_by(uuid: str, address: str = "") -> "Gpu":
    """Return the GPU with this UUID (with or without GPU- or MIG-), or at this PCI address, or the only one."""
    nvml = _load()
    plain = uuid.removeprefix("GPU-").removeprefix("MIG-")
    ways: list[Callable[[], Any]] = []
    if plain:
        ways += [lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{plain}")]
        ways += [lambda: nvml.nvmlDeviceGetHandleByUUID(f"MIG-{plain}")]
    if address:
        ways += [lambda: nvml.nvmlDeviceGetHandleByPciBusId(address)]
    for way in ways:
        try:
            return Gpu(nvml, way())
        except nvml.NVMLError:
            continue
    try:
        if nvml.nvmlDeviceGetCount() == 1:
            return Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(0))
    except nvml.NVMLError as error:
        raise Unavailable(f"NVML does not show its GPUs ({error}); is this process allowed to see them?") from error
    raise Unavailable(f"NVML knows no GPU with the UUID {uuid or '?'}; compare `nvidia-smi -L`")


def _load() -> Any:
    """Import the module and initialise its library."""
    try:
        import pynvml as nvml
    except ImportError as error:
        raise Unavailable("nvidia-ml-py is not installed; pip install nvidia-ml-py") from error
    try:
        nvml.nvmlInit()  # reference-counted: a second call costs nothing
    except nvml.NVMLError as error:
        raise Unavailable(
            f"NVML cannot be used ({error}); is NVIDIA's driver installed, and shown to this container?"
        ) from error
    return nvml


class Gpu:
    """One GPU. Methods return None for a quantity that it does not report, and raise `GpuLost` if it is unreachable."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._silent: set[str] = set()
        self._never = {getattr(nvml, f"NVML_ERROR_{name}", None) for name in _NEVER}
        self._gone = {getattr(nvml, f"NVML_ERROR_{name}", None) for name in _GONE}
        slice_of = self._ask("slice", "nvmlDeviceIsMigDeviceHandle")
        self.sliced = slice_of is not None and bool(slice_of.value)
        """Whether the run has a slice of this GPU (MIG). The measurements are of all its slices together."""
        if self.sliced:
            self._handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        self.uuid: str = self._ask("uuid", "nvmlDeviceGetUUID") or ""
        self.name: str = self._ask("name", "nvmlDeviceGetName") or "GPU"
        limit = self._ask("limit", "nvmlDeviceGetEnforcedPowerLimit")
        self.limit_watts: float | None = None if limit is None else limit / 1e3
        """Its current power limit."""
        self.max_sm_mhz: int | None = self._ask("max sm clock", "nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)

    def joules(self) -> float | None:
        """Energy since the driver was loaded. The counter updates every 20 to 100 ms."""
        value = self._ask("energy", "nvmlDeviceGetTotalEnergyConsumption")
        return None if value is None else value / 1e3

    def watts(self) -> float | None:
        """Power; newer GPUs report its average over the last second."""
        value = self._ask("power", "nvmlDeviceGetPowerUsage")
        return None if value is None else value / 1e3

    def celsius(self) -> float | None:
        """Temperature of the core."""
        nvml = self._nvml
        value = self._ask("temperature", "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        if value is None:  # replaces the one above in newer drivers
            value = self._ask("temperature by struct", "nvmlDeviceGetTemperatureV", nvml.NVML_TEMPERATURE_GPU)
        return value

    def memory_celsius(self) -> float | None:
        """Temperature of the memory, if it has a sensor (HBM does)."""
        values = self._ask("fields", "nvmlDeviceGetFieldValues", [self._nvml.NVML_FI_DEV_MEMORY_TEMP])
        if values is None or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return values[0].value.uiVal or None  # 0: a board without the sensor

    def sm_mhz(self) -> int | None:
        """Current clock of the multiprocessors."""
        return self._ask("sm clock", "nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)

    def memory_mhz(self) -> int | None:
        """Current clock of the memory."""
        return self._ask("memory clock", "nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM)

    def reasons(self) -> int | None:
        """Why the clock is reduced: bits of POWER_CAP, THERMAL, HARDWARE, IDLE, and others."""
        return self._ask("reasons", "nvmlDeviceGetCurrentClocksEventReasons")

    def ecc_errors(self) -> int | None:
        """Uncorrectable ECC memory errors since the driver was loaded."""
        nvml = self._nvml
        return self._ask(
            "ecc", "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )

    def _ask(self, quantity: str, function: str, *arguments: Any) -> Any:
        """Call a function of NVML. Return None if it fails; one that will always fail is not called again."""
        if quantity in self._silent:
            return None
        call = getattr(self._nvml, function, None)
        if call is None:  # an older nvidia-ml-py
            self._silent.add(quantity)
            return None
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value in self._gone:
                raise GpuLost(str(error)) from error
            if error.value in self._never:
                self._silent.add(quantity)
            return None  # else a transient error (a timeout): asked again
