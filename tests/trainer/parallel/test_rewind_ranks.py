"""Ranks climb the ladder together: the same verdicts, the same checkpoint, the same data left out.

Two ranks run this file as a program, over gloo.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composed import config_of
from ranks import joined
from run_lines import events, metrics
from small import SMALL, write_corpus

from trainer.step.guard import TrainingStopped
from trainer.trainer import Trainer

RUN = [*SMALL, "precision=fp32", "precision.backend=reference", "trainer.microbatch_size=2", "parallel=fsdp"]
RUN += ["run.name=run", "trainer.max_steps=9", "checkpoint.every=2", "recovery.max_consecutive_skips=1"]
RUN += ["recovery.spikes.enabled=true", "recovery.spikes.window=4", "recovery.spikes.min_steps=2", "health.every=0"]
RUN += ["data.validation_fraction=0.05", "model.num_mtp_layers=0"]
WINDOWS = range(16, 24)  # steps 5 and 6
RANKS = 2


def main(folder: Path) -> None:
    """Only rank 1's loss is spoilt: a spike in the first of two bad steps, not finite in the second one."""
    with joined() as world:
        places = [f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder}"]
        inject = "debug.inject={step: 1, steps: 99, where: loss, value: 1e6, windows: [16, 24]}"
        trainer = Trainer(config_of([*RUN, *places, inject]), [], world)
        parts, engine = trainer.run, trainer.run.engine
        assert engine.injector is not None
        spoilt, values = engine.injector.loss, iter([1e6, float("nan")])

        def loss(loss: torch.Tensor) -> torch.Tensor:
            return loss * next(values) if world.rank == 1 and spoilt(torch.ones(())) > 1 else loss

        engine.microbatch._run._spoil = loss  # type: ignore[attr-defined]
        trainer.train()
        state = [
            parts.loader.state_dict(),
            int(engine.guard.committed),
            float(engine.optimizer.norms(torch.tensor(True))[0]),
        ]
        assert len(set(map(str, world.gather(state)))) == 1, "the same on every rank"
        assert parts.loader.state_dict()["left_out"] == [[WINDOWS.start, WINDOWS.stop]]
        stopped = Trainer(config_of([*RUN, *places, "run.name=stopped", "recovery.rewind.max=0", inject]), [], world)
        with pytest.raises(TrainingStopped, match="2 steps in a row skipped"):
            stopped.train()
        (folder / f"stopped{world.rank}").touch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, start_ranks: Callable[..., None]) -> Path:
    """What two ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    write_corpus(folder / "corpus", 120)
    start_ranks(__file__, RANKS, folder)
    return folder


def test_a_fault_on_one_rank_rewinds_all(folder: Path) -> None:
    found = events(folder / "run", "spike", "nonfinite", "rollback")
    assert [(event["kind"], event["step"]) for event in found] == [("spike", 5), ("nonfinite", 6), ("rollback", 6)]
    rollback = found[-1]
    assert rollback["to"] == 4 and rollback["windows"] == [[WINDOWS.start, WINDOWS.stop]]
    steps = [line["step"] for line in metrics(folder / "run")]
    assert sorted(set(steps)) == list(range(1, 10)) == sorted(steps)[:-1]


def test_all_ranks_stop_if_a_rewind_does_not_help(folder: Path) -> None:
    assert (folder / "stopped0").exists() and (folder / "stopped1").exists()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
