"""scripts/train_tokenizer.py: any source, a file that train.py takes, one line for a mistake."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.data import DataConfig, Source, load_tokenizer, prepare

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train(run_python: Run, tmp_path: Path) -> Run:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(9):
        (folder / f"{n}.txt").write_text(f"the {n} quick brown foxes, or {n * n} of them\n" * 9)
    script = ROOT / "scripts" / "train_tokenizer.py"
    return lambda *words: run_python(script, "data=files", "data.path=texts", "data.glob=*.txt", *words, cwd=tmp_path)


def test_a_trained_tokenizer_is_one_that_prepare_takes(train: Run, tmp_path: Path) -> None:
    done = train("--out", "tokenizer.json", "--vocab-size", "290")
    assert done.returncode == 0, done.stderr
    assert "tokenizer.json: 290 entries; use it with data.tokenizer=tokenizer.json model.vocab_size=290" in done.stdout
    other = train("--out", "it's one.json", "--vocab-size", "290", "data.end_of_text='<|end|>'").stdout
    words = "data.tokenizer='it\\'s one.json'", "model.vocab_size=290", "data.end_of_text='<|end|>'"
    assert shlex.split(other.partition("use it with ")[2]) == list(words)
    path = tmp_path / "tokenizer.json"
    assert load_tokenizer(path).get_vocab_size() == 290
    texts, cache = str(tmp_path / "texts"), str(tmp_path / "cache")
    data = DataConfig(Source.files, texts, "*.txt", tokenizer=str(path), cache_dir=cache)
    given = prepare(data, 290)
    data.tokenizer = None
    assert prepare(data, 290).tokenizer_hash == given.tokenizer_hash  # the same that is trained by itself


def test_mistakes_are_one_line(train: Run, tmp_path: Path) -> None:
    for words, message in [
        ((), "--out: missing; name the file to write"),
        (("--out", "no/where.json"), "--out=no/where.json: cannot be a file there"),
        (("--out", "texts"), "--out=texts: cannot be a file there"),
        (("--out", "t.json", "model.vocab_size=256"), "model.vocab_size=256: a byte-level tokenizer"),
        (("--out", "t.json", "--vocab-size", "0"), "--vocab-size=0: entries of a byte-level tokenizer, of which 256"),
        (("--out", "t.json", "data.tokenizer=a.json"), "data.tokenizer=a.json: a new one is trained; set"),
        (("--out", "t.json", "data=bins"), "data.source=bins: has no text to train on"),
    ]:
        done = train(*words)
        assert done.returncode == 2 and done.stderr.startswith(f"octet: error: {message}"), done.stderr
        assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.json"))
