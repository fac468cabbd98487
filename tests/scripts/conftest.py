"""Small runs for the scripts that read them."""

from pathlib import Path

import pytest
from composed import config_of
from small import SMALL_MODEL

from trainer.trainer import Trainer

SMALL = [
    *SMALL_MODEL,
    *("trainer.device=cpu", "trainer.global_batch_size=4", "trainer.microbatch_size=4", "trainer.sequence_length=24"),
    *("optim.warmup_steps=2", "eval.batches=1", "eval.every=0", "logging.every=1", "logging.console.enabled=false"),
    *("data=text", "data.validation_fraction=0.05", "health.every=0", "checkpoint.keep=0"),
]


class SmallRuns:
    """Trains small models in folders."""

    words = SMALL
    """Arguments of train.py, without folders."""

    @staticmethod
    def write(folder: Path, files: int = 6, words: int = 120, end: str = "\n") -> Path:
        """Some text, always the same: FOLDER/text."""
        text = folder / "text"
        text.mkdir()
        for i in range(files):
            lines = (f"def f{i * j % 17}(x): return x + {j}{end}" for j in range(words))
            (text / f"file{i}.txt").write_text(" ".join(lines))
        return text

    @staticmethod
    def train(folder: Path, name: str, *keys: str) -> Path:
        """FOLDER/NAME, a run on FOLDER/text."""
        places = [f"data.path={folder / 'text'}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder}"]
        config = config_of([*SMALL, *places, f"run.name={name}", *keys])
        return Trainer(config).train().folder


@pytest.fixture(scope="session")
def small_runs() -> type[SmallRuns]:
    return SmallRuns
