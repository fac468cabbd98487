"""Training: config, data, the loop, what survives a crash, what is logged. Stands on `models` and `precision`."""
