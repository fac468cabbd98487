"""The parts of a training step: the engine (its state), the step, microbatches, the guard, snapshots, metrics."""
