"""CSV and TSV: rows with quoted line ends are documents, and what is no row is named by its line."""

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precision.errors import UserError
from trainer.config.data import Format, Source, SourceConfig, source_configs
from trainer.data import DataConfig, Prepared, prepare
from trainer.data.csv_files import FIELDS, OPEN, RETURN, rows_of
from trainer.data.records import Rows, SkipLog
from trainer.data.sources import open_source

PART = source_configs(DataConfig(source=Source.files, path="x.csv"))[0]


def written(rows: list[list[str]], delimiter: str = ",", ends: str = "\r\n") -> bytes:
    text = io.StringIO()
    quoting = csv.QUOTE_ALL if "\\r" in str(rows) else csv.QUOTE_MINIMAL  # the writer takes a \r for no line end
    csv.writer(text, delimiter=delimiter, lineterminator=ends, quoting=quoting).writerows(rows)
    return text.getvalue().encode()


def texts(blocks: Iterator[Rows], log: SkipLog) -> list[str]:
    return [piece.text for block in blocks for piece in block.pieces(log)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=1),
    delimiter=st.sampled_from(",\t"),
    ends=st.sampled_from(["\n", "\r\n"]),
    block=st.sampled_from([1, 3, 1 << 20]),
)
def test_text_is_read_as_written_however_the_file_is_cut(
    rows: list[str], delimiter: str, ends: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("csv_files", "compressed"):
        monkeypatch.setattr(f"trainer.data.{module}.BLOCK_BYTES", block)
    path, log = tmp_path / "x.csv", SkipLog(strict=True)
    path.write_bytes(
        b"\xef\xbb\xbf" + written([["id", "text"], *([str(i), row] for i, row in enumerate(rows))], delimiter, ends)
    )
    assert texts(rows_of(path, "x", PART, delimiter, log), log) == rows


def test_bad_rows_are_named_by_their_line(tmp_path: Path) -> None:
    bad = b'id,text\n1,"two\nlines"\n2\n3,caf\xe9\n4,"a"b\n\n5,\n6,good\n7,"open\n8,lost\n'
    for path, data in ((tmp_path / "x.csv", bad), (tmp_path / "x.csv.gz", gzip.compress(bad))):
        path.write_bytes(data)
        log = SkipLog(strict=False)
        assert texts(rows_of(path, "x", PART, ",", log), log) == ["two\nlines", "good"]
        assert {skipped.why: skipped.first for skipped in log.found.values()} == {
            FIELDS: "line 4, 1 of 2",
            "not UTF-8 text": "line 5",
            "no CSV: ',' expected after '\"'": "line 6",
            "empty": "line 8",
            OPEN: "line 10",
        }
    (tmp_path / "x.csv").write_bytes(b"id,text\r1,a\r")
    log = SkipLog(strict=False)
    assert texts(rows_of(tmp_path / "x.csv", "x", PART, ",", log), log) == [] and RETURN in str(log.found)
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(bad)[:-9])
    log = SkipLog(strict=False)
    texts(rows_of(tmp_path / "x.csv.gz", "x", PART, ",", log), log)
    assert any("cut off" in skipped.why for skipped in log.found.values())


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_damage_is_behind_the_last_row_that_was_read(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("csv_files", "compressed"):
        monkeypatch.setattr(f"trainer.data.{module}.BLOCK_BYTES", block)
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"id,text\n1,a\n2,b\n3,c\n", 0)[:-10])
    log = SkipLog(strict=False)
    assert texts(rows_of(tmp_path / "x.csv.gz", "x", PART, ",", log), log) == ["a", "b"]
    assert [skipped.why for skipped in log.found.values()] == ["cut off, after line 3"]


def test_only_a_damaged_archive_cannot_be_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(name: str) -> str:
        log = SkipLog(strict=False)
        texts(rows_of(tmp_path / name, name, PART, ",", log), log)
        return next(iter(log.found.values())).why

    for name in ("gone.csv", "gone.csv.gz", "gone.csv.zst"):
        assert reason(name).startswith("cannot be read: "), name
        (tmp_path / name).write_bytes(b"id,text\n" + 200 * b"1,a")
    assert reason("gone.csv.gz").startswith("cannot be unpacked: Not a gzipped file")
    assert reason("gone.csv.zst").startswith("cannot be unpacked: ZSTD")
    monkeypatch.setattr("trainer.data.compressed.LONGEST_BYTES", 500)
    assert reason("gone.csv").startswith("cannot be read: a line is longer than")


def test_a_folder_of_csv_and_tsv_is_prepared(prepared: Prepared, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    rows = [[str(i), f"document {i}\nof two lines"] for i in range(30)]
    (folder / "a.csv").write_bytes(written([["id", "body"], *rows]))
    (folder / "b.tsv").write_bytes(written([["id", "body"], *rows[:7]], "\t"))
    data = DataConfig(
        source=Source.files, path=str(folder), glob="*", text_column="body", validation_fraction=0.2,
        tokenizer=str(prepared.tokenizer_path.parent), cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    made = prepare(data, 512)
    assert made.train.sidecar.num_documents + made.validation.sidecar.num_documents == 37
    wrong: SourceConfig = source_configs(DataConfig(source=Source.files, path=str(folder), glob="*.csv"))[0]
    with pytest.raises(
        UserError, match=r"=text: a\.csv has no such column: set one of id, body, the names in its first"
    ):
        list(open_source(wrong).blocks(SkipLog(strict=True)))
    (folder / "a.csv").write_text("id;text\n1;a\n")
    with pytest.raises(
        UserError, match=r"its first row is id;text; separate columns with commas, or with tabs and data"
    ):
        list(open_source(wrong).blocks(SkipLog(strict=True)))
    (folder / "a.csv").write_bytes("text\n1\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"its first row is not UTF-8 text; convert it: iconv -f ENC"):
        list(open_source(wrong).blocks(SkipLog(strict=True)))
    assert Format.csv.value == "csv"
