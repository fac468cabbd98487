"""The lobby, where ranks started without torchrun (srun, mpirun, by hand) meet, from their first second on.

The job's store starts late: importing torch takes seconds, and a rank that waits for it in C++ cannot react. So rank 0
(`LobbyServer`) listens at MASTER_ADDR:MASTER_PORT before it imports anything large, and each other rank (`LobbyClient`)
holds a connection to it. Both send messages as lines of JSON, and an empty line every 5 seconds:

    both    {"bye": 1}                                  it ends normally
    client  {"who": [rank, host, process, namespace]}   once connected
            {"connected": 1}                            it is in the store, and the heartbeat has taken over
            {"failed": message, "code": code}           it ends, and asks whether to report the reason
    server  {"hello": [host, process, namespace]}       once connected
            {"open": 1}                                 the store is served (on the same listening socket)
            {"failure": message, "code": code}          why the job ends: the client ends silently
            {"say": true}                               answer to `failed`; false: rank 0 reports the same

A process that dies closes its connection; one that stops or loses its node is silent. Either is named within a minute.
"""

import atexit
import contextlib
import errno
import json
import selectors
import socket
import threading
import time
from typing import Any, Protocol

from precision.errors import RunError, listed
from trainer.launch.launcher import Launch
from trainer.launch.liveness import heartbeat
from trainer.launch.liveness.exit_report import describe_exit, this_process

RANK_0_SECONDS = 60.0
"""Seconds that a rank waits for rank 0 to listen."""
ALL_SECONDS = 300.0
"""Seconds that rank 0 waits for the others. It prints the missing ranks after `SAY_SECONDS`."""
SAY_SECONDS = 30.0
SAME_SECONDS = 2.0
"""Seconds that ranks with the same mistake wait for each other, so that only one reports it."""
_LOOK_SECONDS = 0.1  # interval of checks for messages
_LONGEST = 1 << 16


class OnEnd(Protocol):
    """Ends the job from a thread. rank: the one it is about; say: whether this process reports `message`."""

    def __call__(self, message: str, code: int, rank: int, say: bool) -> None: ...


def enter(launch: Launch, on_end: OnEnd) -> "LobbyServer | LobbyClient":
    """Start this rank's part."""
    lobby = LobbyServer(launch, on_end) if launch.is_first else LobbyClient(launch, on_end)
    lobby.start()
    return lobby


class _Connection:
    """A connection and its peer."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.rank, self.process = connection, -1, ["?", 0, ""]
        self.last_received = time.monotonic()
        self._rest = b""
        connection.settimeout(heartbeat.PATIENCE)

    def send(self, **what: Any) -> None:
        """Send a line; without arguments a pulse. Errors are ignored: reading finds the reason."""
        with contextlib.suppress(OSError):
            self.socket.sendall((json.dumps(what) if what else "").encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """Return received messages; None if the peer has closed, or is not one of ours."""
        try:
            data = self.socket.recv(_LONGEST)
            *lines, self._rest = (self._rest + data).split(b"\n")
            found = [json.loads(line) for line in lines if line]
        except (OSError, ValueError, RecursionError):
            return None
        self.last_received = time.monotonic()
        good = data and len(self._rest) < _LONGEST and all(isinstance(each, dict) for each in found)
        return found if good else None

    def describe_end(self) -> str:
        """Describe what happened to the peer's process."""
        here = this_process()
        if self.process[0] == here[0] and self.process[2] == here[2]:
            return describe_exit(int(self.process[1]), None)
        return "has died"

    def is_silent(self) -> bool:
        return time.monotonic() - self.last_received > heartbeat.SILENCES * heartbeat.PULSE_SECONDS

    def name(self) -> str:
        """`rank 1 (host, process 123)`."""
        return f"rank {self.rank} ({self.process[0]}, process {self.process[1]})"


_SILENT = "has been unresponsive for {:.0f} s (is it stopped, or its node lost?)"
_BEFORE = "before all ranks had connected"


class _Lobby(threading.Thread):
    def __init__(self, launch: Launch, on_end: OnEnd) -> None:
        super().__init__(name="lobby", daemon=True)
        self._launch, self._on_end = launch, on_end
        self._place = f"{launch.address}:{launch.port}"
        self._verdict: str | None = None  # why main of this rank ends, if it does
        self._over = False
        self._beat = 0.0
        atexit.register(self.leave)

    def leave(self) -> None:
        """This process ends normally."""
        raise NotImplementedError

    def _is_due(self) -> bool:
        """Return whether to send a pulse now."""
        if time.monotonic() < self._beat:
            return False
        self._beat = time.monotonic() + heartbeat.PULSE_SECONDS
        return True

    def _silent(self) -> str:
        return _SILENT.format(heartbeat.SILENCES * heartbeat.PULSE_SECONDS)


class LobbyServer(_Lobby):
    """Rank 0's part."""

    def __init__(self, launch: Launch, on_end: OnEnd) -> None:
        super().__init__(launch, on_end)
        self._connections: list[_Connection] = []
        self._connected: set[int] = set()
        self._left: list[_Connection] = []
        self._waits = False
        self._asked: list[tuple[_Connection, str, int, float]] = []
        self._failure: tuple[str, int] | None = None
        self._closing = threading.Event()  # main needs the listening socket
        self._closed = threading.Event()
        self._listening = _listen(launch.port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, None)

    def wait_for_ranks(self) -> int:
        """Return the listening socket, for the store, when all ranks are connected. Raises RunError after a timeout."""
        began, is_printed, self._waits = time.monotonic(), False, True
        while missing := set(range(1, self._launch.size)) - self._connected:
            waited = time.monotonic() - began
            who = f"rank{'s' if len(missing) > 1 else ''} {listed(sorted(missing), 8)}"
            if waited > ALL_SECONDS:
                why = f"did not connect to {self._place} within {ALL_SECONDS:.0f} s"
                raise RunError(f"{who} {why}; start as many ranks as WORLD_SIZE")
            if waited > SAY_SECONDS and not is_printed:
                print(f"octet: waiting at {self._place} for {who}", flush=True)
                is_printed = True
            time.sleep(_LOOK_SECONDS / 4)
        self._closing.set()
        self._closed.wait()
        return self._listening.detach()

    def opened(self) -> None:
        """Announce that the store is served."""
        for connection in list(self._connections):
            connection.send(open=1)

    def leave(self) -> None:
        """This process ends normally."""
        self._over = True
        for connection in list(self._connections):
            connection.send(bye=1)

    def decide(self, message: str, code: int) -> bool:
        """Send the reason of main's end to all. Return whether this rank prints it."""
        self._verdict = message
        self._report(message, code)
        deadline = time.monotonic() + SAME_SECONDS
        while len(self._connected) < self._launch.size - 1 and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        time.sleep(2 * _LOOK_SECONDS)
        return True

    def _report(self, message: str, code: int) -> None:
        self._failure = message, code
        for connection in list(self._connections):
            connection.send(failure=message, code=code)
        time.sleep(2 * _LOOK_SECONDS)  # until they have read it: unread data may vanish with the connection

    def run(self) -> None:
        """Run until all have left."""
        while not self._over:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
            if self._closing.is_set() and not self._closed.is_set():
                self._selector.unregister(self._listening)
                self._closed.set()
            self._answer()
            if self._waits and self._left:
                self._lost(self._left.pop(), "has ended")
            due = self._is_due()
            for connection in list(self._connections):
                if due:
                    connection.send()
                if connection.rank > 0 and connection.is_silent():
                    self._lost(connection, self._silent())
            if self._closed.is_set() and not self._connections and not self._left:
                return

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection = _Connection(self._listening.accept()[0])
            connection.send(hello=this_process())
            self._connections.append(connection)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        messages = connection.read()
        for message in messages or []:
            if "who" in message:
                connection.rank, *connection.process = message["who"]
                self._connected.add(connection.rank)
                if self._failure is not None:
                    connection.send(failure=self._failure[0], code=self._failure[1])
            elif "failed" in message:
                deadline = time.monotonic() + SAME_SECONDS
                self._asked.append((connection, str(message["failed"]), int(message["code"]), deadline))
            elif "bye" in message or "connected" in message:
                self._left += [connection] if "bye" in message else []
                self._forget(connection)
                return
        if messages is None:
            asked = any(connection is each for each, *_ in self._asked)
            self._forget(connection)
            if connection.rank > 0 and not asked:
                self._lost(connection, connection.describe_end())

    def _forget(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _answer(self) -> None:
        """Let one of the failing ranks report the reason."""
        for connection, message, code, deadline in list(self._asked):
            if self._verdict is not None:
                connection.send(say=self._verdict != message)
                self._asked.clear()
            elif time.monotonic() > deadline:
                connection.send(say=True)
                self._report(message, code)
                self._on_end(message, code, connection.rank, False)
                return

    def _lost(self, connection: _Connection, how: str) -> None:
        if self._verdict is None:
            message = f"error: {connection.name()} {how}, {_BEFORE}"
            self._report(message, 1)
            self._on_end(message, 1, connection.rank, True)


class LobbyClient(_Lobby):
    """The part of any other rank."""

    def __init__(self, launch: Launch, on_end: OnEnd) -> None:
        super().__init__(launch, on_end)
        self._connection: _Connection | None = None
        self._open = threading.Event()
        self._say: bool | None = None
        self._why = "nothing answers there"
        self._began = time.monotonic()

    def wait_until_open(self) -> None:
        """Return when the store is served. Raises RunError if rank 0 is missing."""
        while not self._open.wait(_LOOK_SECONDS):
            if self._over:
                raise RunError(
                    f"rank 0 at {self._place} ended before all ranks had connected; start all with one command"
                )
            if self._connection is None and time.monotonic() - self._began > RANK_0_SECONDS:
                why = f"did not answer at {self._place} within {RANK_0_SECONDS:.0f} s ({self._why})"
                raise RunError(f"rank 0 {why}; see its output, or correct MASTER_ADDR and MASTER_PORT")

    def leave(self) -> None:
        """This process ends normally."""
        self._leave("bye")

    def connected(self) -> None:
        """The heartbeat has taken over."""
        self._leave("connected")

    def _leave(self, how: str) -> None:
        was_over, self._over = self._over, True  # before rank 0 closes the connection, which is then no failure
        if self._connection is not None and not was_over:
            self._connection.send(**{how: 1})

    def decide(self, message: str, code: int) -> bool:
        """Return whether this rank reports the reason of main's end."""
        self._verdict, asked = message, False
        deadline = time.monotonic() + 2 * SAME_SECONDS
        while self._say is None and self.is_alive() and time.monotonic() < deadline:
            if self._connection is None and time.monotonic() > deadline - SAME_SECONDS:
                break
            if self._connection is not None and not asked:
                self._connection.send(failed=message, code=code)
                asked = True
            time.sleep(_LOOK_SECONDS / 4)
        return self._say is not False

    def run(self) -> None:
        """Run until `leave`."""
        while self._connection is None and not self._over:
            try:
                self._connection = _Connection(socket.create_connection((self._launch.address, self._launch.port), 5))
                self._connection.send(who=[self._launch.rank, *this_process()])
            except OSError as error:
                self._why = error.strerror or str(error)
                time.sleep(_LOOK_SECONDS)
        connection = self._connection
        while connection is not None and not self._over:
            with selectors.DefaultSelector() as selector:
                selector.register(connection.socket, selectors.EVENT_READ)
                messages = connection.read() if selector.select(_LOOK_SECONDS) else []
            if self._is_due():
                connection.send()
            for message in messages or []:
                self._take(connection, message)
            if messages is None or connection.is_silent():
                if self._verdict is None and not self._over:
                    self._lost(connection, connection.describe_end() if messages is None else self._silent())
                return

    def _take(self, connection: _Connection, message: dict[str, Any]) -> None:
        if "hello" in message:
            connection.rank, connection.process = 0, message["hello"]
        elif "open" in message:
            self._open.set()
        elif "bye" in message:
            self._over = True
        elif "say" in message:
            self._say = bool(message["say"])
        elif "failure" in message and self._verdict is not None:
            self._say = message["failure"] != self._verdict if self._say is None else self._say
        elif "failure" in message and not self._over:
            self._on_end(str(message["failure"]), int(message["code"]), 0, False)

    def _lost(self, connection: _Connection, how: str) -> None:
        # without rank 0 no one chooses the reporting rank: one of each node reports, and rank 1
        first = self._launch.local_rank == 0 or self._launch.rank == 1
        name = connection.name() if connection.rank == 0 else f"rank 0 ({self._launch.address}:{self._launch.port})"
        self._on_end(f"error: {name} {how}, {_BEFORE}", 1, 0, first)


def _listen(port: int) -> socket.socket:
    """Listen at all addresses. Raises RunError if another program does."""
    deadline = time.monotonic() + heartbeat.PATIENCE  # it may be just ending, after an earlier run
    while True:
        try:
            try:
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                return socket.create_server(("", port), backlog=4096)
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or error
                raise RunError(f"MASTER_PORT={port}: rank 0 cannot listen there ({why}); set another") from None
            time.sleep(_LOOK_SECONDS)
