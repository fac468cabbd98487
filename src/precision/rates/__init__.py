"""Measured rates: the time of a GEMM by backend, on the GPUs that were measured. See `rates.table`."""

from precision.rates.table import Entry, RateTable, load_rates, record
