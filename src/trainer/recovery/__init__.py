"""Reactions to bad steps: find the cause, rewind to a checkpoint, or stop."""
