"""Common parts of experiment trackers, and TensorBoard, which writes files. Weights & Biases: see `wandb_tracker`.

Both are optional and never delay training. Both take only numbers, and both resume: W&B under the same run id,
TensorBoard by purging the steps that will run again.
"""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from precision.errors import UserError
from trainer.config import WandbConfig, WandbMode

WANDB_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")


def require(package: str, setting: str) -> None:
    """Raise UserError if `package`, which the config key `setting` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{setting}=true: needs {package}, which is not installed; pip install {package}, or set it to false"
        )


def check_wandb(wandb: WandbConfig, mode: str | None) -> None:
    """Raise UserError for a `mode` (variable WANDB_MODE) that wandb would refuse after the run has begun."""
    if wandb.enabled and wandb.mode is WandbMode.auto and mode and mode not in WANDB_MODES:
        raise UserError(f"WANDB_MODE={mode}: not one of {', '.join(WANDB_MODES)}; set one, or unset WANDB_MODE")


class TensorboardTracker:
    """TensorBoard event files in `folder`. Existing steps after `first_step` are purged."""

    def __init__(self, folder: Path, first_step: int, warn: Callable[[str], None]) -> None:
        require("tensorboard", "logging.tensorboard.enabled")
        from torch.utils.tensorboard.writer import SummaryWriter

        self._warn = warn
        self._failed = False
        self._folder, self._open = folder, SummaryWriter
        self._writer = SummaryWriter(folder, purge_step=first_step + 1)

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Write numbers under their keys, at `step`."""
        for key, value in values.items():
            if key != "step":
                self._guarded(self._writer.add_scalar, key, value, values["step"])

    def rewind(self, step: int) -> None:
        """Purge steps later than `step`: the run resumes from it."""
        self._guarded(self._writer.close)
        self._guarded(self._reopen, step)

    def _reopen(self, step: int) -> None:
        self._writer = self._open(self._folder, purge_step=step + 1)

    def close(self) -> None:
        self._guarded(self._writer.close)

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> None:
        if self._failed:
            return
        try:
            call(*arguments)
        except OSError as error:
            self._failed = True
            self._warn(f"TensorBoard files cannot be written ({one_line(error)}); given up for this run")


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
