"""Preparing: once for each state of the source, whole or not at all, and always the same bits."""

import itertools
import json
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import snapshot

from trainer.config.data import MixEntry, source_configs
from trainer.data import DataConfig, Prepared, Source, load_tokenizer, prepare
from trainer.data.corpus import choose_held_out, scan
from trainer.data.prepared import accept_prepared

MakeConfig = Callable[..., DataConfig]

PREPARE = """
import os, signal, sys
from trainer.data import DataConfig, Source, prepare

def progress(what, done, total):
    if what == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

data = DataConfig(source=Source.text, path=sys.argv[1], cache_dir=sys.argv[2], validation_fraction=0.2)
print(prepare(data, 512, progress).built)
"""


def prepare_elsewhere(programs: Any, folder: Path, cache: Path, killed_while: str = "never") -> Any:
    """prepare() in a process of its own, on one thread; prints whether it built."""
    return programs.start("-c", PREPARE, folder, cache, killed_while, environment={"RAYON_NUM_THREADS": "1"})


def texts(prepared: Prepared, name: str) -> list[str]:
    """The documents that a split's bins decode to."""
    bins = getattr(prepared, name)
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    (ends,) = np.nonzero(bins.tokens == bins.sidecar.end_of_text)
    assert ends[0] == 0
    assert ends[-1] == bins.num_tokens - 1
    return [tokenizer.decode(bins.tokens[a + 1 : b].tolist()) for a, b in itertools.pairwise(ends)]


def test_a_place_where_no_file_can_be_made_is_refused_at_once(make_config: MakeConfig, own_corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"/proc/x: cannot be written \(.*\): set a folder that can"):
        prepare(make_config(own_corpus), 512, folder=Path("/proc/x"))


def test_bins_decode_to_the_files_of_their_split(prepared: Prepared, corpus_folder: Path) -> None:
    documents = scan(*source_configs(DataConfig(source=Source.text, path=str(corpus_folder)))).documents
    held_out = choose_held_out(documents, 0.2)
    train = [document for document in documents if document not in held_out]
    for name, side in (("train", train), ("validation", held_out)):
        assert texts(prepared, name) == [(corpus_folder / document.path).read_text() for document in side]
        bins = getattr(prepared, name)
        assert bins.sidecar.num_documents == len(side) > 1
        assert bins.sidecar.num_text_bytes == sum(document.num_bytes for document in side)
        assert bins.tokens.max() < bins.sidecar.vocab_size == 512


def test_a_changed_added_or_removed_file_rebuilds(make_config: MakeConfig, own_corpus: Path) -> None:
    data = make_config(own_corpus)
    victim = min(own_corpus.glob("*.py"))
    before = texts(prepare(data, 300), "train") + texts(prepare(data, 300), "validation")
    assert not any("changed = True" in text for text in before)

    victim.write_text("changed = True\n" * 9)
    changed = prepare(data, 300)
    assert changed.built
    assert "changed = True\n" * 9 in texts(changed, "train") + texts(changed, "validation")

    (own_corpus / "new.py").write_text("new = True\n")
    assert prepare(data, 300).built
    victim.unlink()
    assert prepare(data, 300).built
    (own_corpus / "notes.md").write_text("not a document")
    assert not prepare(data, 300).built


def test_each_setting_that_matters_has_its_own_cache(make_config: MakeConfig, own_corpus: Path) -> None:
    data = make_config(own_corpus)
    other_split, other_end = replace(data, validation_fraction=0.5), replace(data, end_of_text="<end>")
    results = [prepare(data, 300), prepare(data, 301), prepare(other_split, 300), prepare(other_end, 300)]
    assert all(result.built for result in results)
    assert len({result.folder for result in results}) == 4


def test_processes_that_prepare_at_once_build_once_and_the_same_bits(
    prepared: Prepared, corpus_folder: Path, tmp_path: Path, programs: Any
) -> None:
    processes = [prepare_elsewhere(programs, corpus_folder, tmp_path) for _ in range(2)]
    assert sorted(process.communicate()[0] for process in processes) == ["False\n", "True\n"]
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert snapshot(folder) == snapshot(prepared.folder)


@pytest.mark.parametrize("stage", ["training the tokenizer", "packing the text"])
def test_data_whose_preparation_was_killed_is_never_used(
    prepared: Prepared, corpus_folder: Path, make_config: MakeConfig, stage: str, programs: Any
) -> None:
    data = make_config(corpus_folder)
    process = prepare_elsewhere(programs, corpus_folder, Path(data.cache_dir), stage)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [path.suffix for path in Path(data.cache_dir).iterdir() if path.is_dir()] == [".partial"]
    result = prepare(data, 512)
    assert result.built
    assert snapshot(result.folder) == snapshot(prepared.folder)
    assert [path for path in Path(data.cache_dir).iterdir() if path.is_dir()] == [result.folder]


def test_finished_work_survives_a_kill_before_it_has_its_name(make_config: MakeConfig, own_corpus: Path) -> None:
    made = prepare(make_config(own_corpus), 300).folder
    file = (made / "train.bin").stat().st_ino
    made.rename(made.with_name(f"{made.name}.partial"))
    again = prepare(make_config(own_corpus), 300).folder
    assert again == made and (made / "train.bin").stat().st_ino == file and not (made / "key").exists()


def test_unfinished_work_for_a_folder_is_used_for_the_same_data_only(
    make_config: MakeConfig, own_corpus: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    """Of another preparation that was to have this name, not even the tokenizer is used."""
    (own_corpus / "bad.py").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"bad\.py"):
        prepare(make_config(own_corpus), 300, folder=tmp_path / "out")
    assert (tmp_path / "out.partial" / "tokenizer.json").is_file()
    elsewhere = prepare(make_config(corpus_folder), 512)
    assert snapshot(prepare(make_config(corpus_folder), 512, folder=tmp_path / "out").folder) == snapshot(
        elsewhere.folder
    )


def test_a_source_of_a_mix_that_is_read_in_another_way_is_other_data(make_config: MakeConfig, tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps({"text": f"document {n}"}) + "\n")
    read = [MixEntry("a", source=source, path=str(tmp_path), glob="*.jsonl") for source in (Source.text, Source.files)]
    as_text, as_lines = (prepare(make_config(tmp_path, path=None, mix=[entry]), 280) for entry in read)
    assert as_text.folder != as_lines.folder


def test_a_source_that_changes_while_it_is_read_is_refused(make_config: MakeConfig, own_corpus: Path) -> None:
    data = make_config(own_corpus)

    def edit(what: str, done: int, total: int) -> None:
        if what == "packing the text" and done == total:
            (own_corpus / "new.py").write_text("new = True\n")

    with pytest.raises(ValueError, match=r"changed while they were read: start again"):
        prepare(data, 300, edit)
    assert not [path for path in Path(data.cache_dir).iterdir() if path.is_dir() and path.suffix != ".partial"]
    assert prepare(data, 300).built


def test_progress_reaches_the_end_of_each_stage(make_config: MakeConfig, own_corpus: Path) -> None:
    lines: list[tuple[str, int, int]] = []
    prepare(make_config(own_corpus), 300, lambda *line: lines.append(line))
    stages = list(dict.fromkeys(what for what, _, _ in lines))
    assert stages == ["training the tokenizer", "packing the text"]
    for stage in stages:
        done = [(done, total) for what, done, total in lines if what == stage]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1]


def test_a_damaged_file_is_named_and_left_out_only_if_that_is_allowed(
    make_config: MakeConfig, own_corpus: Path
) -> None:
    data = make_config(own_corpus)
    clean = prepare(replace(data, skip_damaged=True), 300)
    assert clean.left_out == () and clean.folder == prepare(data, 300).folder  # allowed, and nothing to leave out

    (own_corpus / "latin.py").write_bytes("# é ".encode("latin-1"))
    (own_corpus / "gone.py").symlink_to("nowhere")
    says = r"data\.skip_damaged=false: gone\.py: a dangling link: .*: repair or remove it, or set data\.skip_damaged="
    with pytest.raises(ValueError, match=says):
        prepare(data, 300)
    result = prepare(replace(data, skip_damaged=True), 300)
    assert [str(damage) for damage in result.left_out][1] == "latin.py (not UTF-8 text, byte 2 in line 1)"
    facts = result.train.sidecar
    assert facts.num_documents + result.validation.sidecar.num_documents == 10
    assert facts.source_fingerprint != clean.train.sidecar.source_fingerprint
    # the same tokens in the same order, however often; and what was left out stays refused where it is not allowed
    again = prepare(replace(data, skip_damaged=True), 300)
    assert not again.built and again.left_out == result.left_out
    assert facts.sha256 == clean.train.sidecar.sha256
    with pytest.raises(ValueError, match=r"cannot be used: .*, and delete .*; or set data\.skip_damaged=true"):
        prepare(data, 300)


def test_a_full_disk_is_reported_and_leaves_no_partial_file(make_config: MakeConfig, own_corpus: Path) -> None:
    data = make_config(own_corpus)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(
            ValueError, match=r"data\.cache_dir=.*: text-\w+ cannot be written \(File too large\): free"
        ):
            prepare(data, 300)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in Path(data.cache_dir).iterdir() if path.is_dir()]
    assert prepare(data, 300).built


def test_a_given_tokenizer_is_used_as_it_is(prepared: Prepared, make_config: MakeConfig, own_corpus: Path) -> None:
    data = make_config(own_corpus, tokenizer=str(prepared.tokenizer_path))
    result = prepare(data, 1000)
    assert result.tokenizer_hash == prepared.tokenizer_hash
    assert result.train.sidecar.vocab_size == 512
    with pytest.raises(ValueError, match=r"model\.vocab_size=511: the tokenizer has 512 entries: set at least 512"):
        prepare(data, 511)
    with pytest.raises(ValueError, match=r"data\.end_of_text=</s>: not a token"):
        prepare(replace(data, end_of_text="</s>"), 1000)


def test_the_tokenizer_learns_from_a_sample_of_the_set_size(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.tokenizer_sample.MEGABYTE", 10_000)
    folder = tmp_path / "large"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.py").write_text(f"{number}\n" * 2000)
    data = make_config(folder, tokenizer_sample_mb=1, validation_fraction=0.01)
    totals: dict[str, int] = {}
    prepare(data, 257, lambda what, done, total: totals.update({what: total}))
    assert totals == {"training the tokenizer": 3 * 4000, "packing the text": 6 * 4000}


def test_a_cache_without_its_tokenizer_is_refused(make_config: MakeConfig, own_corpus: Path) -> None:
    (prepare(make_config(own_corpus), 300).folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json: the file is missing: delete "):
        prepare(make_config(own_corpus), 300)


def test_files_that_leave_nothing_to_train_on_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.py").write_text("a text\n" * 50)
    with pytest.raises(ValueError, match=r"validation_fraction=0\.999: leaves none of 2 file.*: lower it, or give"):
        prepare(make_config(tmp_path, validation_fraction=0.999), 300)


def test_advice_keeps_a_folder_that_is_not_prepared_data(make_config: MakeConfig, own_corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.path=.*: no prepared\.json in it[^\n]*or read text with") as as_bins:
        prepare(make_config(own_corpus, source=Source.bins), 300)
    with pytest.raises(ValueError, match="exists and is not prepared data: choose a folder that does not exist") as out:
        prepare(make_config(own_corpus), 300, folder=own_corpus)
    assert "delete" not in f"{as_bins.value} {out.value}"


def test_a_cache_that_cannot_be_written_is_named(make_config: MakeConfig, own_corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").touch()
    with pytest.raises(ValueError, match=r"data\.cache_dir=.*occupied: cannot be written \([^\n]*\): set a folder"):
        prepare(make_config(own_corpus, cache_dir=str(tmp_path / "occupied")), 300)
    with pytest.raises(ValueError, match=r"^/.*occupied/x: cannot be written"):
        prepare(make_config(own_corpus), 300, folder=tmp_path / "occupied" / "x")


@pytest.mark.parametrize(
    ("source", "glob", "refused"),
    [
        (Source.text, "**/*", True),
        (Source.files, "*.txt | **/*.json", True),
        (Source.hf, "**/*", True),
        (Source.text, "*.py", False),
    ],
)
def test_a_place_whose_files_would_be_text_is_refused_before_anything_is_written(
    make_config: MakeConfig, own_corpus: Path, source: Source, glob: str, refused: bool
) -> None:
    """It ended in "changed while they were read", each time."""
    (own_corpus / "a.txt").write_text("a line\n" * 30)
    data, before = make_config(own_corpus, source=source, glob=glob), sorted(own_corpus.rglob("*"))
    if not refused:
        assert prepare(data, 300, folder=own_corpus / "out").built
        return
    for folder, key in ((own_corpus / "out", str(own_corpus)), (None, r"data\.cache_dir=")):
        with pytest.raises(ValueError, match=rf"^{key}.*: its files would be text of data\.path=.*; choose a folder"):
            prepare(replace(data, cache_dir=str(own_corpus / "out")), 300, folder=folder)
    assert sorted(own_corpus.rglob("*")) == before


def test_only_binary_files_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        ValueError, match=r"no text to train a tokenizer on in [^\n]*: .*not UTF-8 text; convert it: iconv -f"
    ):
        prepare(make_config(tmp_path), 300)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("prepared.json", lambda content: content["train"].reverse(), "prepared.json: was altered"),
        ("train-00001.json", lambda content: content.update(end_of_text=1), "train-00001.json: was altered"),
    ],
)
def test_an_altered_list_of_shards_or_sidecar_is_refused_until_it_is_accepted(
    own_corpus: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[dict[str, Any]], Any],
    says: str,
) -> None:
    monkeypatch.setattr("trainer.data.folder_builder.MEGABYTE", 20_000)  # several shards of a small corpus
    config = make_config(own_corpus, shard_mb=1, workers=1)
    folder = prepare(config, 300).folder
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=says):
        prepare(config, 300)
    accept_prepared(folder)
    assert prepare(config, 300).folder == folder


def test_a_key_missing_in_the_listing_is_one_line(own_corpus: Path, make_config: MakeConfig) -> None:
    config = make_config(own_corpus)
    folder = prepare(config, 300).folder
    content = json.loads((folder / "prepared.json").read_text())
    del content["documents"]
    (folder / "prepared.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"prepared\.json: was altered \(it has no key documents\)"):
        prepare(config, 300)
