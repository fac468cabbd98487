"""Experiment trackers: Weights & Biases and TensorBoard. Both are optional and neither may hold up training.

Both take numbers only, and both are resumed: W&B under the same run id, TensorBoard by purging the steps that will be
run again. W&B's history only grows: steps that are run again, after a resume or a rewind, stand there twice. So `step`
is a metric like others and the axis of all of them (W&B would refuse its own step going back), and `recovery/rewinds`
tells the lines of one course from those of the next.
"""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_INIT_SECONDS = 30
_FINISH_SECONDS = 60


def require(package: str, setting: str) -> None:
    """Raise ValueError if `package`, which the config key `setting` asks for, is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{setting}=true: needs {package}, which is not installed; pip install {package}, or set it to false"
        )


class WandbTracker:
    """Weights & Biases. Starts with the first metrics, so that the id of the run it resumes can be set before.

    `mode`: online, offline, or auto: online with an API key (`wandb login`), offline without; WANDB_MODE, which wandb
    itself reads, decides before auto does. Online that does not answer becomes offline. Any failure is told once
    through `warn` and ends tracking, nothing else.
    """

    def __init__(
        self,
        folder: Path,
        project: str,
        entity: str | None,
        mode: str,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        require("wandb", "logging.wandb.enabled")
        self.run_id: str | None = None
        self._folder, self._project, self._entity, self._mode, self._config = folder, project, entity, mode, config
        self._say, self._warn = say, warn
        self._run: Any = None
        self._failed = False

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Send numbers; `step` among them is the axis."""
        if self._failed:
            return
        import wandb

        try:
            if self._run is None:
                self._run = self._start()
            self._run.log(dict(values))
        except (wandb.Error, OSError, ValueError, TypeError) as error:
            self._fail(error)

    def alert(self, title: str, text: str) -> None:
        """Send an alert, which W&B hands on as its user has asked it to: e-mail, Slack."""
        if self._run is None or self._failed:
            return
        import wandb

        try:
            self._run.alert(title=title, text=text, level="WARN")
        except (wandb.Error, OSError, ValueError, TypeError) as error:
            self._fail(error)

    def close(self, failed: bool) -> None:
        """End the run there; `failed` marks it as crashed. Waits for uploads, a minute at most."""
        if self._run is None or self._failed:
            return
        import wandb

        try:
            self._run.finish(exit_code=1 if failed else 0)
        except (wandb.Error, OSError) as error:
            self._fail(error)

    def _start(self) -> Any:
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # say() says it in one line
        mode = self._mode if self._mode != "auto" else self._automatic_mode()
        try:
            run = self._init(mode)
        except wandb.Error as error:
            if mode == "offline":
                raise
            self._warn(f"W&B does not answer ({_one_line(error)}): tracking offline")
            mode = "offline"
            run = self._init(mode)
        if run.disabled:
            self._say("W&B is disabled by WANDB_MODE")
            return run
        run.define_metric("*", step_metric="step")
        self.run_id = run.id
        where = run.url if mode == "online" else f"offline; `wandb sync {Path(run.dir).parent}` uploads it"
        self._say(f"W&B run {run.id}: {where}")
        return run

    def _automatic_mode(self) -> str:
        import wandb

        mode = wandb.setup().settings.mode or "online"
        if mode != "online":
            return mode
        try:
            return "online" if wandb.login(prompt=False) else "offline"
        except wandb.Error as error:
            self._warn(f"W&B does not accept the API key or does not answer ({_one_line(error)}): tracking offline")
            return "offline"

    def _init(self, mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", init_timeout=_INIT_SECONDS, finish_timeout=_FINISH_SECONDS
        )
        return wandb.init(
            project=self._project,
            entity=self._entity,
            name=self._folder.name,
            id=self.run_id,
            resume="allow",
            reinit="create_new",
            dir=self._folder,
            mode=mode,  # pyright: ignore[reportArgumentType]
            config=dict(self._config),
            settings=settings,
        )

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._warn(f"W&B failed and is given up for this run: {_one_line(error)}")


class TensorboardTracker:
    """TensorBoard event files in `folder`. Steps after `first_step` that are there from before are purged."""

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
        """The run goes on from `step`: purge what is later."""
        self._guarded(self._writer.close)
        if not self._failed:
            self._writer = self._open(self._folder, purge_step=step + 1)

    def close(self) -> None:
        """Write what is buffered and close."""
        self._guarded(self._writer.close)

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> None:
        if self._failed:
            return
        try:
            call(*arguments)
        except OSError as error:
            self._failed = True
            self._warn(f"TensorBoard files cannot be written ({_one_line(error)}); given up for this run")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
