"""DeepSeek-style models: one mechanism of the papers a file, every GEMM and norm through `precision`."""

from precision.lazy import attach

__all__, __getattr__ = attach(__name__)
