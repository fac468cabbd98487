"""Runs on what is prepared from lines of JSON, from several sources, and ahead."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_lines import events

from trainer.config import Config
from trainer.data import prepare
from trainer.trainer import Trainer

Configs = Callable[..., Config]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of documents, some of which are none."""
    good = [json.dumps({"text": f"def f{n}(x): return x + {n * n}\n" * 20}) for n in range(60)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join([*good, '{"text": ""}', "{cut o", *good[:3], '{"body": 1}']))
    return path


def test_lines_that_are_left_out_are_reported_at_the_start(config: Configs, lines: Path, tmp_path: Path) -> None:
    words = ("data.source=files", f"data.path={lines}", "trainer.max_steps=2", f"data.cache_dir={tmp_path / 'cache'}")
    with pytest.raises(ValueError, match=r"data\.skip_damaged=false: texts\.jsonl, line \d+: not JSON"):
        Trainer(config("run.name=a", *words))
    assert not (tmp_path / "runs").exists()
    run = Trainer(config("run.name=a", "data.skip_damaged=true", *words)).train().folder
    (event,) = events(run, "data")
    assert event["message"].startswith("3 documents left out: 1 document of texts.jsonl (empty; line ")
    assert "(not JSON; " in event["message"] and "(no key text, which " in event["message"] and event["count"] == 3


def test_a_run_starts_from_what_was_prepared_ahead(config: Configs, lines: Path, corpus: Path, tmp_path: Path) -> None:
    mix = f"data.mix=[{{name: web, source: files, path: {lines}}}, {{name: code, path: {corpus}}}]"
    words = ("data.path=null", "data.skip_damaged=true", f"data.cache_dir={tmp_path / 'cache'}")
    one = config("run.name=a", "trainer.max_steps=2", mix, *words)
    ahead = prepare(one.data, one.model.vocab_size, folder=tmp_path / "ahead")
    assert [name for name, _ in ahead.validations] == ["web", "code"]
    run = Trainer(one).train().folder
    # the same tokens from another place are the same data
    trainer = Trainer(
        config("run.name=a", "run.resume=auto", "trainer.max_steps=3", "data.source=bins", f"data.path={ahead.folder}")
    )
    assert trainer.step == 2 and trainer.train().step == 3
    assert all("has changed" not in event["message"] for event in events(run, "data"))
    lines.write_text(lines.read_text() + "\n")
    with pytest.raises(ValueError, match=r"ahead: contains different data, or an earlier state"):
        prepare(one.data, one.model.vocab_size, folder=tmp_path / "ahead")


def test_held_out_text_shorter_than_a_sequence_is_reported_before_the_training(config: Configs, tmp_path: Path) -> None:
    sizes = ("trainer.sequence_length=3000", "trainer.global_batch_size=1", "trainer.microbatch_size=1")
    with pytest.raises(ValueError, match=r"sequence_length=3000: .*validation\.bin has only \d+ tokens, a sequence"):
        Trainer(config("run.name=a", *sizes))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("setting", ["global_batch_size: 1048576", "sequence_length: 3000, global_batch_size: 2"])
def test_too_little_text_for_a_phase_names_its_key(config: Configs, setting: str) -> None:
    key, phases = setting.partition(":")[0], f"trainer.phases=[{{until: 1}}, {{{setting}}}]"
    with pytest.raises(ValueError, match=rf"from step 2 on: trainer\.phases\[1\]\.{key}=\d+: .*\.bin has only \d+"):
        Trainer(config("run.name=a", "trainer.max_steps=3", phases))
