"""DeepSeek-style models: one mechanism of the papers per file; every GEMM and norm runs through `precision`."""

from precision.lazy import attach

__all__, __getattr__ = attach(__name__)
