"""Measured rates: how long each backend takes for a GEMM on a GPU that was measured. See `rates.table`."""

from precision.rates.table import Entry, RateTable, load_rates, record

__all__ = ["Entry", "RateTable", "load_rates", "record"]
