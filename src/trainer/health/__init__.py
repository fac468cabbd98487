"""Health of a run: metrics of its tensors, experts, GPUs and curves, and alerts on them."""
