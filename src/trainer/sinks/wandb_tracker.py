"""Weights & Biases, on a thread of its own: training never waits for it.

    training's thread     metrics, alert  ->  a queue, which is never waited for; close waits a minute at most
    the thread            import wandb, login, init (online: 30 s, else offline), then what is in the queue

wandb itself waits: for a server that does not answer, `init` takes a minute and a half and `login` retries; a stalled
connection can hold up `log` and `finish`. All of that happens on the thread. What the queue cannot take is lost, with
an alarm; `metrics.jsonl` has everything. What the server does not get stays on the disk, for `wandb sync`.

Numbers only. W&B's history only grows: steps that are run again, after a resume or a rewind, stand there twice. So
`step` is a metric like others and the axis of all of them (W&B would refuse its own step going back), and
`recovery/rewinds` distinguishes the lines before a rewind from those after it.
"""

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.sinks.trackers import one_line, require

INIT_SECONDS = 30.0
"""That a server has to answer in; then the run is tracked offline."""
CLOSE_SECONDS = 60.0
"""That the end of a run waits for what is still to be uploaded."""
WAITING = 10_000
"""Lines that wait for W&B at most."""

Order = Callable[[Any], None]
"""Something to do with the W&B run."""


class WandbTracker:
    """One W&B run. Starts with the first metrics, so that the id of the run it resumes can be set before.

    `mode`: online, offline, or auto: online with an API key (`wandb login`), offline without; WANDB_MODE, which wandb
    itself reads, decides before auto does. Online that does not answer becomes offline; any other failure ends
    tracking, and nothing else. Both are reported once, through `alarm`, from the thread.
    """

    def __init__(
        self,
        folder: Path,
        project: str,
        entity: str | None,
        mode: str,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        alarm: Callable[[str], None],
    ) -> None:
        require("wandb", "logging.wandb.enabled")
        self.run_id: str | None = None
        self._folder, self._project, self._entity, self._mode, self._config = folder, project, entity, mode, config
        self._tell_say, self._tell_alarm = say, alarm
        self._orders: queue.Queue[Order | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._over = False
        self._lost = 0
        self._exit_code = 0
        self._place = folder / "wandb"

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Send numbers; `step` among them is the axis. Returns at once."""
        if self._thread is None and not self._over:
            # known from here on, so that each checkpoint has it, whenever the server answers
            self.run_id = self.run_id or secrets.token_hex(4)
            self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
            self._thread.start()
        copied = dict(values)
        self._put(lambda run: run.log(copied))

    def alert(self, title: str, text: str) -> None:
        """Send an alert, which W&B hands on as its user has asked it to: e-mail, Slack. Returns at once."""
        if self._thread is not None:
            self._put(lambda run: run.alert(title=title, text=text, level="WARN"))

    def close(self, failed: bool) -> None:
        """End the run there; `failed` marks it as crashed. Waits for uploads, a minute at most."""
        if self._thread is None:
            return
        self._exit_code = 1 if failed else 0
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._orders.put(None, timeout=0.01 if self._over else CLOSE_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._alarm(
                f"W&B has not taken everything in {CLOSE_SECONDS:.0f} s; `wandb sync {self._place}/*run-*` will"
            )
        self._over = True

    def _put(self, order: Order) -> None:
        if self._over:
            return
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                self._alarm(f"W&B is {WAITING} lines behind: lines are being lost there ({self._folder.name} has them)")

    def _say(self, text: str) -> None:
        if not self._over:
            self._tell_say(text)

    def _alarm(self, text: str) -> None:
        if not self._over:
            self._tell_alarm(text)

    def _work(self) -> None:
        """The thread: start, then do what is ordered until there is nothing more to come."""
        try:
            run = self._start()
            while (order := self._orders.get()) is not None:
                order(run)
            run.finish(exit_code=self._exit_code)
        except Exception as error:  # of whatever kind: the library has many, and none is worth a run
            self._alarm(f"W&B failed and is given up for this run: {one_line(error)}")
        self._over = True

    def _start(self) -> Any:
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # say() reports it in one line
        mode = self._mode if self._mode != "auto" else self._automatic_mode()
        try:
            run = self._init(mode)
        except Exception as error:
            if mode == "offline":
                raise
            self._alarm(f"W&B does not answer ({one_line(error)}): tracking offline")
            wandb.teardown()  # the service still has the run that failed, and would refuse its id
            wandb.setup(wandb.Settings(silent=True))
            mode = "offline"
            run = self._init(mode)
        if run.disabled:
            self._say("W&B is disabled by WANDB_MODE")
            return run
        run.define_metric("*", step_metric="step")
        self._place = Path(run.dir).parents[1]
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
        except Exception as error:
            self._alarm(f"W&B does not accept the API key or does not answer ({one_line(error)}): tracking offline")
            return "offline"

    def _init(self, mode: str) -> Any:
        import wandb

        settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS, finish_timeout=CLOSE_SECONDS)
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
