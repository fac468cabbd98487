"""Text from a run: the model's own, to the end; the run's folder is only read; mistakes are one line."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_folders import snapshot

from trainer.offline.saved_model import open_run

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "scripts" / "sample.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_runs: Any) -> Path:
    """Folder of runs: `fp8`, which has learned a little, and `plain`, without multi-token prediction."""
    folder = tmp_path_factory.mktemp("sample")
    small_runs.write(folder, end="  # é\n")
    fp8 = ["precision=fp8_delayed", "trainer.max_steps=16", "checkpoint.every=8", "optim.lr=1e-2"]
    small_runs.train(folder, "fp8", "model.max_position_embeddings=64", *fp8)
    plain = ["precision=fp32", "trainer.max_steps=1", "model.num_mtp_layers=0"]
    small_runs.train(folder, "plain", "model.max_position_embeddings=64", *plain)
    return folder


def test_greedy_text(runs: Path, run_python: Run) -> None:
    """In FP32, where it is certain: what the model without a cache finds likeliest, with drafts and without."""
    before = snapshot(runs / "fp8")
    fp32 = yaml.safe_load((ROOT / "configs" / "precision" / "fp32.yaml").read_text())
    saved = open_run(runs / "fp8", precision=fp32)
    assert saved.step == 16
    tokenizer, end = saved.tokenizer()
    tokens = tokenizer.encode("def é").ids
    with torch.no_grad():
        for _ in range(16):
            tokens.append(int(saved.model.logits(saved.model.hidden(torch.tensor([tokens])))[0, -1].argmax()))
    assert end not in tokens
    words = [SAMPLE, runs / "fp8", "--prompt", "def é", "--tokens", "16", "--precision", "fp32"]
    for speculative in ([], ["--speculative"]):
        done = run_python(*words, *speculative)
        assert done.returncode == 0, done.stderr
        assert done.stdout == tokenizer.decode(tokens) + "\n"
        assert "step_00000016, fp32 on cpu" in done.stderr and "16 tokens after" in done.stderr
        assert ("drafts were right" in done.stderr) == bool(speculative)
    assert snapshot(runs / "fp8") == before, "the run's folder is only read"


def test_within_documents_a_prompt_begins_one(runs: Path, run_python: Run) -> None:
    saved = open_run(runs / "plain")
    tokenizer, end = saved.tokenizer()
    prompt = tokenizer.encode("def é").ids
    with torch.no_grad():
        logits = saved.model.logits(saved.model.hidden(torch.tensor([[end, *prompt]])))[0, -1]
    words = [SAMPLE, runs / "plain", "--prompt", "def é", "--tokens", "1", "trainer.document_masking=true"]
    done = run_python(*words)
    assert f"after {len(prompt) + 1}: " in done.stderr, done.stderr
    assert done.stdout == tokenizer.decode([*prompt, int(logits.argmax())]) + "\n"


def test_drawn_in_the_runs_precision(runs: Path, run_python: Run) -> None:
    words = [SAMPLE, runs / "fp8", "--step", "8", "--temperature", "1.5", "--top-p", "0.9"]
    done = [run_python(*words, "--seed", seed, "--tokens", count) for seed, count in (("3", 70), ("3", 8), ("4", 8))]
    assert [each.returncode for each in done] == [0, 0, 0], done[0].stderr
    assert "step_00000008, fp8_delayed on cpu" in done[0].stderr
    first, again, other = (each.stdout[:-1] for each in done)
    assert first.startswith(again) and not first.startswith(other) and "trained on" not in done[1].stderr
    assert "63 tokens at most: the model has 64 positions, and the prompt 1" in done[0].stderr, "the end-of-text token"
    assert "the run was trained on 24 tokens at a time: expect worse text beyond that" in done[0].stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["RUNS/none"], "RUNS/none: no such folder; give a run folder that has checkpoints"),
        (["RUNS/text"], "RUN=RUNS/text: no checkpoint there; give a run folder or one of its checkpoints/step_*"),
        (["RUNS/fp8", "--step", "13"], "step_00000013: no such checkpoint; the run has those of steps 8, "),
        (["RUNS/fp8", "--prompt", "caf\udce9"], "--prompt: it is not UTF-8; give it in UTF-8"),
        (["RUNS/fp8", "--prompt", "x" * 200], "and the model 64 positions (model.max_position_embeddings); give a"),
        (["RUNS/fp8", "--tokens", "0"], "--tokens 0: out of range"),
        (["RUNS/fp8", "--temperature", "-1"], "--temperature -1.0: out of range"),
        (["RUNS/fp8", "--top-p", "0.5"], "--top-p 0.5: with temperature 0 nothing is drawn"),
        (["RUNS/fp8", "--top-p", "1.5"], "--top-p 1.5: it is a share"),
        (["RUNS/fp8", "--speculative", "--temperature", "1"], "--speculative: it keeps the greedy text"),
        (["RUNS/plain", "--speculative"], "plain has no multi-token prediction to draft with; leave it out"),
        (["RUNS/fp8", "model.layers=3"], "model.layers=3: there is no such key; did you mean model.num_layers?"),
        (["RUNS/fp8", "model.hidden_size=32"], "the checkpoint is of another model"),
    ],
)
def test_mistakes_are_one_line(runs: Path, run_python: Run, words: list[str], says: str) -> None:
    done = run_python(SAMPLE, *(word.replace("RUNS", str(runs)) for word in words))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert says.replace("RUNS", str(runs)) in done.stderr and not done.stdout
