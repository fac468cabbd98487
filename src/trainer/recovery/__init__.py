"""What a run does about bad steps: find the cause, go back to a checkpoint, or stop."""
