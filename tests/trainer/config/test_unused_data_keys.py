"""Settings of `data` that change nothing are named; those that do, and those that are shipped, are not."""

from pathlib import Path
from typing import Any

import pytest
from composed import config_of

from trainer.config.data import Format, MixEntry, Stop
from trainer.config.unused_data_keys import without_effect
from trainer.data import DataConfig, Source

WEIGHTS = [MixEntry("a", 1.0), MixEntry("b", 2.0)]
BINS, FILES = {"source": Source.bins, "path": "."}, {"source": Source.files, "path": "."}


@pytest.mark.parametrize("name", ["stdlib", "text", "files", "hf", "bins"])
def test_shipped_configs_have_no_keys_without_effect(name: str) -> None:
    data = config_of([f"data={name}"]).data
    data.path = None if name == "stdlib" else __file__ if name == "files" else "."
    assert without_effect(data) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stop": Stop.all_exhausted}, ["data.stop=all_exhausted has no effect: without weights"]),
        (
            {"stop": Stop.all_exhausted, "mix": [MixEntry("a"), MixEntry("b")]},
            ["data.stop=all_exhausted has no effect"],
        ),
        ({"stop": Stop.all_exhausted, "mix": WEIGHTS}, []),
        ({"shard_mb": 8}, []),
        ({**BINS, "shard_mb": 8}, ["data.shard_mb=8 has no effect: bins are prepared already; leave it out"]),
        ({**BINS, "skip_damaged": True, "validation_fraction": 0.1}, ["data.validation_fraction=0.1", "data.skip_dam"]),
        ({**BINS, "workers": 3, "cache_dir": "x", "tokenizer": "t.json"}, []),
        ({**BINS, "glob": "*.md"}, ["data.glob=*.md has no effect: data.source=bins does not read it"]),
        ({**FILES, "glob": "*.md", "format": Format.jsonl, "text_column": "body", "exclude": ["x"]}, []),
        ({**FILES, "path": __file__, "glob": "*.md"}, [f"data.glob=*.md has no effect: data.path={__file__} is one"]),
        ({**FILES, "validation_path": ".", "validation_fraction": 0.1}, ["data.validation_fraction=0.1 has no effect"]),
        ({**FILES, "validation_path": ".", "validation_fraction": 0.0}, []),
        ({**FILES, "validation_split": "x"}, ["data.validation_split=x has no effect: data.source=files does not"]),
        ({"validation_path": "."}, ["data.validation_path=. has no effect: data.source=stdlib does not read it"]),
        ({"format": Format.jsonl}, ["data.format=jsonl has no effect: data.source=stdlib does not read it"]),
        ({**FILES, "streaming": True, "split": "x"}, ["data.split=x", "data.streaming=True has no effect"]),
        ({"source": Source.hf, "path": "a/b", "revision": "v1", "subset": "en", "split": "x", "streaming": True}, []),
        ({"source": Source.hf, "path": ".", "revision": "v1", "subset": "en"}, ["data.revision=v1 has no effect"]),
        ({"tokenizer": "t.json", "tokenizer_sample_mb": 9}, ["data.tokenizer_sample_mb=9 has no effect"]),
        ({"tokenizer_sample_mb": 9}, []),
        ({"text_column": "x", "mix": WEIGHTS}, ["data.text_column=x has no effect: no source of data.mix reads it"]),
        ({"text_column": "x", "mix": [MixEntry("a", source=Source.files), MixEntry("b")]}, []),
        (
            {"text_column": "x", "mix": [MixEntry("a", source=Source.files, text_column="y"), MixEntry("b")]},
            ["data.text_column=x has no effect"],
        ),
        (
            {"mix": [MixEntry("a", revision="v1"), MixEntry("b", source=Source.hf, path="c/d", revision="v1")]},
            ["data.mix[0].revision=v1 has no effect: data.mix[0].source=stdlib does not read it"],
        ),
    ],
)
def test_keys_without_effect_are_named(settings: dict[str, Any], says: list[str]) -> None:
    lines = without_effect(DataConfig(**settings))
    assert len(lines) == len(says), lines
    for line, begin in zip(lines, says, strict=True):
        assert line.startswith(begin) and "\n" not in line
        assert line.endswith(("; leave it out", "; give data.mix weights"))


def test_a_folder_that_was_saved_has_no_subsets(tmp_path: Path) -> None:
    hub = DataConfig(source=Source.hf, path=str(tmp_path), subset="en", split="dev")
    assert without_effect(hub) == []
    (tmp_path / "state.json").write_text("{}")
    assert [line.partition("=")[0] for line in without_effect(hub)] == ["data.subset", "data.split"]
