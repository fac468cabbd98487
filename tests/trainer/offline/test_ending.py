"""The last lines of a run: what the model wrote, the commands that come next, the table of a sweep."""

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from models.generate import Sampling, generate
from precision import gemm_layers
from trainer.build import Run
from trainer.checkpoint import list_checkpoints
from trainer.config import Config
from trainer.launch.launcher import Launch
from trainer.offline.ending import TEMPERATURE, TOP_P, ending, next_commands, printable_text, sample, say, sweep_table
from trainer.offline.saved_model import open_run
from trainer.sinks import Summary
from trainer.trainer import Trainer

ROOT = Path(__file__).parents[3]
Configs = Callable[..., Config]
ALONE = Launch()
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def summary(name: str, loss: float) -> Summary:
    return Summary(Path("runs") / name, 6, loss, 3.7, 1234.0, 0.5, 0)


def test_the_commands_name_the_run_and_a_length_in_its_own_unit(config: Configs) -> None:
    steps = config("trainer.max_steps=6").trainer
    commands = dict(next_commands(Path("runs/a"), steps, 6, ALONE))
    assert commands["see its curves"] == "python scripts/dashboard.py runs/a"
    assert commands["train on"] == "python train.py run.resume=runs/a trainer.max_steps=12"
    for odd in ("rüns/a b", "runs/it's"):  # both the shell and Hydra read the folder's name
        _, override, _ = shlex.split(
            dict(next_commands(Path(odd), steps, 6, ALONE))["train on"].removeprefix("python ")
        )
        assert OverridesParser.create().parse_override(override).value() == odd
    assert commands["evaluate it"] == "python scripts/evaluate.py runs/a"
    assert commands["export it"] == "python scripts/export_hf.py runs/a a-hf"
    most = 6 * steps.global_batch_size * steps.sequence_length
    tokens = replace(steps, max_steps=None, max_tokens=most)
    assert dict(next_commands(Path("runs/a"), tokens, 6, ALONE))["train on"].endswith(f"trainer.max_tokens={2 * most}")
    on_a_node = dict(next_commands(Path("runs/a"), steps, 6, Launch(size=2, local_size=2)))
    assert on_a_node["train on"].startswith("PROCESSES=2 scripts/launch/one_node.sh run.resume=")
    assert "train on" not in dict(next_commands(Path("runs/a"), steps, 6, Launch(size=4, local_size=2)))
    for until, words in (("3", {"train on"}), ("0.5", set())):  # a share would end later in a longer run
        phases = f"trainer.phases=[{{until: {until}}},{{sequence_length: 16}}]"
        phased = next_commands(Path("runs/a"), config("trainer.max_steps=6", phases).trainer, 6, ALONE)
        assert {"train on"} & set(dict(phased)) == words
    both = "trainer.max_steps=6", "trainer.max_tokens=1M"  # the command's length replaces both
    phased = config(*both, "trainer.phases=[{until: 0.25},{sequence_length: 16}]").trainer
    assert "train on" not in dict(next_commands(Path("runs/a"), phased, 6, ALONE))


def test_the_commands_are_found_from_any_folder(
    config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    length = config("trainer.max_steps=6").trainer
    for launch in (ALONE, Launch(size=2, local_size=2)):
        for _, command in next_commands(Path("runs/a"), length, 6, launch):
            assert Path(shlex.split(command)[1]).is_file(), command


def test_a_run_whose_model_transformers_does_not_have_ends_without_its_export(config: Configs) -> None:
    for model, exports in (("deepseek_tiny", True), ("fog_mla_tiny", False)):
        run = cast(Run, SimpleNamespace(config=config(f"model={model}", "eval.sample=0")))
        assert ("scripts/export_hf.py" in ending(summary("x", 3.5), run, ALONE)) is exports


def test_a_sweep_ends_with_a_table_of_what_sets_its_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    done = [
        (summary("x", 3.5), ["trainer.seed=1", "optim.lr=1e-3"]),
        (summary("y", 3.25), ["trainer.seed=2", "optim.lr=1e-3"]),
    ]
    head, *rows = sweep_table(done).splitlines()
    assert head.split("  ")[0] == "run" and "validation loss" in head
    assert [row.split()[:3] for row in rows] == [["x", "trainer.seed=1", "3.5000"], ["y", "trainer.seed=2", "3.2500"]]
    assert "optim.lr" not in "".join(rows)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = sweep_table(done).splitlines()
    assert [line.split() for line in narrow[2:4]] == [["x", "3.5000", "1,234", "0.50", "0"], ["trainer.seed=1"]]
    assert max(map(len, narrow)) <= 40


def test_a_run_ends_with_text_and_commands_that_work(config: Configs, run_python: RunPython) -> None:
    trainer = Trainer(config("trainer.max_steps=2", "eval.sample=24"))
    done = trainer.train()
    text = sample(trainer.run, 24)
    assert text == sample(trainer.run, 24) and not text.startswith("none: ")
    saved = open_run(done.folder)  # the same text as from the checkpoint
    tokenizer, end = saved.tokenizer()
    ids = generate(saved.model, [end], 24, end=end, sampling=Sampling(TEMPERATURE, TOP_P, saved.config.trainer.seed))
    assert text == printable_text(tokenizer.decode(list(ids)))
    said = ending(done, trainer.run, ALONE)
    assert all(f"    {line}" in said for line in text.splitlines())
    assert "It writes" not in ending(done, trainer.run, Launch(size=2, local_size=2))
    (command,) = re.findall(r"^train on +python (train\.py .*)$", said, re.MULTILINE)
    program, *arguments = shlex.split(command)
    again = run_python(ROOT / program, *arguments)
    assert again.returncode == 0, again.stderr
    assert [path.name for path in list_checkpoints(done.folder / "checkpoints")][-1] == "step_00000004"


def test_it_writes_with_the_fp8_weights_of_the_trained_model(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config("+recipe=fp8_delayed", "trainer.max_steps=2", "optim.lr=0.1", "optim.warmup_steps=0"))
    done, models = trainer.train(), []
    monkeypatch.setattr("trainer.offline.ending.generate", lambda model, *_, **__: models.append(model) or [])
    sample(trainer.run, 4)
    pairs = list(zip(gemm_layers(models[0]), gemm_layers(open_run(done.folder).model), strict=True))
    operands = [(ours.operand, theirs.operand) for ours, theirs in pairs if ours.weight_slot is not None]
    assert operands
    for ours, theirs in cast(list[tuple[Any, Any]], operands):
        assert torch.equal(ours.scale_inv, theirs.scale_inv)
        assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))


def test_a_terminal_of_few_characters_or_without_a_reader_costs_no_finished_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", poor := io.TextIOWrapper(io.BytesIO(), "ascii"))
    say("\ufffd\u00e9")
    assert poor.buffer.getvalue() == b"??\n"  # type: ignore[attr-defined]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        say("end")
