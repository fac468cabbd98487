"""What is done with a run afterwards: evaluate, sample, replay a step, audit, export, import."""
