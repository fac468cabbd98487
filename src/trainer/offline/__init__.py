"""Work on a finished run: evaluate, sample, replay a step, audit, export, import."""
