"""Training: config, data, the loop, what survives a crash, what is logged. Uses `models` and `precision`; nothing uses it."""
