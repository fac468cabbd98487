"""Liveness of ranks: a dead or hanging rank ends the job within a minute, and one line names it."""
