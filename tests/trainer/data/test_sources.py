"""Every kind of source gives the same documents, and so the same tokens; several are mixed by their weights."""

import gzip
import itertools
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from precision.errors import UserError
from trainer.config.data import MixEntry, Stop, source_configs
from trainer.data import DataConfig, Prepared, Source, load_tokenizer, prepare
from trainer.data import records as documents_module
from trainer.data.hf_datasets import Dataset
from trainer.data.records import SkipLog
from trainer.data.sources import open_source

Prepare = Callable[..., Prepared]


def made_up(count: int, word: str = "word") -> list[str]:
    """Documents of some lines, with what JSON has to escape."""
    rng = random.Random(count)
    return [
        "".join(f"{word} {n} {rng.randrange(99)} é€\t\"'\n" for _ in range(rng.randrange(1, 60))) for n in range(count)
    ]


TEXTS = made_up(120)


def jsonl(texts: Iterable[str]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def write(folder: Path, kind: str, texts: list[str]) -> dict[str, Any]:
    """The texts as files of a kind; the settings that read them."""
    folder.mkdir()
    half = len(texts) // 2
    source, path = Source.files, str(folder)
    for name, part in (("a", texts[:half]), ("b", texts[half:])):
        table = pyarrow.table({"id": list(range(len(part))), "text": part})
        match kind.split():
            case ["jsonl"]:
                (folder / f"{name}.jsonl").write_bytes(jsonl(part))
            case ["gz"]:
                (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(jsonl(part)))
            case ["zst"]:
                frames = [zstandard.compress(jsonl(part[:9])), zstandard.compress(jsonl(part[9:]))]
                (folder / f"{name}.jsonl.zst").write_bytes(b"".join(frames))
            case ["parquet"]:
                parquet.write_table(table, folder / f"{name}.parquet", row_group_size=25)
            case ["hub", *_]:  # a folder as one is kept on the hub
                (folder / "data").mkdir(exist_ok=True)
                parquet.write_table(table, folder / "data" / f"train-{name}.parquet", row_group_size=25)
                source = Source.hf
            case ["saved", *_]:
                source = Source.hf
    more = {"streaming": "streaming" in kind}
    if kind == "saved":
        import datasets

        datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "dataset")
        path = str(folder / "dataset")
    if kind == "saved splits":
        import datasets

        splits = datasets.DatasetDict()
        for name, rows in (("tr", texts), ("te", ["no"])):
            splits[name] = datasets.Dataset.from_dict({"body": rows})
        splits.save_to_disk(folder / "dataset")
        path, more = str(folder / "dataset"), {"split": "tr", "text_column": "body"}
    globs = "**/*.jsonl | **/*.jsonl.gz | **/*.jsonl.zst | **/*.parquet | **/*.txt"
    return {"source": source, "path": path, "glob": globs, "exclude": [], **more}


@pytest.fixture
def prepare_for(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """(settings ...) -> Prepared, with a tokenizer that is there already."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer, cache = str(prepared.tokenizer_path), str(tmp_path / "cache")

    def run(**settings: Any) -> Prepared:
        fixed = {"tokenizer": tokenizer, "cache_dir": cache, "validation_fraction": 0.2}
        return prepare(DataConfig(**{**fixed, **settings}), 512)

    return run


def texts_of(prepared: Prepared, name: str = "train") -> list[str]:
    """The documents that a split's bins decode to."""
    bins = getattr(prepared, name)
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    (ends,) = np.nonzero(bins.tokens == bins.sidecar.end_of_text)
    return [tokenizer.decode(bins.tokens[a + 1 : b].tolist()) for a, b in itertools.pairwise(ends)]


def test_a_dataset_is_read_in_its_own_folder(
    prepare_for: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` has no name, and the prepared data is beside the text."""
    texts = [f"text {n}" for n in range(40)]
    settings = write(tmp_path / "data", "hub", texts) | {"path": ".", "cache_dir": ".cache/data"}
    monkeypatch.chdir(tmp_path / "data")
    first, again = prepare_for(**settings), prepare_for(**settings)
    assert sorted([*texts_of(first), *texts_of(first, "validation")]) == sorted(texts)
    assert (first.built, again.built, again.folder) == (True, False, first.folder)


def test_a_dataset_behind_a_link_to_a_folder_is_another_one_when_it_changes(tmp_path: Path) -> None:
    folders = mine, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    for folder in folders:
        folder.mkdir()
    (mine / "data").symlink_to(elsewhere)
    (elsewhere / "circle").symlink_to(mine)
    (part,) = source_configs(DataConfig(Source.hf, str(mine)))
    before = Dataset(part).fingerprint
    (elsewhere / "train.jsonl").write_bytes(jsonl(TEXTS))
    assert Dataset(part).fingerprint != before


@pytest.mark.parametrize("key", ["split", "validation_split"])
def test_a_saved_dataset_without_splits_refuses_one(prepare_for: Prepare, tmp_path: Path, key: str) -> None:
    """All of it was read as that split: a run would have been validated on its training text."""
    settings = write(tmp_path / "data", "saved", [f"text {n}" for n in range(40)]) | {key: "test"}
    with pytest.raises(UserError, match=r"data\.path=.*: is a single dataset, without a split test: leave that out"):
        prepare_for(**settings)


def test_every_kind_of_source_gives_the_same_tokens(
    prepare_for: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 4000)
    monkeypatch.setattr("trainer.data.sources.BLOCK_BYTES", 4000)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    found = {}
    kinds = ["jsonl", "gz", "zst", "parquet", "hub", "hub streaming", "saved", "saved splits"]
    for kind in kinds:
        result = prepare_for(**write(tmp_path / kind.replace(" ", "_"), kind, TEXTS))
        found[kind] = (result.train.sidecar.sha256, result.validation.sidecar.sha256)
        assert result.skipped == ()
    assert len(set(found.values())) == 1, found
    train, held_out = texts_of(result), texts_of(result, "validation")
    assert sorted(train + held_out) == sorted(TEXTS) and len(held_out) > 9
    assert train == [text for text in TEXTS if text not in held_out]  # in their order
    assert result.validations == (("hf", result.validation),)
    assert result.documents == {"hf": (len(train), sum(len(text.encode()) for text in train))}


def test_a_row_group_as_large_as_its_file_is_read_in_pieces_and_sampled_in_part(tmp_path: Path) -> None:
    rng, size, rows = random.Random(0), 4 << 20, 12 * 1024
    for name in ("a", "b"):  # of random letters, which compression leaves large
        texts = [name + rng.randbytes(1024).hex() for _ in range(rows)]
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / f"{name}.parquet", row_group_size=len(texts))
    (part,) = source_configs(DataConfig(Source.files, str(tmp_path), "*.parquet", exclude=[]))
    files, log, before = open_source(part), SkipLog(strict=True), pyarrow.total_allocated_bytes()
    blocks = list(files.blocks(log))
    assert len(blocks) == 2
    pieces = blocks[0].pieces(log)
    assert next(pieces).text[0] == "a"
    assert pyarrow.total_allocated_bytes() - before < (tmp_path / "a.parquet").stat().st_size / 2
    assert 1 + sum(1 for _ in pieces) == rows
    sampled = [piece for block in files.sample(size, log) for piece in block.pieces(log)]
    assert 0.9 * size < sum(piece.num_bytes for piece in sampled) < 1.1 * size
    assert {piece.text[0] for piece in sampled} == {"a", "b"}


def test_a_text_file_is_a_document_compressed_or_not(prepare_for: Prepare, tmp_path: Path) -> None:
    for n, text in enumerate(TEXTS[:20]):
        content = ("\ufeff" * (n % 2) + text).encode()  # a byte order mark is no text
        (tmp_path / f"{n:02}.txt.gz").write_bytes(gzip.compress(content))
        (tmp_path / f"{n:02}.md").write_bytes(content)
    both = [prepare_for(source=Source.files, path=str(tmp_path), glob=glob) for glob in ("*.txt.gz", "*.md")]
    for result in both:
        assert sorted(texts_of(result) + texts_of(result, "validation")) == sorted(TEXTS[:20])
    alone = prepare_for(source=Source.text, path=str(tmp_path), glob="*.md")
    assert alone.train.sidecar.sha256 == both[1].train.sidecar.sha256


def test_one_file_can_be_the_source(prepare_for: Prepare, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(jsonl(TEXTS))
    (tmp_path / "y.json").write_bytes(b"{")
    result = prepare_for(source=Source.files, path=str(tmp_path / "x.json"))
    assert len(texts_of(result) + texts_of(result, "validation")) == len(TEXTS)


@pytest.mark.parametrize(
    "text", ["".join(f"line {n} é\n" for n in range(400)), "é" * 999 + "x"], ids=["lines", "no line"]
)
@pytest.mark.parametrize("path", ["corpus", "corpus/input.txt"])
def test_of_one_text_the_last_part_is_held_out(
    prepare_for: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, path: str
) -> None:
    monkeypatch.setattr("trainer.data.corpus.PIECE_BYTES", 100)
    monkeypatch.setattr("trainer.data.corpus.LONGEST_LINE", 101)  # within a character
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "input.txt").write_text(text)
    result = prepare_for(source=Source.text, path=str(tmp_path / path), glob="*.txt")
    (train,), (held_out,) = texts_of(result), texts_of(result, "validation")
    assert train + held_out == text and 0.1 < len(held_out) / len(text) <= 0.2
    assert train.endswith("\n") or "\n" not in text
    (tmp_path / "corpus" / "input.txt").write_text("x")
    with pytest.raises(
        ValueError, match=r"validation_fraction=0\.2: leaves nothing of input\.txt, 1 bytes, for validation"
    ):
        prepare_for(source=Source.text, path=str(tmp_path / path), glob="*.txt")


def test_a_single_file_is_not_divided_within_its_last_character(prepare_for: Prepare, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("text " * 30 + "€")
    with pytest.raises(UserError, match=r"validation_fraction=0\.01: leaves nothing of input\.txt, 153 bytes"):
        prepare_for(source=Source.text, path=str(tmp_path / "input.txt"), validation_fraction=0.01)


@pytest.mark.parametrize("source", [Source.text, Source.files])
def test_an_empty_file_is_named(prepare_for: Prepare, tmp_path: Path, source: Source) -> None:
    (tmp_path / "input.txt").touch()
    (tmp_path / "more.txt").write_text("text")
    for key in ("path", "validation_path"):
        paths = {"path": str(tmp_path), key: str(tmp_path / "input.txt")}
        with pytest.raises(UserError, match=rf"^data\.{key}=.*/input\.txt: an empty file: give one with text$"):
            prepare_for(source=source, glob="*.txt", **paths)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved splits", "hub"])
def test_text_of_ones_own_is_held_out(prepare_for: Prepare, tmp_path: Path, kind: str) -> None:
    own = write(tmp_path / "own", kind, made_up(9, "own"))["path"]
    given = write(tmp_path / "all", kind, TEXTS)
    result = prepare_for(**given, validation_path=own, validation_fraction=0.0)
    assert texts_of(result) == TEXTS and texts_of(result, "validation") == made_up(9, "own")
    entry = MixEntry("a", 1.0, path=given["path"], validation_path=own)
    both = prepare_for(**{**given, "path": None}, mix=[entry, replace(entry, name="b", weight=9.0)])
    assert [bins.sidecar.num_documents for _, bins in both.validations] == [9, 9]


def test_a_file_that_is_held_out_is_not_trained_on(prepare_for: Prepare, tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(f"text {n} " * 9)
    given: dict[str, Any] = {"source": Source.text, "path": str(tmp_path), "glob": "*.txt", "validation_fraction": 0.0}
    result = prepare_for(**given, validation_path=str(tmp_path / "1.txt"))
    assert (texts_of(result), texts_of(result, "validation")) == (["text 0 " * 9, "text 2 " * 9], ["text 1 " * 9])
    with pytest.raises(ValueError, match=r"data\.validation_path=.*: has every file of"):
        prepare_for(**given, validation_path=str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.validation_path=nowhere: there is no such folder or file"):
        prepare_for(**given, validation_path="nowhere")
    with pytest.raises(ValueError, match=r"data\.validation_fraction=0: leaves no part of text for evaluation"):
        prepare_for(**given)


@pytest.fixture
def three(tmp_path: Path) -> list[MixEntry]:
    """Sources of 400, 100 and 50 documents."""
    entries = []
    for name, count in (("web", 400), ("code", 100), ("math", 50)):
        write(tmp_path / name, "jsonl", made_up(count, name))
        entries.append(MixEntry(name=name, path=str(tmp_path / name)))
    return entries


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.sources.BLOCK_BYTES", 2000)


def test_several_sources_without_weights_are_all_there_once(prepare_for: Prepare, three: list[MixEntry]) -> None:
    result = prepare_for(source=Source.files, glob="*.jsonl", mix=three)
    assert [name for name, _ in result.validations] == ["web", "code", "math"]
    assert result.train.sidecar.source == "web+code+math"
    everything = made_up(400, "web") + made_up(100, "code") + made_up(50, "math")
    assert sorted(texts_of(result) + texts_of(result, "validation")) == sorted(everything)
    for name, bins in result.validations:
        assert bins.path.name == f"validation-{name}.bin" and bins.sidecar.source == name
        tokens = bins.tokens
        text = load_tokenizer(result.tokenizer_path).decode(tokens.tolist())
        assert text.startswith(name) and bins.sidecar.num_documents > 1
    counts = [bins.sidecar.num_documents for _, bins in result.validations]
    assert result.validation.sidecar.num_documents == sum(counts)
    assert sum(documents for documents, _ in result.documents.values()) == 550 - sum(counts)


def test_weights_are_shares_of_the_text_until_a_source_is_used_up(
    prepare_for: Prepare, three: list[MixEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    for entry, weight in zip(three, (1.0, 4.0, 1.0), strict=True):
        entry.weight = weight
    result = prepare_for(source=Source.files, glob="*.jsonl", mix=three)
    sizes = {name: size for name, (_, size) in result.documents.items()}
    assert result.documents["code"][0] + dict(result.validations)["code"].sidecar.num_documents == 100  # used up
    assert sizes["code"] / sum(sizes.values()) == pytest.approx(4 / 6, abs=0.07)
    assert sizes["math"] / sum(sizes.values()) == pytest.approx(1 / 6, abs=0.07)
    train = texts_of(result)
    assert len(train) == len(set(train))  # nothing twice


def test_weights_count_the_text_and_not_what_stands_beside_it(
    prepare_for: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two equal texts one has long records around it."""
    small_blocks(monkeypatch)
    entries = []
    for name, more in (("plain", ""), ("long", "beside " * 60)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"text": text, "more": more}) for text in made_up(400, name)]
        (tmp_path / name / "x.jsonl").write_text("\n".join(lines))
        entries.append(MixEntry(name=name, path=str(tmp_path / name), weight=1.0))
    result = prepare_for(source=Source.files, glob="*.jsonl", mix=entries)
    plain, long = (size for _, size in result.documents.values())
    assert plain / (plain + long) == pytest.approx(0.5, abs=0.07)


@pytest.mark.parametrize("stop", Stop)
def test_weights_are_shares_of_the_training_text_if_text_of_ones_own_is_held_out(
    prepare_for: Prepare, three: list[MixEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Stop
) -> None:
    small_blocks(monkeypatch)
    own = write(tmp_path / "own", "jsonl", made_up(60, "own"))["path"]
    web, code, _ = (replace(entry, weight=1.0) for entry in three)
    result = prepare_for(source=Source.files, glob="*.jsonl", mix=[replace(web, validation_path=own), code], stop=stop)
    (_, web_size), (_, code_size) = result.documents.values()
    assert web_size / (web_size + code_size) == pytest.approx(0.5, abs=0.07)
    assert dict(result.validations)["web"].sidecar.num_documents == 60


@pytest.mark.parametrize("stop", Stop)
def test_weights_are_shares_of_the_training_text_if_whole_files_are_held_out(
    prepare_for: Prepare, tmp_path: Path, stop: Stop
) -> None:
    """Of one source, one of its two files."""
    entries = []
    for name, count, lines in (("few", 2, 6000), ("many", 40, 1000)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i}.txt").write_text("".join(f"{name} {n}\n" for n in range(lines)))
        entries.append(MixEntry(name=name, path=str(tmp_path / name), weight=1.0))
    result = prepare_for(source=Source.text, glob="*.txt", mix=entries, stop=stop)
    (_, few), (_, many) = result.documents.values()
    assert few / (few + many) == pytest.approx(0.5, abs=0.07)


def test_a_source_of_which_a_mix_reads_nothing_to_hold_out_is_named_with_what_ends_the_mix(
    prepare_for: Prepare, three: list[MixEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    own = write(tmp_path / "own", "jsonl", made_up(60, "own"))["path"]
    web, _, math = (replace(entry, weight=1.0) for entry in three)
    given = {"source": Source.files, "glob": "*.jsonl", "validation_fraction": 0.01}
    mix = [replace(math, validation_path=own), web]
    with pytest.raises(UserError, match=r"leaves nothing of web to .*one source is used up; set data.stop=all_exh"):
        prepare_for(**given, mix=mix)
    assert prepare_for(**given, mix=mix, stop=Stop.all_exhausted).documents["web"][0] < 400


def test_the_small_ones_come_again_until_all_are_used_up(
    prepare_for: Prepare, three: list[MixEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    for entry in three:
        entry.weight = 1.0
    result = prepare_for(source=Source.files, glob="*.jsonl", mix=three, stop=Stop.all_exhausted)
    train, held_out = texts_of(result), texts_of(result, "validation")
    everything = made_up(400, "web") + made_up(100, "code") + made_up(50, "math")
    assert set(train) | set(held_out) == set(everything) and not set(train) & set(held_out)
    assert len(held_out) == len(set(held_out))  # held out once, however often the source is read
    web, math = ([text for text in train if text.startswith(name)] for name in ("web", "math"))
    assert len(web) == len(set(web)) and 5 < len(math) / len(set(math)) < 11


def test_prepared_bins_are_a_source(prepare_for: Prepare, three: list[MixEntry], prepared: Prepared) -> None:
    web, code = (prepare_for(source=Source.files, glob="*.jsonl", path=entry.path) for entry in three[:2])
    alone = prepare_for(source=Source.bins, path=str(web.folder), tokenizer=None)
    assert not alone.built and alone.train.sidecar == web.train.sidecar
    mix = [MixEntry(name="w", path=str(web.folder)), MixEntry(name="c", path=str(code.folder))]
    both = prepare_for(source=Source.bins, mix=mix)
    assert texts_of(both) == texts_of(web) + texts_of(code)
    assert [name for name, _ in both.validations] == ["w", "c"]
    assert both.train.num_tokens == web.train.num_tokens + code.train.num_tokens - 1
    with pytest.raises(ValueError, match=r"model\.vocab_size=511: the tokenizer has 512"):
        prepare(DataConfig(source=Source.bins, path=str(web.folder)), 511)
    for other_end in ("a", "</s>"):
        with pytest.raises(ValueError, match=r"end with <\|endoftext\|>: set \"data\.end_of_text='"):
            prepare_for(source=Source.bins, path=str(web.folder), end_of_text=other_end)

    with pytest.warns(UserWarning, match="the text yields only"):
        other = prepare_for(source=Source.files, glob="*.jsonl", path=three[2].path, tokenizer=None)
    mix.append(MixEntry(name="m", path=str(other.folder)))
    with pytest.raises(ValueError, match=r"data\.mix\[2\]\.path=.*: prepared with tokenizer .*data\.tokenizer=/"):
        prepare_for(source=Source.bins, mix=mix)
    with pytest.raises(ValueError, match=r"data\.tokenizer=.*was prepared with another: set null"):
        prepare_for(source=Source.bins, path=str(other.folder))
    with pytest.raises(ValueError, match=r"data\.path=.*: no prepared\.json in it, so prepare_data"):
        prepare_for(source=Source.bins, path=three[0].path)
