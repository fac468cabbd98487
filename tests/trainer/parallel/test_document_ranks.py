"""Ranks that share a model stay within documents as one process does: the same losses, in training and evaluation.

Two ranks run this file as a program, over gloo.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from composed import config_of
from ranks import joined
from run_lines import metrics
from small import SMALL

from trainer.trainer import Trainer

RUN = [*SMALL, "precision=fp32", "precision.backend=reference", "trainer.document_masking=true", "health.every=0"]
RUN += ["model.num_mtp_layers=2", "trainer.max_steps=3", "recompute=full"]
RANKS = 2


def keys(folder: Path, name: str) -> list[str]:
    places = [f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder}"]
    return [*RUN, *places, f"run.name={name}"]


def main(folder: Path) -> None:
    with joined() as world:
        Trainer(config_of([*keys(folder, "two"), "parallel=fsdp"]), [], world).train()


def losses(run: Path) -> list[dict[str, float]]:
    return [{key: value for key, value in line.items() if key.startswith("loss/")} for line in metrics(run)]


def test_document_masks_on_two_ranks_equal_one(tmp_path: Path, start_ranks: Callable[..., None]) -> None:
    """Documents of a few words, so that they are cut off from each other in every sequence."""
    (tmp_path / "corpus").mkdir()
    for i in range(100):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"number {i} has a friend, {i + 1}")
    whole = [*keys(tmp_path, "one"), "trainer.microbatch_size=4"]  # of which each rank of two has a half
    one = losses(Trainer(config_of(whole)).train().folder)
    start_ranks(__file__, RANKS, tmp_path)
    two = losses(tmp_path / "two")
    assert len(one) == len(two) == 4 and "loss/validation" in one[-1]
    for alone, shared in zip(one, two, strict=True):
        assert shared == pytest.approx(alone, rel=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
