"""Health of a run: metrics of tensors, experts, GPUs and curves, and the alerts on them."""
