"""Training: config, data, the loop, checkpoints and recovery, logging. Built on `models` and `precision`."""
