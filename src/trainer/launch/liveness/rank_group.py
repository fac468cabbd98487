"""Liveness of the processes of a job: no rank waits for a dead one, and a failure is reported once.

Each process runs a heartbeat thread. All share the job's store (`job_store` lists its keys).

A process dies in one of three ways. **It fails**: it posts the failure itself. **It is killed** (by the kernel for lack
of memory, say): its neighbours on the node hold file descriptors of each other (pidfd) that become ready at that
moment, and read from /proc which signal it was. **Its node is lost**: its pulse stops, and after 45 seconds (600 in a
`phase`) rank 0 reports it; if rank 0 itself or the store is lost, all others notice. A process that reads the failure
exits, whatever its main thread waits for.

A process that hangs keeps its pulse. The others wait for it in a collective operation until that times out
(`parallel.timeout`). The ranks that waited are not at fault: `blame` names the one that did not, with its current line
and the operation that the others wait in.

Before the ranks have connected to the store, torchrun notices a process that dies; without torchrun, `lobby` does.

With one process there is no thread, and nothing here imports torch.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from trainer.launch.interrupts import Interrupts, stopping
from trainer.launch.launcher import Launch
from trainer.launch.liveness import heartbeat, lobby
from trainer.launch.liveness.blame import Blame
from trainer.launch.liveness.exit_report import classify_collective_error, place, this_process
from trainer.launch.liveness.heartbeat import Heartbeat
from trainer.launch.liveness.job_store import LOOK_SECONDS, Failure, JobStore, connect, when
from trainer.launch.liveness.lobby import LobbyClient, LobbyServer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, without declaring it


class RankGroup(Interrupts):
    """This process's part in the job.

    step: the last one it has begun; 0: none yet. all_connected: whether all ranks have connected. on_end: called with
    the failure, in the process that reports them. on_leave: called when all have finished their work. overdue: whether
    the others should have reached this rank's position; asked by the heartbeat, while main may wait for the GPU. judge:
    the message (None: a bug) and exit code of an error that ends this rank, None for one with which all ranks end
    alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launch = Launch()
        self.step = 0
        self.all_connected = False
        self.overdue: Callable[[], bool] = lambda: False
        self.judge: Callable[[BaseException], tuple[str | None, int] | None] = lambda error: (None, 1)
        self.on_end: list[Callable[[Failure], None]] = []
        self.on_leave: list[Callable[[], None]] = []
        self._store: JobStore | None = None
        self._heartbeat: Heartbeat | None = None
        self._ending = threading.Lock()
        self._lobby: LobbyServer | LobbyClient | None = None
        self._announced: Failure | None = None

    def join(self, environment: Mapping[str, str]) -> Launch:
        """Read this process's place in the job. Raises UserError for incompatible launcher variables.

        From here on SIGTERM and SIGHUP end this process as Ctrl-C does: unfinished work is undone, and one line reports
        it.
        """
        self.launch = Launch.read(environment)
        self.listen()
        if self.launch.size > 1 and not self.launch.agent_store:
            self._lobby = lobby.enter(self.launch, self._end_before_connected)
        return self.launch

    def _end_before_connected(self, message: str, code: int, rank: int, say: bool) -> NoReturn:
        """End the process; the lobby calls it when a rank was lost, or failed, before all had connected."""
        if self._heartbeat is not None and say:
            self.end(Failure(message, code, rank, self.launch.rank, self.step))
        self.launch.write_error_file(message)
        if say:
            print(f"octet: {message}", file=sys.stderr, flush=True)
        _exit(code)

    @property
    def connected(self) -> bool:
        """Whether the heartbeat runs."""
        return self._heartbeat is not None

    def connect(self) -> "TCPStore":
        """Meet the other ranks in the store and start the heartbeat. Returns a connection for the caller's own use."""
        listening = None
        if isinstance(self._lobby, LobbyServer):
            listening = self._lobby.wait_for_ranks()
        elif self._lobby is not None:
            self._lobby.wait_until_open()
        self._store = JobStore(self.launch, connect(self.launch, listening))
        if isinstance(self._lobby, LobbyServer):
            self._lobby.opened()
        self._store.set("who", self.launch.rank, " ".join(map(str, this_process())))
        self._heartbeat = Heartbeat(self, JobStore(self.launch, connect(self.launch)))
        self._heartbeat.start()
        if isinstance(self._lobby, LobbyClient):  # rank 0 leaves after all others
            self._lobby.connected()
        signal.signal(signal.SIGTERM, self._terminated)
        signal.set_wakeup_fd(self._heartbeat.waker, warn_on_full_buffer=False)
        return connect(self.launch)

    def mark_connected(self) -> None:
        """Mark that all ranks have connected. From here on main handles signals itself: it never waits for a missing
        rank."""
        self.all_connected = True
        signal.set_wakeup_fd(-1)

    def leave(self, seconds: float = 60.0) -> None:
        """Leave after the work. Returns when all ranks have left, or after `seconds`; their end is no longer a
        failure. One that has not connected leaves a mark for those that will wait for it."""
        if self._store is None or self._heartbeat is None:
            if self.launch.size > 1 and self.launch.agent_store and self._store is None:  # else the lobby tells them
                with contextlib.suppress(RuntimeError):
                    JobStore(self.launch, connect(self.launch, seconds=10)).set("absent", None, str(self.launch.rank))
            return
        self._store.set("left", self.launch.rank, "1")
        deadline = time.monotonic() + seconds
        ranks = range(self.launch.size)
        with contextlib.suppress(RuntimeError):  # the store may vanish with its node
            self._store.wait_for_all("left", ranks, deadline)
        self._heartbeat.stop()
        self._heartbeat = None
        for callback in self.on_leave:
            callback()
        if not self.launch.agent_store:  # rank 0 serves the store: it leaves last
            with contextlib.suppress(RuntimeError):
                if self.launch.is_first:
                    self._store.wait_for_all("gone", ranks[1:], deadline)
                else:
                    self._store.set("gone", self.launch.rank, "1")

    def exit(self, code: int) -> int:
        """Return `code` in a single process. One of several exits here, at the same moment as the others: otherwise the
        launcher kills the others when it sees the first one end, and reports that at length."""
        if self.launch.size > 1:
            _exit(code)
        return code

    def decided(self) -> None:
        """Mark that main is ending: with several processes, ignore signals from here on. torchrun sends some."""
        if self.launch.size > 1:
            for number in stopping():
                signal.signal(number, signal.SIG_IGN)

    def is_reporter(self, message: str, code: int) -> bool:
        """Return whether this process reports an error that all may have found, each on its own, before they connected.

        Ranks that already wait for it get it, and end with the same code.
        """
        if self.launch.size == 1:
            return True
        if self._lobby is not None:
            return self._lobby.decide(message, code)
        if not self.launch.agent_store:  # it has failed in `join`
            return True
        try:
            store = JobStore(self.launch, connect(self.launch, seconds=10))
            if code > 128 and store.has("failure"):  # torchrun has stopped this rank because of it
                return False
            first = store.add("said", message, 1) == 1
            store.add("refused", None, 1)
            deadline = time.monotonic() + 2.0
            with contextlib.suppress(KeyboardInterrupt):  # torchrun ends the others as soon as one has ended
                while time.monotonic() < deadline and store.add("refused", None, 0) < self.launch.size:
                    time.sleep(0.02)
            if first:
                store.set("reported", None, "1")
                store.post(self._failure(message, code))
        except RuntimeError:
            return self.launch.is_first
        return first

    def failed(self, error: BaseException, code: int, message: str | None = None, of_all: bool = False) -> NoReturn:
        """End the job, this process included, because main ended with `error`.

        message: to print instead of a traceback. of_all: all ranks have the error, as for a user's mistake, unless
        rank 0 continues: a file may be missing on one node alone.
        """
        assert self._store is not None
        if self._announced is not None:
            self.end(self._announced)
        of_all = of_all and (self.launch.is_first or self._store.wait_for_failure(heartbeat.PATIENCE) is not None)
        if message is not None and of_all:
            self.end(self._failure(message, code))
        try:
            failure = self._blame().failure_of_peer(error, self.step, self.place())
            failure = failure or self._own_failure(error, code, message)
        except RuntimeError:
            failure = self.lost()
        self.end(failure)

    def _failure(self, message: str, code: int, trace: str = "") -> Failure:
        """Return a failure of this rank, which it has found itself."""
        return Failure(message, code, self.launch.rank, self.launch.rank, self.step, trace)

    def _own_failure(self, error: BaseException, code: int, message: str | None) -> Failure:
        """Return the failure for an error of this rank."""
        assert self._store is not None
        what = (message or f"{type(error).__name__}: {' '.join(str(error).split())}").removeprefix("error: ")
        trace = "".join(traceback.format_exception(error)) if message is None else ""
        who = self._store.describe(self.launch.rank)
        return self._failure(f"error: {who} failed {when(self.step)}: {what}", code, trace)

    def announce(self, error: BaseException) -> None:
        """Announce that main will end because of `error` after its clean-up: the others do not wait for that."""
        judged = self.judge(error)
        if self._heartbeat is None or self._store is None or judged is None or classify_collective_error(error)[0]:
            return
        with contextlib.suppress(RuntimeError):  # the store may be gone: `failed` handles that
            failure = self._own_failure(error, judged[1], judged[0])
            self._announced = failure  # from here on the heartbeat does not end main
            if self._store.post(failure) != failure:
                self._announced = None
                return
            self._store.set("seen", self.launch.rank, "1")
            for number in (signal.SIGTERM, signal.SIGHUP):  # torchrun sends some after others have ended
                signal.signal(number, signal.SIG_IGN)
            if self.launch.is_first:
                self._print(failure)

    @property
    def has_announced(self) -> bool:
        """Whether main cleans up after an error that it has announced."""
        return self._announced is not None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark work that may stop this process's pulse (compiling, a slow disk): inside, for at most ten minutes, its
        silence does not count as its death."""
        self._set_phase(name)
        try:
            yield
        finally:
            self._set_phase("")

    def _set_phase(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # the heartbeat notices a store that is gone
            if self._store is not None:
                self._store.set("phase", self.launch.rank, name)

    def stopped(self, message: str, code: int) -> NoReturn:
        """End after a signal has ended main. Usually the others got it, too, and leave. One that waits for this rank,
        or hangs, ends by its heartbeat."""
        assert self._store is not None
        rank = self.launch.rank
        with contextlib.suppress(RuntimeError):
            self._store.set("left", rank, "1")
            if self.launch.is_first:
                print(f"octet: {message}", file=sys.stderr, flush=True)
                self._store.set("reported", None, "1")
            ranks = range(self.launch.size)
            self._store.wait_for_all("left", ranks, time.monotonic() + heartbeat.PATIENCE)
            if not all(self._store.has("left", other) for other in ranks):
                self.end(self._failure(message, code))
        self.leave()
        _exit(code)

    def unresponsive(self, number: int) -> NoReturn:
        """End because main, which waits for the others, did not stop after a signal."""
        code = 128 + number
        if self.stop_signal:  # main has handled and reported it
            _exit(code)
        self.end(self._failure("interrupted" if number == signal.SIGINT else "terminated", code))

    def lost(self) -> Failure:
        """Return the failure of a store that does not answer."""
        rank, where = self.launch.rank, f"{self.launch.address}:{self.launch.port}"
        message = f"error: rank {rank} lost the job's store at {where}: torchrun there, or its node, is gone"
        return Failure(message, 1, 0, rank, self.step)

    def end(self, failure: Failure) -> NoReturn:
        """Post the failure, if there is none yet, make sure that it is reported, and exit. Thread-safe."""
        if not self._ending.acquire(blocking=False):  # the other thread is about to exit
            threading.Event().wait()
        assert self._store is not None
        with contextlib.suppress(RuntimeError):
            failure = self._store.post(failure)
        self.launch.write_error_file(failure.message)
        try:
            self._ensure_reported(failure)
        except RuntimeError:  # the store is gone: every rank reports its own
            self._report(failure)
        finally:
            _exit(failure.code)

    def place(self) -> str:
        """Return main's current place in the code."""
        return place(sys._current_frames().get(threading.main_thread().ident or 0))

    def collective_timeout(self) -> Failure:
        """Return the failure for a collective operation in which main has waited too long."""
        return self._blame().collective_timeout(self.place())

    def _blame(self) -> Blame:
        assert self._store is not None
        return Blame(self._store, self.launch.rank, self.launch.size)

    def _ensure_reported(self, failure: Failure) -> None:
        """Let rank 0 report, which has the screen and the run folder. Without it the finder reports."""
        assert self._store is not None
        rank = self.launch.rank
        self._store.set("seen", rank, "1")
        reporter = failure.finder if failure.rank == 0 and failure.finder != 0 else 0
        if self._announced is not None and self.launch.is_first:
            self._call_listeners(failure)
        elif rank == reporter and not self._store.has("reported"):
            self._report(failure)
        deadline = time.monotonic() + heartbeat.PATIENCE
        while not self._store.has("reported"):
            if time.monotonic() > deadline:
                if rank == failure.finder:
                    self._report(failure)
                break
            time.sleep(LOOK_SECONDS / 5)
        # all exit together, so that the launcher has no reason to kill some of them
        serves = self.launch.is_first and not self.launch.agent_store
        # a rank that another one found dead or silent sees nothing
        alive = [r for r in range(self.launch.size) if r != failure.rank or r == failure.finder]
        patience = heartbeat.PATIENCE if serves else 2 * LOOK_SECONDS
        self._store.wait_for_all("seen", alive, time.monotonic() + patience, LOOK_SECONDS / 25)
        if self._heartbeat is not None:
            self._heartbeat.kill_unresponsive(failure.rank)
        if serves:  # those that lose it print pages of C++
            there = [other for other in range(1, self.launch.size) if self._store.has("seen", other)]
            self._store.wait_for_all("over", there, time.monotonic() + heartbeat.PATIENCE)
        elif not self.launch.agent_store:
            if self._heartbeat is not None and threading.current_thread() is not self._heartbeat:
                self._heartbeat.stop(LOOK_SECONDS)  # a call of its own that loses the store would print those pages
            with contextlib.suppress(RuntimeError):
                self._store.set("over", rank, "1")

    def _report(self, failure: Failure) -> None:
        self._call_listeners(failure)
        self._print(failure)

    def _call_listeners(self, failure: Failure) -> None:
        for listener in self.on_end:
            try:
                listener(failure)
            except Exception as error:  # the failure itself matters more
                print(f"octet: {type(error).__name__}: {error}", file=sys.stderr)

    def _print(self, failure: Failure) -> None:
        if failure.traceback:
            print(failure.traceback, file=sys.stderr, end="")
        print(f"octet: {failure.message}", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.set("reported", None, "1")

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Handle torchrun's signal after a rank ended: then the heartbeat knows of the failure, and is quicker than
        this."""
        time.sleep(2 * LOOK_SECONDS)
        self._interrupt(number, frame)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
