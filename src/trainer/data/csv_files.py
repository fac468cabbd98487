"""CSV (RFC 4180) and TSV: rows of a file whose first row names the columns.

A quoted field may hold line ends, and where a quote opens depends on everything before it. So the process that deals
out the blocks reads a file in order, a line at a time. The log names a row by its first line.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from trainer.config.data import SourceConfig
from trainer.data.compressed import LONGEST_BYTES, TOO_LONG, unpack_error, whole_lines
from trainer.data.records import BLOCK_BYTES, Rows, SkipLog, check_column

RETURN = "a carriage return alone, outside of quotes: lines end in LF or CRLF"
OPEN = "a quote that is not closed: the rest cannot be read"
FIELDS = "more or fewer fields than the header names"


def rows_of(path: Path, label: str, part: SourceConfig, delimiter: str, log: SkipLog) -> Iterator[Rows]:
    """Yield the rows of a file, compressed or not, up to the first damage. Raises UserError if it lacks the column."""
    csv.field_size_limit(LONGEST_BYTES)
    values: list[bytes] = []
    lines: list[int] = []
    names: list[str] = []
    size, line = 0, 1
    try:
        for line, row in _rows(path, label, delimiter, log):
            if not names:
                names = row
                check_column(part, label, names, None)
                column = names.index(part.text_column)
            elif len(row) != len(names):
                log.add(label, FIELDS, f"line {line}", which=f"{len(row)} of {len(names)}")
            else:
                values.append(row[column].encode("utf-8", "surrogateescape"))
                lines.append(line)
                size += len(values[-1])
                if size >= BLOCK_BYTES:
                    yield Rows(values, lines, "line", label=label)
                    values, lines, size = [], [], 0
    except OSError as error:
        log.lost(label, f"{unpack_error(error)}, after line {line}")
    if values:
        yield Rows(values, lines, "line", label=label)


def _rows(path: Path, label: str, delimiter: str, log: SkipLog) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not blank, with its first line. Bytes that are not UTF-8 become surrogates."""
    rows = csv.reader(_text_lines(path), delimiter=delimiter, strict=True)
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            words = str(error)
            if "end of data" in words:
                log.add(label, OPEN, f"line {line}", count=0)
                return
            why = TOO_LONG if "limit" in words else RETURN if "new-line" in words else f"no CSV: {words}"
            log.add(label, why, f"line {line}")
            continue
        if row is None:
            return
        if row:
            yield line, row


def _text_lines(path: Path) -> Iterator[str]:
    """Yield lines with their ends, without a byte-order mark. Raises OSError as `whole_lines` does."""
    for number, data in enumerate(whole_lines(path)):
        text = data.decode("utf-8", "surrogateescape")
        yield from io.StringIO(text if number else text.removeprefix("\ufeff"), newline="\n")
