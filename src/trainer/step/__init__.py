"""What one training step is made of: the engine (its state), the step, microbatches, the guard, snapshots, metrics."""
