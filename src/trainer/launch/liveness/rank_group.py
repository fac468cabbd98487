"""What the processes of a job owe each other: nobody waits for one that is gone, and what went wrong is said once.

Each process runs a thread, the watch, that shares the job's store (torchrun's own, on the first node) with all others:

    who/R     host, process, its namespace               set at the start
    pulse/R   a count, its last step, where it is        set every 5 seconds, by the watch
    phase/R   what may keep rank R silent for long       set by main, see `phase`
    left/R    rank R has done its work                   so that its end is no news
    gone/R    rank R has stopped its watch               rank 0 waits for it, if it serves the store itself
    late/R    what rank R waited in, in vain             see `failed`
    news      why the job ends                           written once, by whoever knows first
    reported  a rank has reported the news               rank 0, while it is alive

A process dies in one of three ways. **It fails**: it writes the news itself. **It is killed** (by the kernel for want
of memory, say): its neighbours on the node hold a file descriptor of each other (pidfd) that becomes ready at that
moment, and read from /proc which signal it was. **Its node is lost**: its pulse stops, and after 45 seconds (600 in a
`phase` that says that it may) rank 0 says so; where rank 0 itself or the store is lost, all others notice. Whoever
reads the news ends its process, whatever its main thread waits for.

A process that hangs keeps its pulse. The others wait for it in a collective operation until that runs out of time
(`parallel.timeout`); those who did are not to blame, so that the one who did not is named, with the line it is at
and the operation that they wait in.

Before the ranks have met in the store, torchrun sees who dies; without torchrun, `lobby` does.

With one process there is no watch, and nothing here imports torch.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from trainer.launch.launcher import Launch
from trainer.launch.liveness import heartbeat, lobby
from trainer.launch.liveness.exit_report import of_a_collective, pending_operation, place, this_process, waited_in
from trainer.launch.liveness.heartbeat import LOOK_SECONDS, News, Watch, when
from trainer.launch.liveness.lobby import Guest, Host

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, and does not say so


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, outside of training, which would save first."""


def stopping() -> list[signal.Signals]:
    """The signals that ask a process to stop: Ctrl-C, a scheduler's, a terminal that has gone, unless nohup keeps that
    one from us."""
    hears = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hears else [])]


class RankGroup:
    """This process's part in the job.

    step: the last one it has begun; 0: none yet. stop_signal: number of the signal that asked it to stop before it
    trained; 0: none. met: whether all have come together. on_end: called with the news, in the process that tells them.
    on_leave: called when all have done their work. overdue: says whether the others should have come to where this rank
    has been; it is asked while main waits for the GPU, say, and can tell nobody. judge: the message (None: a bug) and
    exit code of an error that ends this rank, None for one with which all ranks end alike.
    """

    def __init__(self) -> None:
        self.launch = Launch()
        self.step = 0
        self.stop_signal = 0
        self.met = False
        self.overdue: Callable[[], bool] = lambda: False
        self.judge: Callable[[BaseException], tuple[str | None, int] | None] = lambda error: (None, 1)
        self.on_end: list[Callable[[News], None]] = []
        self.on_leave: list[Callable[[], None]] = []
        self._store: TCPStore | None = None
        self._watch: Watch | None = None
        self._ending = threading.Lock()
        self._lobby: Host | Guest | None = None
        self._announced: News | None = None
        self._phases: list[str] = []

    def board(self, environment: Mapping[str, str]) -> Launch:
        """Read which process this is. UserError if the launcher's variables do not go together.

        From here on SIGTERM and SIGHUP end this process as Ctrl-C does: what is half done is undone, and one line says
        so.
        """
        self.launch = Launch.read(environment)
        for number in stopping():
            signal.signal(number, self._told)
        if self.launch.size > 1 and not self.launch.agent_store:
            self._lobby = lobby.enter(self.launch, self._not_met)
        return self.launch

    def _not_met(self, message: str, code: int, rank: int, say: bool) -> NoReturn:
        """The lobby's: a rank was lost, or has failed, before all had met."""
        if self._watch is not None and say:
            self.end(News(message, code, rank, self.launch.rank, self.step))
        self.launch.leave_word(message)
        if say:
            print(f"octet: {message}", file=sys.stderr, flush=True)
        _exit(code)

    @property
    def connected(self) -> bool:
        """Whether the others are watched over."""
        return self._watch is not None

    def connect(self) -> "TCPStore":
        """Meet the others in the store and watch over them from here on. Returns a connection for the caller's use.

        One that waits holds up all who share it: main, the watch and the process groups have one each.
        """
        if isinstance(self._lobby, Host):
            self._store = _connect(self.launch, self._lobby.socket_when_all_came())
            self._lobby.opened()
        else:
            if self._lobby is not None:
                self._lobby.wait_until_open()
            self._store = _connect(self.launch)
        self._key("who", self.launch.rank, " ".join(map(str, this_process())))
        self._watch = Watch(self, _connect(self.launch))
        self._watch.start()
        if isinstance(self._lobby, Guest):  # rank 0 leaves when all others have
            self._lobby.met()
        signal.signal(signal.SIGTERM, self._terminated)
        signal.set_wakeup_fd(self._watch.waker, warn_on_full_buffer=False)
        return _connect(self.launch)

    def all_met(self) -> None:
        """All have come. From here on main hears of signals itself: it waits for nobody who may never come."""
        self.met = True
        signal.set_wakeup_fd(-1)

    def leave(self, seconds: float = 60.0) -> None:
        """The work is done. Returns when all others say so too, or after `seconds`; their end is no news any more."""
        if self._store is None or self._watch is None:
            return
        self._key("left", self.launch.rank, "1")
        deadline = time.monotonic() + seconds
        everybody = range(self.launch.size)
        self._await_all("left", everybody, deadline)
        self._watch.stop()
        self._watch = None
        for callback in self.on_leave:
            callback()
        if not self.launch.agent_store:  # rank 0 serves the store: it goes last
            if self.launch.is_first:
                self._await_all("gone", everybody[1:], deadline)
            else:
                with contextlib.suppress(RuntimeError):
                    self._key("gone", self.launch.rank, "1")

    def _await_all(self, kind: str, ranks: Iterable[int], deadline: float) -> None:
        assert self._store is not None
        keys = [self.name(kind, rank) for rank in ranks]
        with contextlib.suppress(RuntimeError):  # the store may go with its node
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS / 5)

    def exit(self, code: int) -> int:
        """`code`, for a process by itself. One of many ends here, at the same moment as the others.

        Else the launcher, which sees the first one end, ends the others, and tells of it at length.
        """
        if self.launch.size > 1:
            _exit(code)
        return code

    def decided(self) -> None:
        """How main ends is decided: of many processes, one hears of no signal on its last way. torchrun sends some."""
        if self.launch.size > 1:
            for number in stopping():
                signal.signal(number, signal.SIG_IGN)

    def first_to_say(self, message: str, code: int) -> bool:
        """Whether this process is the one to say what all may have found wrong, each for itself, before they met.

        Those who wait for it already get it as news, and end with the same code.
        """
        if self.launch.size == 1:
            return True
        self.launch.leave_word(message)
        if self._lobby is not None:
            return self._lobby.decide(message, code)
        if not self.launch.agent_store:  # it has failed in `board`
            return True
        try:
            store = _connect(self.launch, seconds=10)
            first = store.add(self.name("said", message), 1) == 1
            store.add(self.name("refused"), 1)
            deadline = time.monotonic() + 2.0
            with contextlib.suppress(KeyboardInterrupt):  # torchrun ends the others as soon as it has seen one end
                while time.monotonic() < deadline and store.add(self.name("refused"), 0) < self.launch.size:
                    time.sleep(0.02)
            if first:
                rank = self.launch.rank
                store.set(self.name("reported"), "1")
                store.compare_set(self.name("news"), "", json.dumps(asdict(News(message, code, rank, rank, 0))))
        except RuntimeError:
            return self.launch.is_first
        return first

    def failed(self, error: BaseException, code: int, message: str | None = None, of_all: bool = False) -> NoReturn:
        """Main is over because of `error`: end the job, this process included.

        message: what to say, instead of a traceback. of_all: it stands for all ranks, as a mistake of the user's does,
        else it is one of this rank.
        """
        if self._announced is not None:
            self.end(self._announced)
        if message is not None and of_all:
            self.end(News(message, code, self.launch.rank, self.launch.rank, self.step))
        try:
            news = self._of_others(error) or self._own(error, code, message)
        except RuntimeError:
            news = self.lost()
        self.end(news)

    def _own(self, error: BaseException, code: int, message: str | None) -> News:
        """Of an error of this rank."""
        rank, step = self.launch.rank, self.step
        says = (message or f"{type(error).__name__}: {' '.join(str(error).split())}").removeprefix("error: ")
        trace = "".join(traceback.format_exception(error)) if message is None else ""
        return News(f"error: {self.describe(rank)} failed {when(step)}: {says}", code, rank, rank, step, trace)

    def announce(self, error: BaseException) -> None:
        """Main will be over because of `error`, and has to put things away before: the others do not wait for that."""
        judged = self.judge(error)
        if self._watch is None or self._store is None or judged is None or of_a_collective(error)[0]:
            return
        with contextlib.suppress(RuntimeError):  # the store may be gone: `failed` deals with that
            self._announced = news = self._own(error, judged[1], judged[0])  # from here on the watch lets main be
            if self._post(news) != news:
                self._announced = None
                return
            self._key("seen", self.launch.rank, "1")
            for number in (signal.SIGTERM, signal.SIGHUP):  # torchrun sends some when the others have ended
                signal.signal(number, signal.SIG_IGN)
            if self.launch.is_first:
                self._say(news)

    @property
    def has_announced(self) -> bool:
        """Whether main puts things away after an error that all know."""
        return self._announced is not None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the work that may keep this process from giving signs of life (compiling, a slow disk): until it is
        over, or for ten minutes, its silence is not taken for its death. Phases may be nested."""
        if self._watch is None:
            yield
            return
        self._phases.append(name)
        with contextlib.suppress(RuntimeError):
            self._key("phase", self.launch.rank, name)
        try:
            yield
        finally:
            self._phases.pop()
            with contextlib.suppress(RuntimeError):
                self._key("phase", self.launch.rank, self._phases[-1] if self._phases else "")

    def phase_of(self, rank: int) -> str:
        """The phase that a rank is in; empty: none."""
        assert self._store is not None
        return self._store.get(self.name("phase", rank)).decode() if self.has("phase", rank) else ""

    def stopped(self, message: str, code: int) -> NoReturn:
        """A signal has ended main. Mostly the others have got it too, and leave; one whose main waits for this one, or
        hangs, hears of it as news."""
        rank = self.launch.rank
        with contextlib.suppress(RuntimeError):
            self._key("left", rank, "1")
            if self.launch.is_first:
                print(f"octet: {message}", file=sys.stderr, flush=True)
                self._key("reported", None, "1")
            everybody = range(self.launch.size)
            self._await_all("left", everybody, time.monotonic() + heartbeat.PATIENCE)
            if not all(self.has("left", other) for other in everybody):
                self.end(News(message, code, rank, rank, self.step))
        self.leave()
        _exit(code)

    def deaf(self, number: int) -> NoReturn:
        """A signal has told this process to end, and main, which waits for others to come, has not."""
        code = 128 + number
        if self.stop_signal:  # it has heard, and said so
            _exit(code)
        rank, word = self.launch.rank, "interrupted" if number == signal.SIGINT else "terminated"
        self.end(News(word, code, rank, rank, self.step))

    def lost(self) -> News:
        """The store does not answer."""
        rank, where = self.launch.rank, f"{self.launch.address}:{self.launch.port}"
        message = f"error: rank {rank} lost the job's store at {where}: torchrun there, or its node, is gone"
        return News(message, 1, 0, rank, self.step)

    def end(self, news: News) -> NoReturn:
        """Post the news, if nobody has yet, see to it that they are told, and exit. Any thread may call."""
        if not self._ending.acquire(blocking=False):  # the other thread is about to exit
            threading.Event().wait()
        assert self._store is not None
        with contextlib.suppress(RuntimeError):
            news = self._post(news)
        self.launch.leave_word(news.message)
        try:
            self._see_it_told(news)
        except RuntimeError:  # the store is gone: everyone says it for himself
            self._tell(news)
        finally:
            _exit(news.code)

    def _post(self, news: News) -> News:
        """Write the news, unless there are some. Returns those that count."""
        assert self._store is not None
        return News(**json.loads(self._store.compare_set(self.name("news"), "", json.dumps(asdict(news)))))

    def describe(self, rank: int) -> str:
        """`rank 1 (host, process 123)`."""
        assert self._store is not None
        host, process = "?", "?"
        if self._store.check([self.name("who", rank)]):
            host, process = self._store.get(self.name("who", rank)).decode().split()[:2]
        return f"rank {rank} ({host}, process {process})"

    def has(self, kind: str, which: object = None) -> bool:
        """Whether a key is there."""
        assert self._store is not None
        return self._store.check([self.name(kind, which)])

    def pulse(self) -> str:
        """What the watch sends: `COUNT|STEP|PLACE`, without the count."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return f"{self.step}|{place(frame)}"

    def pulse_of(self, rank: int) -> tuple[int, str]:
        """(last step, place) that a rank has sent."""
        _, step, place = self._pulse(rank).split("|", 2)
        return int(step), place

    def _pulse(self, rank: int) -> str:
        assert self._store is not None
        return self._store.get(self.name("pulse", rank)).decode() if self.has("pulse", rank) else "0|0|?"

    def _see_it_told(self, news: News) -> None:
        """Rank 0 tells, for it has the screen and the run folder; the finder does if rank 0 is gone or does not."""
        assert self._store is not None
        rank = self.launch.rank
        self._key("seen", rank, "1")
        teller = news.finder if news.rank == 0 and news.finder != 0 else 0
        if self._announced is not None and self.launch.is_first:
            self._listen(news)
        elif rank == teller and not self._store.check([self.name("reported")]):
            self._tell(news)
        deadline = time.monotonic() + heartbeat.PATIENCE
        while not self._store.check([self.name("reported")]):
            if time.monotonic() > deadline:
                if rank == news.finder:
                    self._tell(news)
                break
            time.sleep(LOOK_SECONDS / 5)
        # all exit together, so that the launcher has no reason to end some of them
        others = [self.name("seen", other) for other in range(self.launch.size) if other != news.rank]
        serves = self.launch.is_first and not self.launch.agent_store
        deadline = time.monotonic() + (heartbeat.PATIENCE if serves else 2 * LOOK_SECONDS)
        while not self._store.check(others) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 25)
        if self._watch is not None:
            self._watch.kill_unresponsive(news.rank)
        if serves:  # those that lose it print pages of C++
            alive = [other for other in range(1, self.launch.size) if self.has("seen", other)]
            self._await_all("over", alive, time.monotonic() + heartbeat.PATIENCE)
        elif not self.launch.agent_store:
            self._key("over", rank, "1")

    def _tell(self, news: News) -> None:
        self._listen(news)
        self._say(news)

    def _listen(self, news: News) -> None:
        for listener in self.on_end:
            try:
                listener(news)
            except Exception as error:  # what it has to say matters less than the news
                print(f"octet: {type(error).__name__}: {error}", file=sys.stderr)

    def _say(self, news: News) -> None:
        if news.traceback:
            print(news.traceback, file=sys.stderr, end="")
        print(f"octet: {news.message}", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            self._key("reported", None, "1")

    def _await_news(self, seconds: float) -> News | None:
        assert self._store is not None
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline:
                if self._store.check([self.name("news")]):
                    return News(**json.loads(self._store.get(self.name("news"))))
                time.sleep(LOOK_SECONDS / 5)
        return None

    def _of_others(self, error: BaseException) -> News | None:
        """What made a collective operation fail, or run out of time, if it was not this rank."""
        by_others, timed_out = of_a_collective(error)
        if timed_out:
            return self.waited_in_vain(waited_in(error))
        return self._await_news(heartbeat.PATIENCE) or self._silent() if by_others else None

    def waited_in_vain(self, operation: str | None = None) -> News:
        """For a collective operation that has run out of time. operation: which; None: the one that main waits in."""
        if operation is None:
            operation = f"{pending_operation() or 'an operation'}, with main at {self.pulse().partition('|')[2]}"
        self._key("late", self.launch.rank, operation)
        return self._await_news(heartbeat.PATIENCE) or self._blame()

    def _silent(self) -> News | None:
        """Somebody has closed his connections, and nobody near him has seen why: who gives no sign of life since?"""
        ranks = [rank for rank in range(self.launch.size) if rank != self.launch.rank and not self.has("left", rank)]
        before = {rank: self._pulse(rank) for rank in ranks}
        news = self._await_news(2.5 * heartbeat.PULSE_SECONDS)
        gone = [rank for rank in ranks if self._pulse(rank) == before[rank]]
        gone = [rank for rank in gone if not self.phase_of(rank)] or gone
        if news is not None or not gone:
            return news
        named = ", ".join(self.describe(rank) for rank in gone[:4]) + f" and {len(gone) - 4} more" * (len(gone) > 4)
        step = max(self.step, self.pulse_of(gone[0])[0])
        return News(
            f"error: {named} closed all connections and is gone, {when(step)}", 1, gone[0], self.launch.rank, step
        )

    def _blame(self) -> News:
        """The ranks that did not come to a collective operation: those that are neither late, as this one, nor done."""
        assert self._store is not None
        absent = [
            rank
            for rank in range(self.launch.size)
            if not any(self._store.check([self.name(state, rank)]) for state in ("late", "left"))
        ]
        steps = {rank: self.pulse_of(rank) for rank in range(self.launch.size)}
        if not absent:  # all wait, for different things: those that are behind
            absent = [rank for rank in steps if steps[rank][0] == min(step for step, _ in steps.values())]
        named = [f"{self.describe(rank)}, {when(steps[rank][0])}, at {steps[rank][1]}" for rank in absent[:4]] + [
            f"{len(absent) - 4} more"
        ] * (len(absent) > 4)
        waiting = next((rank for rank in steps if self.has("late", rank)), None)
        late = "" if waiting is None else self._store.get(self.name("late", waiting)).decode()
        operation = f"; they waited in {late}" if late else ""
        message = f"error: the others waited in vain for {'; '.join(named)}{operation}"
        return News(message, 1, absent[0], self.launch.rank, steps[absent[0]][0])

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """torchrun ends the others when one is gone: then the watch has news, and is quicker than this."""
        time.sleep(2 * LOOK_SECONDS)
        self._told(number, frame)

    def _told(self, number: int, frame: FrameType | None) -> NoReturn:
        """Raise, and remember: libraries under way may swallow what is raised."""
        self.stop_signal = number
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    def name(self, kind: str, which: object = None) -> str:
        """A key of this attempt's in the store."""
        key = f"octet/{self.launch.attempt}/{kind}"
        return key if which is None else f"{key}/{which}"

    def _key(self, kind: str, which: object, value: str) -> None:
        assert self._store is not None
        self._store.set(self.name(kind, which), value)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _connect(launch: Launch, listening: int | None = None, seconds: float = 60.0) -> "TCPStore":
    """The job's store. torchrun serves it; without torchrun rank 0 does, on the socket where it is `listening`."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        launch.address,
        launch.port,
        is_master=listening is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listening,
    )
