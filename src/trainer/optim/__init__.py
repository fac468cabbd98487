"""Optimizers and learning-rate schedules. A step commits or drops on the device."""
