"""The run folder: its lock, its environment, and the source that a run resumes from."""
