"""Ranks without torchrun: what happens to one before all have met is named within a minute, and ends all.

Two ranks run this file as a program: FAULT RANK FILE; the fault befalls one of them before it meets the other. FILE:
what "slow end" waits for.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ports import free_port

from precision.errors import UserError
from trainer.launch.command_line import guarded
from trainer.launch.launcher import Launch
from trainer.launch.liveness import heartbeat, lobby
from trainer.launch.liveness.exit_report import this_process
from trainer.launch.liveness.job_store import JobStore
from trainer.launch.liveness.rank_group import RankGroup
from trainer.launch.world import init

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def late(function: Callable[..., Any]) -> Any:
    """The function, which returns three seconds after its work."""

    def call(*args: Any) -> Any:
        result = function(*args)
        time.sleep(3)
        return result

    return call


def main() -> int:
    """Exit code, as of train.py."""
    rank_group = RankGroup()
    fault, who = sys.argv[1], int(sys.argv[2])
    # short where something is waited for in vain; elsewhere a loaded machine may take its time
    heartbeat.PULSE_SECONDS, heartbeat.SILENCES = 0.5, 6 if fault == "SIGSTOP" else 240
    met = fault in ("refused", "refused late", "mistake", "import") and (fault, who) != ("refused", 1)
    heartbeat.PATIENCE = 20.0 if met else 2.0
    if fault == "none":
        lobby.RANK_0_SECONDS = 4.0

    def run() -> None:
        launch = rank_group.join(os.environ)
        if fault == "mistake" and who in (launch.rank, 2):
            raise UserError("optim.lr=9: too large; lower it")
        if launch.rank == who:
            time.sleep(1)
            if fault == "import":
                import no_such_module  # noqa: F401 # pyright: ignore[reportMissingImports]
            if fault == "leave":
                raise SystemExit(0)
            if fault in ("SIGKILL", "SIGSTOP"):
                os.kill(os.getpid(), signal.Signals[fault])
            if fault == "slow":
                time.sleep(2.5)
        world = init(torch.device("cpu"), rank_group, 60)
        assert world.gather(launch.rank) == [0, 1]
        if fault == "slow end" and launch.rank == who:
            try:
                raise KeyError("x")
            except KeyError as error:
                rank_group.announce(error)
                while not Path(sys.argv[3]).exists():  # as W&B may
                    time.sleep(0.05)
                raise
        if fault == "refused late":
            if launch.rank == 0:
                time.sleep(1)
            else:
                JobStore.post = late(JobStore.post)
        if fault.startswith("refused") and who in (launch.rank, 2):
            raise UserError("optim.lr=9: too large; lower it")
        world.barrier()
        rank_group.leave()

    return guarded(run, rank_group)


class Pair:
    """Two ranks, or those of them that are started."""

    def __init__(self, programs: Any, released: Path) -> None:
        self._port = str(free_port())
        self._programs, self.ranks, self.released = programs, {}, released

    def start(self, fault: str, who: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port}
            words = {key: str(value) for key, value in place.items()}
            self.ranks[rank] = self._programs.start(__file__, fault, who, self.released, environment=words)

    def end(self, rank: int) -> tuple[int, str]:
        """Exit code, and stderr without numbers of processes."""
        err = self.ranks[rank].communicate(240)[1]
        blank = re.sub(r"process \d+", "process N", err).replace(os.uname().nodename, "HOST")
        return self.ranks[rank].returncode, blank


@pytest.fixture
def pair(programs: Any, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(programs, tmp_path / "released")
    yield made
    for rank in made.ranks.values():
        rank.kill()


def test_ranks_meet_however_late_one_of_them_is(pair: Pair) -> None:
    pair.start("slow", 0)
    assert [pair.end(rank) for rank in (0, 1)] == [(0, "")] * 2


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("fault", "how"),
    [("SIGKILL", "(was killed by SIGKILL.*|has died)"), ("SIGSTOP", "has been unresponsive for 3 s .*")],
)
def test_one_that_dies_or_stops_is_named_by_the_other(pair: Pair, who: int, fault: str, how: str) -> None:
    pair.start(fault, who)
    code, err = pair.end(1 - who)
    assert code == 1
    assert re.fullmatch(
        rf"octet: error: rank {who} \(HOST, process N\) {how}, before all ranks had connected\n", err
    ), err


@pytest.mark.parametrize("who", [0, 1])
def test_a_missing_import_keeps_its_traceback_and_ends_all(pair: Pair, who: int) -> None:
    pair.start("import", who)
    code, err = pair.end(who)
    assert code == 1 and "ModuleNotFoundError: No module named 'no_such_module'" in err and f"on rank {who}" in err
    assert pair.end(1 - who) == (1, "")


@pytest.mark.parametrize("who", [1, 2])
def test_a_mistake_is_reported_once(pair: Pair, who: int) -> None:
    """Of one rank, or (2) of both: then rank 0 says it."""
    pair.start("mistake", who)
    said = {rank: pair.end(rank) for rank in (0, 1)}
    line = "octet: error: optim.lr=9: too large; lower it\n"
    assert said == {who % 2: (2, line), 1 - who % 2: (2, "")}


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_mistake_that_is_found_when_all_have_met_is_one_line(pair: Pair, who: int) -> None:
    """Rank 0, which serves the store, goes last: the other one would print pages about losing it. It names the other
    one for what it has not found itself, as a file may be missing on one node."""
    pair.start("refused", who)
    said = {rank: pair.end(rank) for rank in (0, 1)}
    whose = "rank 1 (HOST, process N) failed before its first step: " if who == 1 else ""
    assert said == {0: (2, f"octet: error: {whose}optim.lr=9: too large; lower it\n"), 1: (2, "")}


def test_rank_0_serves_the_store_until_the_rank_that_failed_first_has_seen_the_end(pair: Pair) -> None:
    pair.start("refused late", 2)
    said = {rank: pair.end(rank) for rank in (0, 1)}
    assert said == {0: (2, "octet: error: optim.lr=9: too large; lower it\n"), 1: (2, "")}


def test_one_that_leaves_ends_all(pair: Pair) -> None:
    pair.start("leave", 1)
    code, err = pair.end(0)
    assert (code, err) == (1, "octet: error: rank 1 (HOST, process N) has ended, before all ranks had connected\n")


def test_rank_0_that_never_comes_is_named_and_the_wait_hears_a_signal(pair: Pair) -> None:
    pair.start("none", 0, ranks=(1,))
    waits = pair.ranks[1]
    pair.start("none", 0, ranks=(1,))
    time.sleep(2)
    pair.ranks[1].send_signal(signal.SIGINT)
    assert pair.end(1)[0] == 128 + signal.SIGINT
    pair.ranks[1] = waits
    code, err = pair.end(1)
    assert code == 1 and re.match(
        r"octet: error: rank 0 did not answer at 127\.0\.0\.1:\d+ within 4 s \(Connection ", err
    ), err


@pytest.mark.parametrize("who", [0, 1])
def test_the_others_do_not_wait_for_what_a_failed_rank_puts_away(pair: Pair, who: int) -> None:
    pair.start("slow end", who)
    line = f"octet: error: rank {who} (HOST, process N) failed before its first step: KeyError: 'x'\n"
    code, err = pair.end(1 - who)
    time.sleep(1)  # two looks of its heartbeat, which finds no store if rank 0 has ended
    assert pair.ranks[who].poll() is None  # it still puts things away
    pair.released.touch()
    assert code == 1 and pair.end(who)[0] == 1
    # rank 0 has the screen; rank 1, whose store has ended with rank 0 by now, may say it again
    screen, other = (err, "") if who else (pair.end(0)[1], err)
    assert screen.count(line) == 1 and "Traceback" in screen and line not in other


def heartbeat_of(monkeypatch: pytest.MonkeyPatch, gone: list[Any], **keys: str) -> heartbeat.Heartbeat:
    """Of rank 0, over rank 1, with a store of these keys; ranks that it takes for dead are added to `gone`."""
    launch = Launch(size=2, local_size=2)
    held = {f"octet/{launch.attempt}/{key}": value.encode() for key, value in keys.items()}
    store = SimpleNamespace(check=lambda names: names[0] in held, get=held.__getitem__)
    beat = heartbeat.Heartbeat(cast(Any, SimpleNamespace(launch=launch)), JobStore(launch, cast(Any, store)))
    monkeypatch.setattr(beat, "_gone", lambda rank, process, descriptor: gone.append(rank))
    monkeypatch.setattr(beat, "_end", lambda rank, how: gone.append(how))
    return beat


@pytest.mark.parametrize(
    ("phase", "looks", "why"), [("", 9, " 45 s (is its node"), ("compiling", 120, " 600 s, while c")]
)
def test_silence_in_a_phase_is_no_death(monkeypatch: pytest.MonkeyPatch, phase: str, looks: int, why: str) -> None:
    gone: list[Any] = []
    beat = heartbeat_of(monkeypatch, gone, **{"pulse/1": "7|3|here", "phase/1": phase})
    for _ in range(looks):
        beat._check_pulses()
    assert gone == []
    beat._check_pulses()
    assert len(gone) == 1 and f"has been unresponsive for{why}" in gone[0]


def test_a_number_of_a_process_means_nothing_in_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour in another container, whose process number is unused here, is not gone."""
    host, _, namespace = this_process()
    gone: list[Any] = []
    heartbeat_of(monkeypatch, gone, **{"who/1": f"{host} 999999999 pid:[1]"})._meet()
    assert gone == []
    heartbeat_of(monkeypatch, gone, **{"who/1": f"{host} 999999999 {namespace}"})._meet()
    assert gone == [1]


if __name__ == "__main__":
    sys.exit(main())
