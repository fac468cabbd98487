"""What cannot be used is an error that names it, or is left out and counted, as configured; never silently."""

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from trainer.config.data import Format, MixEntry, Stop
from trainer.data import DataConfig, Prepared, Source, prepare
from trainer.data.compressed import unpack

GOOD = [json.dumps({"text": f"document {n} " * (n % 7 + 1)}).encode() for n in range(60)]
LONG = [json.dumps({"text": f"{n * n * 7919} {n} " * 50}).encode() for n in range(1000)]
BAD = {
    "not JSON": b'{"text": "cut o',
    "not UTF-8 text": '{"text": "é"}'.encode("latin-1"),
    "no key text, which data.text_column names": b'{"body": "else", "id": 3}',
    "not a JSON object": b'["text"]',
    "the value of text is not text": b'{"text": 7}',
    "not Unicode text": rb'{"text": "half \ud83d"}',
}
EMPTY = [b'{"text": ""}', b'{"text": null}']


@pytest.fixture
def files(prepared: Prepared, tmp_path: Path) -> DataConfig:
    """Reads the folder `files`, with a tokenizer that is there."""
    (tmp_path / "files").mkdir()
    return DataConfig(
        source=Source.files,
        path=str(tmp_path / "files"),
        glob="*",
        tokenizer=str(prepared.tokenizer_path),
        cache_dir=str(tmp_path / "cache"),
        validation_fraction=0.2,
    )


def folder(data: DataConfig) -> Path:
    return Path(str(data.path))


def count(prepared: Prepared) -> int:
    return prepared.train.sidecar.num_documents + prepared.validation.sidecar.num_documents


@pytest.mark.parametrize("why", list(BAD))
def test_a_bad_line_is_named(files: DataConfig, why: str) -> None:
    (folder(files) / "x.jsonl").write_bytes(b"\n".join([*GOOD, BAD[why], *GOOD]))
    says = rf"data\.skip_damaged=false: x\.jsonl, line {len(GOOD) + 1}[^\n]*: {why}: repair or remove it, or set"
    with pytest.raises(ValueError, match=says) as error:
        prepare(files, 512)
    assert "\n" not in str(error.value)
    if why.startswith("no key text"):
        assert f"line {len(GOOD) + 1}, which has body, id: no key text, which data.text_column" in str(error.value)


def test_lines_are_counted_over_blocks_and_in_packed_files(files: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("records", "sources"):
        monkeypatch.setattr(f"trainer.data.{module}.BLOCK_BYTES", 500)
    content = b"\n".join([*GOOD, b"{cut o", *GOOD])
    for path, data in (("x.jsonl", content), ("x.jsonl.gz", gzip.compress(content))):
        (folder(files) / path).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{path}, line {len(GOOD) + 1}: not JSON: repair"):
            prepare(files, 512)
        (folder(files) / path).unlink()


def test_far_into_a_file_a_line_is_named_by_its_byte(files: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.records.COUNTED_BYTES", 0)
    monkeypatch.setattr("trainer.data.sources.BLOCK_BYTES", 500)
    (folder(files) / "x.jsonl").write_bytes(b"\n".join([*GOOD, b"{cut o"]))
    with pytest.raises(ValueError, match=rf"the line at byte {sum(len(line) + 1 for line in GOOD)}: not JSON"):
        prepare(files, 512)


@pytest.mark.parametrize("given", [True, False])
def test_an_array_over_several_lines_is_named_as_one(files: DataConfig, given: bool) -> None:
    """With a tokenizer, and without one, which would have to learn from it."""
    (folder(files) / "x.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=2))
    config = files if given else replace(files, tokenizer=None)
    with pytest.raises(ValueError, match=r"x\.json, line 1: one JSON value for the whole file .*jq -c") as error:
        prepare(config, 512)
    assert "line 2" not in str(error.value)


def test_in_a_mix_the_key_of_the_source_is_named(files: DataConfig) -> None:
    (folder(files) / "x.jsonl").write_bytes(b"\n".join([b'{"content": "c"}'] * 9))
    (folder(files) / "y.csv").write_text("id;text\n7;b\n")
    entries = [MixEntry(name=each, path=files.path, glob=f"*.{each}", text_column="body") for each in ("jsonl", "csv")]
    mixed = replace(files, path=None, tokenizer=None)
    with pytest.raises(ValueError, match=r"no key body, which (data\.mix\[0\]\.text_column) names; set \1$") as error:
        prepare(replace(mixed, mix=entries[:1]), 512)
    assert "line 1, which has content: no key" in str(error.value)
    with pytest.raises(ValueError, match=r"with tabs and data\.mix\[0\]\.format=tsv,"):
        prepare(replace(mixed, mix=entries[1:]), 512)


def test_a_byte_order_mark_is_no_part_of_the_first_line(files: DataConfig) -> None:
    (folder(files) / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(GOOD))
    assert count(prepare(files, 512)) == len(GOOD)


def test_bad_lines_are_left_out_and_counted_by_kind(files: DataConfig) -> None:
    lines = [*GOOD, *BAD.values(), *GOOD[:5], BAD["not JSON"], b"", *EMPTY, b""]
    (folder(files) / "x.jsonl").write_bytes(b"\n".join(lines))
    (folder(files) / "nothing.jsonl").touch()
    result = prepare(replace(files, skip_damaged=True), 512)
    counts = {(each.path, each.why): each.count for each in result.skipped}
    expected = {("x.jsonl", why): 1 for why in BAD} | {("x.jsonl", "empty"): 2, ("nothing.jsonl", "empty"): 1}
    assert counts == expected | {("x.jsonl", "not JSON"): 2}
    assert count(result) == len(GOOD) + 5 and result.left_out == ()
    assert f"2 documents of x.jsonl (not JSON; first at line {len(GOOD) + 1})" in map(str, result.skipped)
    with pytest.raises(ValueError, match=r"data\.skip_damaged=false: .* and \d more cannot be used: .*, and delete"):
        prepare(files, 512)


def test_empty_documents_are_no_damage_and_still_counted(files: DataConfig) -> None:
    (folder(files) / "x.jsonl").write_bytes(b"\n".join([*GOOD, *EMPTY]))
    result = prepare(files, 512)
    assert [str(each) for each in result.skipped] == [f"2 documents of x.jsonl (empty; first at line {len(GOOD) + 1})"]


def pack_gz(path: Path) -> None:
    path.with_name("x.jsonl.gz").write_bytes(gzip.compress(b"\n".join(LONG)))


def pack_zst(path: Path) -> None:
    path.with_name("x.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(LONG)))


def pack_parquet(path: Path) -> None:
    texts = [json.loads(line)["text"] for line in LONG[:500]]
    parquet.write_table(pyarrow.table({"text": texts}), path.with_name("x.parquet"), row_group_size=100)


@pytest.mark.parametrize("pack", [pack_gz, pack_zst, pack_parquet])
def test_a_file_that_is_cut_off_is_named_and_what_it_has_left_is_used(
    files: DataConfig, pack: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.records.BLOCK_BYTES", 20_000)
    pack(folder(files) / "any")
    (path,) = folder(files).iterdir()
    (folder(files) / "y.jsonl").write_bytes(b"\n".join(GOOD))
    assert prepare(files, 512).skipped == ()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3 * 2])
    with pytest.raises(ValueError, match=rf"data\.skip_damaged=false: {path.name}: cut off.*: repair"):
        prepare(files, 512)
    result = prepare(replace(files, skip_damaged=True), 512)
    (lost,) = result.left_out
    assert lost.path == path.name and lost.why.startswith("cut off")
    if pack is pack_parquet:
        assert count(result) == len(GOOD)  # where its columns are stands at its end
    else:
        assert len(GOOD) < count(result) < len(GOOD) + len(LONG)
    again = prepare(replace(files, skip_damaged=True, cache_dir=files.cache_dir + "2"), 512)
    assert again.train.sidecar == result.train.sidecar  # the same is left out


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.txt.gz"])
def test_a_file_is_read_up_to_a_line_too_long_for_memory(
    files: DataConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of gigabytes would be in memory as a whole."""
    for module in ("compressed", "records", "sources"):
        monkeypatch.setattr(f"trainer.data.{module}.BLOCK_BYTES", 1000)
        monkeypatch.setattr(f"trainer.data.{module}.LONGEST_BYTES", 5000)
    content = b"\n".join([*GOOD, json.dumps({"text": "long " * 2000}).encode(), *GOOD])
    (folder(files) / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (folder(files) / "y.jsonl").write_bytes(b"\n".join(GOOD))
    with pytest.raises(ValueError, match=rf"data\.skip_damaged=false: {name}.*: .*longer than "):
        prepare(files, 512)
    result = prepare(replace(files, skip_damaged=True), 512)
    (lost,) = result.left_out
    assert result.skipped == (lost,) and "longer than 256 MiB" in lost.why
    assert (count(result) == len(GOOD)) is (name == "x.txt.gz") and count(result) <= 2 * len(GOOD)


def test_a_damaged_row_group_costs_its_rows(files: DataConfig) -> None:
    pack_parquet(folder(files) / "any")
    path = folder(files) / "x.parquet"
    group = parquet.ParquetFile(path).metadata.row_group(2).column(0)
    start = group.dictionary_page_offset or group.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 200] = b"\xff" * 200
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.parquet, row 200: the row group cannot be read: repair"):
        prepare(files, 512)
    result = prepare(replace(files, skip_damaged=True), 512)
    assert count(result) == 400
    assert [str(each) for each in result.skipped] == [
        "100 documents of x.parquet (the row group cannot be read; first at row 200)"
    ]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_what_comes_before_damage_at_the_end_of_a_compressed_file_is_read(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    """Of a wrong checksum or trailing bytes, and of a file that is cut off."""
    content, name = b"\n".join(LONG), "x.gz" if pack is gzip.compress else "x.zst"
    whole = pack(content)
    flipped = whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]
    most = len(content) - (0 if pack is gzip.compress else 1 << 14)
    cut_off = most - 2000 if pack is gzip.compress else 1
    for damaged, least in ((flipped, most), (whole + b"garbage", most), (whole[:-20], cut_off)):
        if pack is zstandard.compress and damaged is flipped:
            continue  # it has no checksum
        (tmp_path / name).write_bytes(damaged)
        found: list[bytes] = []
        with pytest.raises(OSError, match=r"."):
            found.extend(unpack(tmp_path / name))
        assert content.startswith(b"".join(found)) and len(b"".join(found)) >= least


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()], ids=str)
def test_bytes_of_a_text_column_that_are_no_text_are_named(files: DataConfig, kind: pyarrow.DataType) -> None:
    rows = pyarrow.array([*(line.decode() for line in GOOD), "Ä" * 20], kind)
    parquet.write_table(pyarrow.table({"text": rows}), folder(files) / "x.parquet", compression="none")
    path = folder(files) / "x.parquet"
    path.write_bytes(path.read_bytes().replace("Ä".encode(), b"\xff\xff"))
    with pytest.raises(ValueError, match=rf"x\.parquet, row {len(GOOD)}: not UTF-8 text: repair"):
        prepare(files, 512)


def test_two_columns_of_the_name_are_an_error(files: DataConfig) -> None:
    rows = pyarrow.array(["a text"] * 9)
    parquet.write_table(pyarrow.table([rows, rows], names=["text", "text"]), folder(files) / "x.parquet")
    with pytest.raises(ValueError, match=r"data\.text_column=text: x\.parquet has several columns of that name"):
        prepare(files, 512)


def test_a_name_that_is_not_utf8_is_printable(files: DataConfig) -> None:
    (folder(files) / "x.jsonl").write_bytes(b"\n".join(GOOD))
    (folder(files) / os.fsdecode(b"\xff.jsonl")).touch()
    (skipped,) = prepare(files, 512).skipped
    assert "\\udcff.jsonl" in f"{skipped}{skipped.line()}".encode().decode()


def test_a_column_that_is_missing_or_no_text_is_an_error_however_configured(files: DataConfig) -> None:
    pack_parquet(folder(files) / "any")
    lenient = replace(files, skip_damaged=True)
    with pytest.raises(
        ValueError, match=r"data\.text_column=body: x\.parquet has no such column: set one of text, .*glob$"
    ):
        prepare(replace(lenient, text_column="body"), 512)
    parquet.write_table(pyarrow.table({"text": [[1]], "n": [1]}), folder(files) / "x.parquet")
    for column in ("text", "n"):
        with pytest.raises(ValueError, match=rf"data\.text_column={column}: this column of x\.parquet is .*, not text"):
            prepare(replace(lenient, text_column=column), 512)
    parquet.write_table(pyarrow.table({"text": [{"of": "x"}]}), folder(files) / "x.parquet")
    with pytest.raises(ValueError, match=r"data\.text_column=text: this column of x\.parquet is struct.*, not text"):
        prepare(lenient, 512)
    (folder(files) / "x.parquet").unlink()
    (folder(files) / "x.jsonl").write_bytes(b"\n".join(GOOD))
    with pytest.raises(ValueError, match=r"leaves nothing of files to hold out.*60 documents of .*no key body"):
        prepare(replace(lenient, text_column="body"), 512)


def test_a_column_with_a_dot_in_its_name_is_not_one_within_another(files: DataConfig) -> None:
    texts = [json.loads(line)["text"] for line in GOOD]
    table = pyarrow.table({"a": [{"b": "nested"}] * len(GOOD), "a.b": texts})
    parquet.write_table(table, folder(files) / "x.parquet")
    result = prepare(replace(files, text_column="a.b"), 512)
    assert sum(size for _, size in result.documents.values()) + result.validation.sidecar.num_text_bytes == sum(
        len(text) for text in texts
    )


def test_a_damaged_file_that_is_the_only_one_is_named(files: DataConfig) -> None:
    (folder(files) / "x.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"no text to train a tokenizer on .*: x\.jsonl\.gz: cannot be unpacked: Not"):
        prepare(replace(files, tokenizer=None, skip_damaged=True), 512)


def test_files_without_a_known_suffix(files: DataConfig) -> None:
    (folder(files) / "x.data").write_bytes(b"\n".join(GOOD))
    with pytest.raises(ValueError, match=r"data\.format=auto: x\.data has no suffix .*data\.format=jsonl"):
        prepare(files, 512)
    assert count(prepare(replace(files, format=Format.jsonl), 512)) == len(GOOD)
    (folder(files) / "x.data").rename(folder(files) / "x.parquet.gz")
    with pytest.raises(ValueError, match=r"data\.glob=.*: x\.parquet\.gz is compressed Parquet: unpack it"):
        prepare(files, 512)


def test_a_suffix_in_capitals_means_the_same(files: DataConfig) -> None:
    (folder(files) / "X.JSONL.GZ").write_bytes(gzip.compress(b"\n".join(GOOD)))
    rows = "\n".join(["text", *(json.loads(line)["text"] + "!" for line in GOOD)])
    (folder(files) / "Y.CSV.ZST").write_bytes(zstandard.compress(rows.encode()))
    assert count(prepare(files, 512)) == 2 * len(GOOD)


def test_a_source_without_text_cannot_be_repeated(files: DataConfig) -> None:
    (folder(files) / "x.jsonl").write_bytes(b"\n".join(GOOD))
    (folder(files) / "y.csv").write_bytes(b"text,n\n,1\n,2\n")
    mix = [MixEntry(name, 1.0, path=f"{files.path}/{name}.{kind}") for name, kind in (("x", "jsonl"), ("y", "csv"))]
    with pytest.raises(ValueError, match=r"^data\.mix\[1\]\.path=.*y\.csv: has no text to repeat: leave it out"):
        prepare(replace(files, path=None, mix=mix, stop=Stop.all_exhausted), 512)


def test_nothing_held_out_is_reported(files: DataConfig) -> None:
    (folder(files) / "x.jsonl").write_bytes(b"\n".join(GOOD[:3]))
    with pytest.raises(ValueError, match=r"data\.validation_fraction=0\.001: leaves nothing of files to hold out"):
        prepare(replace(files, validation_fraction=0.001), 512)


def test_what_datasets_cannot_load_is_one_line(files: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", files.cache_dir + "hf")
    (folder(files) / "x.jsonl").write_bytes(b"\n".join(GOOD))
    hf = replace(files, source=Source.hf)
    assert count(prepare(hf, 512)) == len(GOOD)
    for changes, message in [
        ({"split": "tset"}, r"data\.path=.*split=tset.*train"),
        ({"text_column": "body"}, r"data\.text_column=body: .* has no such column: set one of text"),
        ({"subset": "de"}, r"data\.path=.*subset=de.*default"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            prepare(replace(hf, **changes), 512)
        assert "\n" not in str(error.value)
    configs = [f"- config_name: {name}\n  data_files: x.jsonl\n" for name in ("en", "de")]
    (folder(files) / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    with pytest.raises(ValueError, match=r"subset=None.*Please pick one among the available configs: \['en', 'de'\]"):
        prepare(hf, 512)
    (folder(files) / "README.md").unlink()
    (folder(files) / "y.jsonl").write_bytes(b"\n".join([*GOOD, b"{cut o"]))
    with pytest.raises(ValueError, match=r"data\.skip_damaged=false: /.*: cannot be read after row \d+: "):
        prepare(replace(hf, streaming=True), 512)
