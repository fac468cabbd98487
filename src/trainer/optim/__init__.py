"""Optimizers and learning-rate schedules. A step is committed or skipped on the device."""
