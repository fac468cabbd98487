"""Weights & Biases, on its own thread: training never waits for it.

    training's thread     metrics, alert  ->  a queue that never blocks; close waits at most a minute
    the thread            import wandb, login, init (online: 30 s, else offline), then the contents of the queue

wandb itself blocks: if a server does not answer, `init` takes a minute and a half and `login` retries; a stalled
connection can block `log` and `finish`. All of that happens on the thread. If the queue is full, lines are lost, with
an alarm; `metrics.jsonl` has everything. What the server does not receive stays on the disk, for `wandb sync`.

Only numbers are sent. W&B's history only grows: steps that run again, after a resume or a rewind, appear twice. So
`step` is a metric like others and the axis of all of them (W&B would refuse its own step going back), and
`recovery/rewinds` distinguishes the lines before a rewind from those after it.
"""

import contextlib
import queue
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.sinks.trackers import one_line, require

INIT_SECONDS = 30.0
"""Seconds for a server to answer; after that the run is tracked offline."""
CLOSE_SECONDS = 60.0
"""Seconds that the end of a run waits for pending uploads."""
WAITING = 10_000
"""Length of the queue of lines for W&B."""

Order = Callable[[Any], None]
"""An operation on the W&B run."""


class WandbTracker:
    """One W&B run. It starts with the first metrics, so that the id of the run to resume can be set before.

    `mode`: online, offline, or auto: online with an API key (`wandb login`), offline without. WANDB_MODE, which wandb
    itself reads, takes precedence over auto. If online does not answer, it becomes offline; any other failure only ends
    tracking. Both are reported once, through `alarm`, from the thread.
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
        """Send an alert, which W&B forwards as its user configured: e-mail, Slack. Returns at once."""
        if self._thread is not None:
            self._put(lambda run: run.alert(title=title, text=text, level="WARN"))

    def close(self, failed: bool) -> None:
        """End the W&B run; `failed` marks it as crashed. Waits for uploads, a minute at most."""
        if self._thread is None:
            return
        self._exit_code = 1 if failed else 0
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._orders.put(None, timeout=0.01 if self._over else CLOSE_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._alarm(
                f"W&B has not taken everything in {CLOSE_SECONDS:.0f} s; "
                f"`wandb sync {shlex.quote(str(self._place))}/*run-*` will"
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
        """Run the thread: start, then execute orders until the queue ends."""
        try:
            run = self._start()
            while (order := self._orders.get()) is not None:
                order(run)
            run.finish(exit_code=self._exit_code)
        except Exception as error:  # of any kind: the library has many, and none may end a run
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
            wandb.teardown()  # the service still holds the failed run, and would refuse its id
            wandb.setup(wandb.Settings(silent=True))
            mode = "offline"
            run = self._init(mode)
        if run.disabled:
            self._say("W&B is disabled by WANDB_MODE")
            return run
        run.define_metric("*", step_metric="step")
        self._place = Path(run.dir).parents[1]
        folder = shlex.quote(str(Path(run.dir).parent))
        where = run.url if mode == "online" else f"offline; `wandb sync {folder}` uploads it"
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
