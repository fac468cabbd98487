"""Any text comes back from its tokens, and the same text gives the same tokenizer."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from precision.errors import UserError
from trainer.config.data import Source, check_data
from trainer.data import DataConfig, Prepared, load_tokenizer, prepare
from trainer.data.tokenizer import (
    LONGEST_WORD,
    check_end_of_text,
    encode_pieces,
    end_of_text_id,
    file_hash,
    num_entries,
    tokenizer_file,
    train_tokenizer,
)
from trainer.data.tokenizer_sample import new_tokenizer

END = "<|endoftext|>"
TEXTS = ["def f(self):\n        return self.x\n" * 50, "import os, sys\nfor line in sys.stdin:\n    print(line)\n" * 40]


@given(st.lists(st.text(max_size=40) | st.just(f"a{END}b"), max_size=8), st.integers(1, 100))
def test_pieces_decode_to_themselves_in_order(prepared: Prepared, texts: list[str], batch: int) -> None:
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    pieces = [(text, number % 3 == 0) for number, text in enumerate(texts)]
    encoded = list(encode_pieces(tokenizer, pieces, batch))
    assert [flag for _, flag in encoded] == [flag for _, flag in pieces]
    for text, (ids, _) in zip(texts, encoded, strict=True):
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
        assert end_of_text_id(tokenizer, END) not in ids


def test_training_is_deterministic_and_gives_the_vocabulary_asked_for() -> None:
    first, second = (train_tokenizer(iter(TEXTS), 300, END) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 300
    assert end_of_text_id(first, END) == 0


def test_smallest_vocabulary_encodes_bytes() -> None:
    tokenizer = train_tokenizer(iter(TEXTS), 257, END)
    (ids, _), *_ = encode_pieces(tokenizer, [("é€ x", True)], 1)
    assert len(ids) == len("é€ x".encode())
    assert len(np.unique(list(tokenizer.get_vocab().values()))) == 257


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer .*tokenizer\.json: cannot be read \([^\n]*\)[^\n]*$"):
        load_tokenizer(path)


@pytest.mark.parametrize("end", ["x", "self"])
def test_an_end_of_text_that_text_has_too_is_refused(end: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.end_of_text={end}: text has this token, too, .*; set another"):
        train_tokenizer(iter(TEXTS), 300, end)


def test_a_word_of_a_given_tokenizer_is_no_end_of_text(
    prepared: Prepared, own_corpus: Path, make_config: Callable[..., DataConfig]
) -> None:
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    tokenizer.add_tokens(["<|EOT|>"])  # not special: only text that spells it has it
    for end in (END, "<|EOT|>"):
        check_end_of_text(tokenizer, end, "another")
    entries = set(tokenizer.get_vocab())
    for word in ("x", "self", "\u0120the"):  # the last with a blank before it
        assert word in entries
        data = make_config(own_corpus, tokenizer=str(prepared.tokenizer_path), end_of_text=word)
        with pytest.raises(UserError, match=rf"^data\.end_of_text={word}: text has .*, one of its special tokens"):
            prepare(data, 512)
    with pytest.raises(UserError, match="text has this token, too"):
        check_end_of_text(Tokenizer(models.WordLevel({"a": 0})), "a", "another")


def test_a_tokenizer_that_truncates_or_pads_loses_and_adds_nothing(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(TEXTS), 300, END)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    (ids, _), (short, _) = encode_pieces(loaded, [(TEXTS[0], True), ("x", True)], 1 << 20)
    assert loaded.decode(ids.tolist()) == TEXTS[0] and len(short) == 1


def test_every_id_is_below_the_number_of_entries() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert tokenizer.get_vocab_size() == 2
    assert num_entries(tokenizer) == 70_001


def test_one_that_cannot_encode_a_text_is_named() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    with pytest.raises(ValueError, match=r"data\.tokenizer: it cannot encode the text \(WordLevel error.*\): give one"):
        list(encode_pieces(tokenizer, [("b", True)], 1))


def on_hub(cache: Path, tokenizer: Path, commit: str) -> None:
    """A copy in the hub's cache, as a download leaves it."""
    snapshot = cache / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    shutil.copy(tokenizer, snapshot / "tokenizer.json")
    refs = cache / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)


def test_a_name_on_the_hub_is_read_from_its_cache_or_refused_in_a_line(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    cannot = r"^data\.tokenizer=owner/name: the hub cannot be reached, [^\n]*$"
    with monkeypatch.context() as hasty:
        hasty.setattr("time.sleep", lambda _: None)  # between the library's attempts
        with pytest.raises(UserError, match=cannot):
            tokenizer_file("owner/name")
    assert not caplog.records, "nothing else is printed"
    with pytest.raises(UserError, match=r"^data\.tokenizer=owner/the--name: cannot be fetched [^\n]*$"):
        tokenizer_file("owner/the--name")
    on_hub(tmp_path / "hub", prepared.tokenizer_path, "0" * 40)
    for name in ("owner/name", f"owner/name@{'0' * 40}"):
        assert file_hash(tokenizer_file(name)) == prepared.tokenizer_hash
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(9):
        (texts / f"{number}.txt").write_text(f"text {number} " * 20)
    made = {
        prepare(DataConfig(Source.text, str(texts), "*", tokenizer=name, validation_fraction=0.3), 512).folder
        for name in ("owner/name", str(prepared.tokenizer_path), str(prepared.tokenizer_path.parent))
    }
    assert len(made) == 1, "the same tokenizer is the same data"
    for wrong in ("owner/name.json", "./owner", "owner/name/more"):
        with pytest.raises(
            UserError, match=r"there is no such file or folder: give a tokenizer\.json, a name on the hub"
        ):
            check_data(DataConfig(tokenizer=wrong), 512)


def test_a_line_without_end_is_read_and_trained_on_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training took time with the square of the longest word (see below), and read a text file to its end."""
    monkeypatch.setattr("trainer.data.corpus.PIECE_BYTES", 1 << 16)
    monkeypatch.setattr("trainer.data.corpus.LONGEST_LINE", 1 << 16)
    size = 5_000_000
    (tmp_path / "line.txt").write_bytes(np.random.default_rng(0).integers(97, 123, size, dtype=np.uint8).tobytes())
    read: list[str] = []

    def train(texts: Iterable[str], vocab_size: int, end_of_text: str) -> Tokenizer:
        return train_tokenizer((read.append(text) or text for text in texts), vocab_size, end_of_text)

    monkeypatch.setattr("trainer.data.tokenizer_sample.train_tokenizer", train)
    data = DataConfig(Source.text, str(tmp_path / "line.txt"), tokenizer_sample_mb=1, validation_fraction=0.1)
    tokenizer = new_tokenizer(data, 512)
    assert tokenizer.get_vocab_size() == 512
    assert 1_000_000 <= sum(map(len, read)) <= 1_000_000 + 2 * (1 << 16)
    assert tokenizer.decode(tokenizer.encode(read[0]).ids) == read[0]


def test_only_words_longer_than_any_are_cut_in_training() -> None:
    short, long = "ab" * (LONGEST_WORD // 2), "ab" * LONGEST_WORD
    assert train_tokenizer([short, short], 300, END).to_str() == train_tokenizer([long], 300, END).to_str()
