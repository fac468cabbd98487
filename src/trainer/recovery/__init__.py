"""What a run does when a step goes bad: drop it, go back, or stop."""

from trainer.recovery.guard import StepGuard, TrainingStopped, Verdict

__all__ = ["StepGuard", "TrainingStopped", "Verdict"]
