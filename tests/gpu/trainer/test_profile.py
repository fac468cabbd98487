"""On a GPU the profiler's window holds kernels, and the memory snapshot is one that torch's viewer reads."""

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.config import Config
from trainer.trainer import Trainer

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("graph", ["false", "true"])
def test_trace_and_snapshot(config: Callable[..., Config], tmp_path: Path, graph: str) -> None:
    places = f"data.path={ROOT / 'src'}", f"data.cache_dir={tmp_path / 'data'}", f"run.dir={tmp_path / 'runs'}"
    made = config(
        "+recipe=fp8_delayed", "data=text", "data.glob='**/*.py'", *places, f"cuda_graph={graph}",
        "model.vocab_size=512", "trainer.max_steps=4", "checkpoint.every=0", "eval.every=0", "profile.steps=[3,4]",
        "logging.console.enabled=false",
    )  # fmt: skip
    folder = Trainer(made).train().folder / "profile"
    with gzip.open(folder / "trace_step3-4.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert {"step 3", "step 4"} <= {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert any(event.get("cat") == "kernel" for event in events)
    snapshot = pickle.loads((folder / "memory_step3-4.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
