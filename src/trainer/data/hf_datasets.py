"""Hugging Face datasets through the library `datasets`: from the hub, from a folder of `save_to_disk`, or from a folder
of files as on the hub. Streaming or not, rows arrive as Arrow columns, in batches.

A prepared dataset is not compared with the hub again, so a machine without a network can train on the cache. Another
state of the dataset is another `revision`. `pin` returns the commit that was read: a preparation that resumes uses the
same commit or fails. (Without a network `datasets` returns the newest commit of its own cache, whatever the requested
revision; it does report which one.)
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from precision.errors import UserError
from trainer.config.data import DataConfig, SourceConfig
from trainer.data.corpus import walk
from trainer.data.records import BLOCK_BYTES, Block, Rows, SkipLog, as_bytes, check_column

STREAM_ROWS = 256  # read at once while their length is unknown
MOST_ROWS = 16384


class Dataset:
    """A split of a dataset. It reads and downloads nothing before its blocks are requested."""

    def __init__(self, part: SourceConfig) -> None:
        self.part = part
        self.num_bytes = 0
        self._builder: Any = None
        self._label = str(part.path) if part.key == "data" else part.name
        digest = hashlib.sha256(json.dumps([part.subset, part.split, part.revision]).encode())
        root = self._root
        if root.is_dir():
            digest.update(str(root.resolve()).encode("utf-8", "surrogateescape"))
            paths = (Path(folder, name) for folder, names in walk(root, ()) for name in names)
            for path in sorted(path for path in paths if path.is_file()):
                status = path.stat()
                line = f"{path.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\n"
                digest.update(line.encode("utf-8", "surrogateescape"))
        else:
            digest.update(str(part.path).encode())
        self.fingerprint = digest.hexdigest()

    def blocks(self, log: SkipLog) -> Iterator[Block]:
        yield from self._batches(self._rows, log)

    def sample(self, num_bytes: int, log: SkipLog) -> Iterator[Block]:
        """Sample rows evenly; of a stream take the beginning."""
        rows = self._rows
        if not self.part.streaming and self.num_bytes > num_bytes:
            rows = rows.shard(num_shards=min(self.num_bytes // num_bytes, len(rows)), index=0, contiguous=False)
        taken = 0
        for block in self._batches(rows, log):
            yield block
            taken += block.num_bytes
            if taken >= num_bytes:
                return

    def pin(self, commit: str | None) -> str | None:
        """Hold the dataset at `commit`, if given. Return the commit that is read, or None for a local folder: its
        files are compared themselves. Raises UserError if the library has another commit."""
        if self._root.is_dir():
            return None
        if commit is None and self.part.revision is not None and re.fullmatch(r"[0-9a-f]{40}", self.part.revision):
            commit = self.part.revision
        with self._as_user_error():
            self._builder = self._load(commit or self.part.revision)
        found = str(self._builder.hash)
        if commit is not None and found != commit:
            part = self.part
            raise UserError(
                f"{part.path_key}={part.path}: `datasets` has commit {found[:12]} here, not {commit[:12]}: prepare "
                f"where the hub can be reached, or set {part.key}.revision={found} to use this one"
            )
        return found

    @property
    def _root(self) -> Path:
        return Path(str(self.part.path))

    def _load(self, revision: str | None) -> Any:
        import datasets

        datasets.disable_progress_bars()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without a network it warns at each attempt
        path = self._root.resolve() if self._root.is_dir() else self.part.path  # "." has no name
        return datasets.load_dataset_builder(str(path), name=self.part.subset, revision=revision)

    @contextmanager
    def _as_user_error(self) -> Iterator[None]:
        """Turn any error of the library into a UserError in one line."""
        part = self.part
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # of many classes, from a dozen libraries
            reason = " ".join(str(error.__cause__ or error).split())
            raise UserError(
                f"{part.path_key}={part.path}: `datasets` cannot load it with subset={part.subset} split={part.split} "
                f"revision={part.revision} ({type(error).__name__}: {reason[:300]}): correct that, or repair it"
            ) from error

    @cached_property
    def _rows(self) -> Any:
        """The rows of the text column; sets `num_bytes`. Raises UserError, one line, for any error of the library."""
        part = self.part
        with self._as_user_error():
            is_saved = any((self._root / name).is_file() for name in ("dataset_dict.json", "state.json"))
            rows = self._saved() if is_saved else self._built()
            names = rows.column_names or list(next(iter(rows), {}))
        features = rows.features
        check_column(part, self._label, names, features.arrow_schema if features is not None else None)
        rows = rows.select_columns([part.text_column])
        if not part.streaming:
            self.num_bytes = int(rows.data.nbytes * len(rows) / max(rows.data.num_rows, 1))
        return rows.with_format("arrow")

    def _saved(self) -> Any:
        import datasets

        part, rows = self.part, datasets.load_from_disk(str(self._root))
        if isinstance(rows, datasets.DatasetDict):
            if part.split not in rows:
                names = ", ".join(map(str, rows))
                raise UserError(f"{part.path_key}={part.path}: has no split {part.split}: set one of {names}")
            rows = rows[part.split]
        elif part.split not in (DataConfig.split, str(rows.split)):  # all rows would be that split
            why = f"is a single dataset, without a split {part.split}"
            raise UserError(f"{part.path_key}={part.path}: {why}: leave that out, or save a DatasetDict")
        return rows.to_iterable_dataset() if part.streaming else rows

    def _built(self) -> Any:
        builder = self._builder or self._load(self.part.revision)
        if self.part.streaming:
            return builder.as_streaming_dataset(split=self.part.split)
        builder.download_and_prepare()
        return builder.as_dataset(split=self.part.split)

    def _batches(self, rows: Any, log: SkipLog) -> Iterator[Block]:
        size = STREAM_ROWS
        if not self.part.streaming:
            size = min(max(BLOCK_BYTES * max(len(rows), 1) // max(self.num_bytes, 1), 1), MOST_ROWS)
        done = 0
        try:
            for table in rows.iter(batch_size=size):
                values = as_bytes(table.column(0).combine_chunks())
                numbers = range(done, done + len(values))
                yield Rows(values, numbers, label=self._label)
                done = numbers.stop
        except Exception as error:  # of many classes
            reason = (str(error.__cause__ or error).splitlines() or [""])[0][:200]
            log.lost(self._label, f"cannot be read after row {done}: {type(error).__name__}: {reason}")
