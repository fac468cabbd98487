"""Each token is a target exactly once an epoch, whatever happens to the processes that read it.

With the loader alone many runs are played: read ahead, saved now and then, killed at random, resumed on another number
of ranks. And one is a real run: one process, two, one, killed with SIGKILL in the middle of random steps. What counts
there is what reached the model, in steps whose weights live on: one that was lost with its process is read again.

Real runs are this file as a program.
"""

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composed import config_of
from ports import free_port
from small import SMALL, steady
from torch import Tensor

from trainer.data import Bins, Loader

S, BATCH, STEPS = 24, 4, 26
RUN = [*SMALL, "precision=fp32", "trainer.microbatch_size=1", "checkpoint.every=3", "model.num_layers=1"]
RUN += ["model.num_mtp_layers=0", "model.vocab_size=257", "data.tokenizer_sample_mb=1", f"trainer.max_steps={STEPS}"]
RUN += ["run.name=run", "run.resume=auto", "health.every=0", "logging.every=100", "recovery.max_consecutive_skips=0"]
KILLED = -signal.SIGKILL


# ------------------------------------------------------------------------------------------------ with the loader alone


@pytest.mark.parametrize("seed", range(2))
def test_loaders_that_are_killed_and_resumed_on_other_world_sizes(bins: Bins, seed: int) -> None:
    """Four epochs. A run is a state that is saved; what was read since then dies with the processes."""
    chance = random.Random(seed)
    loader = Loader(bins, steady(16, 12), seed)
    saved, seen, total = loader.state_dict(), list[Tensor](), 4 * loader.num_windows // 12
    kept = deaths = 0  # steps whose reading counts
    while kept < total:
        world = chance.choice([1, 2, 3, 4, 6])
        ranks = [Loader(bins, steady(16, 12), seed, ahead=chance.choice([0, 2])) for _ in range(world)]
        for each in ranks:
            each.load_state_dict(saved)
        del seen[kept:]
        for _ in range(min(chance.randrange(1, 12), total - kept)):
            seen.append(torch.cat([each.next(rank, world)[:, 1:] for rank, each in enumerate(ranks)]))
            if chance.random() < 0.3 or len(seen) == total:
                saved, kept = ranks[-1].state_dict(), len(seen)
        for each in ranks:
            each.close()
        deaths += 1
    assert deaths > 8
    targets = torch.cat(seen)
    count = 12 * total // loader.num_windows  # whole epochs
    for epoch in range(count):
        once = targets[epoch * loader.num_windows : (epoch + 1) * loader.num_windows]
        assert Counter(once.flatten().tolist()) == Counter(range(1, loader.num_windows * 16 + 1))


# --------------------------------------------------------------------------------------------------------- real runs


def main(folder: Path, attempt: str, last_step: int, microbatch: int, milliseconds: int) -> None:
    """A rank of a run. It logs each microbatch that reaches the model, and dies in a step, or does not (0)."""
    from trainer.launch.world import World
    from trainer.trainer import Trainer

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if size > 1:
        torch.distributed.init_process_group("gloo")
    share = ["parallel=fsdp"] if size > 1 else []
    places = [f"data.path={folder}/corpus", f"data.cache_dir={folder}/cache", f"run.dir={folder}/runs"]
    trainer = Trainer(config_of([*RUN, *places, *share]), [], World(torch.device("cpu"), rank, rank, size, size))
    engine, run = trainer.run.engine, trainer.run.engine.microbatch
    log = (folder / f"seen-{attempt}-{rank}").open("w")
    log.write(f"{trainer.step}\n")

    class Noted:
        def __call__(self, tokens: Tensor, index: int, count: int) -> Any:
            log.write(json.dumps([trainer.step, tokens.tolist()]) + "\n")
            log.flush()
            if (trainer.step, index) == (last_step, microbatch % count):
                threading.Timer(milliseconds / 1e3, os.kill, (os.getpid(), signal.SIGKILL)).start()
                if not milliseconds:
                    os.kill(os.getpid(), signal.SIGKILL)
            return run(tokens, index, count)

        def release(self) -> None:
            run.release()

        def forget(self) -> None:
            run.forget()

    engine.microbatch = Noted()
    trainer.train()
    log.close()
    if rank == 0:
        truth = trainer.run.data.train
        windows = truth.gather(np.arange(truth.num_windows(S)), S)
        (folder / "truth").write_text(json.dumps(windows.tolist()))


def lives(folder: Path, attempts: int) -> list[list[list[int]]]:
    """Batches by step, from the attempts whose steps live on: the last one that did each."""
    steps: dict[int, list[list[int]]] = {}
    for attempt in range(attempts):
        logs = [path.read_text().splitlines() for path in sorted(folder.glob(f"seen-{attempt}-*"))]
        first = int(logs[0][0])
        assert {int(log[0]) for log in logs} == {first}
        assert all(step in steps for step in range(1, first + 1))
        steps = {step: rows for step, rows in steps.items() if step <= first}
        for entry in (json.loads(line) for log in logs for line in log[1:]):
            steps.setdefault(entry[0], []).extend(entry[1])
    return [steps[step] for step in sorted(steps)]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are killed")
def test_a_run_that_is_killed_and_resumed_on_one_two_and_one_process(tmp_path: Path, programs: Any) -> None:
    chance = random.Random()
    (tmp_path / "corpus").mkdir()
    for i in range(10):
        text = "".join(chance.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(chance.randrange(50, 250)))
        (tmp_path / "corpus" / f"{i}.txt").write_text(text)
    plan = [(1, chance.randrange(5, 8)), (2, chance.randrange(12, 18)), (1, 0)]
    for attempt, (size, last) in enumerate(plan):
        how = (attempt, last, chance.randrange(4), chance.choice([0, 5, 50]) if size == 1 else 0)
        ended = start(programs, size, tmp_path, *how)
        expected = [KILLED if last else 0] * size
        errors = [rank.communicate()[1] for rank in ended]
        assert [rank.returncode for rank in ended] == expected, [plan, *(error[-2000:] for error in errors)]
    steps = lives(tmp_path, len(plan))
    assert [len(rows) for rows in steps] == [BATCH] * STEPS
    windows = {tuple(window): number for number, window in enumerate(json.loads((tmp_path / "truth").read_text()))}
    seen = [windows[tuple(row)] for rows in steps for row in rows]
    epochs, rest = divmod(len(seen), len(windows))
    assert len(seen) > len(windows), "over more than an epoch"
    for epoch in range(epochs):
        assert Counter(seen[epoch * len(windows) : (epoch + 1) * len(windows)]) == Counter(range(len(windows)))
    assert max(Counter(seen[len(seen) - rest :]).values(), default=1) == 1


def start(programs: Any, size: int, folder: Path, *how: int) -> list[Any]:
    """This file as a program in so many processes."""
    place = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(size), "MASTER_PORT": str(free_port())}
    who = [place | {"RANK": str(rank)} for rank in range(size)]
    return [programs.start(__file__, folder, *how, environment=environment) for environment in who]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
