"""Paths of a config keep their places when a run is used from another folder."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from composed import config_of

from trainer.config.data import MixEntry
from trainer.config.paths import with_absolute_paths
from trainer.data import Source


def test_relative_paths_are_anchored_and_what_is_no_path_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(["data=text"])
    (tmp_path / "local" / "set").mkdir(parents=True)
    mix = [
        MixEntry("a", path="org/name"),
        MixEntry("b", path="local/set"),
        MixEntry("c", source=Source.files, path="x"),
    ]
    data = replace(config.data, source=Source.hf, path="org/name", mix=mix, tokenizer="t.json")
    alerts = replace(config.health.alerts, command="./tell 'a b' c.txt")
    made = replace(config, data=data, health=replace(config.health, alerts=alerts))
    kept = with_absolute_paths(made)
    assert kept.data.path == "org/name"
    assert [entry.path for entry in kept.data.mix] == ["org/name", f"{tmp_path}/local/set", f"{tmp_path}/x"]
    assert kept.data.tokenizer == f"{tmp_path}/t.json" and kept.data.cache_dir == f"{tmp_path}/.cache/data"
    assert kept.health.alerts.command == shlex.join([f"{tmp_path}/tell", "a b", "c.txt"])
    assert (kept.run.dir, kept.run.resume, kept.run.init_from) == (f"{tmp_path}/runs", "never", None)
    run = replace(config.run, resume="runs/a", init_from="../b")
    other = with_absolute_paths(replace(made, run=run, data=replace(data, path="local/set", tokenizer=None)))
    assert other.data.path == f"{tmp_path}/local/set" and other.data.tokenizer is None
    assert (other.run.resume, other.run.init_from) == (f"{tmp_path}/runs/a", str(tmp_path.parent / "b"))
    assert with_absolute_paths(kept) == kept and made.data.mix[1].path == "local/set", (
        "and the config itself is as it was"
    )
    for command in ("notify-send x", "./tell 'a"):  # without its closing quote: refused later, with its key
        plain = replace(config.health.alerts, command=command)
        kept = with_absolute_paths(replace(config, health=replace(config.health, alerts=plain)))
        assert kept.health.alerts.command == command
