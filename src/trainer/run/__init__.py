"""The run folder: its lock, its environment, and what a run resumes from."""
