"""Numerics: formats, the precision plan, scales, and the layers that compute by them. Knows GEMMs, knows no model."""

from precision.lazy import attach

__all__, __getattr__ = attach(__name__)
