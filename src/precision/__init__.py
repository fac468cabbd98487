"""Number formats, the precision plan, scales, and the layers that compute by them. This package knows GEMMs, but no
model."""

from precision.lazy import attach

__all__, __getattr__ = attach(__name__)
