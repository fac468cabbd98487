"""Forecasts and checks before a run: checks across keys, memory, time, parallel layouts."""
