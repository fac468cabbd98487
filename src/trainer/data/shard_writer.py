"""Writing bins: one file of tokens at a time, then its sidecar, both on the disk before the caller gets the result."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from trainer.data.bins import Shard, Sidecar, stored
from trainer.data.tokenizer import file_hash
from trainer.data.verified import Stamp, stamp
from trainer.files import create, replace_file, temporary_name


class ShardWriter:
    """A growing shard: it begins with end-of-text, and has it after each document."""

    def __init__(self, path: Path, like: Sidecar) -> None:
        """like: a sidecar with the facts of this one, except counts and digest. Writes to a temporary name until
        `close`: `path` is complete or absent."""
        self.path = path
        self._like = like
        self._written = temporary_name(path)
        self._dtype = stored(like.dtype)
        self._end = np.array([like.end_of_text], self._dtype)
        self._digest = hashlib.sha256()
        self._num_tokens = self._num_documents = self._num_text_bytes = 0
        self._file = create(self._written)
        self._put(self._end)

    def add(self, ids: np.ndarray, ends_document: bool, num_text_bytes: int) -> None:
        """Append ids [n] of a document, or of a piece of one."""
        self._put(ids.astype(self._dtype, copy=False))
        self._num_text_bytes += num_text_bytes
        if ends_document:
            self._put(self._end)
            self._num_documents += 1

    def append(self, shard: Shard) -> None:
        """Append all documents of a shard."""
        facts, step = shard.sidecar, 1 << 24
        for start in range(1, facts.num_tokens, step):
            self._put(shard.read(start, min(step, facts.num_tokens - start)))
        self._num_documents += facts.num_documents
        self._num_text_bytes += facts.num_text_bytes

    def _put(self, ids: np.ndarray) -> None:
        block = ids.tobytes()
        self._file.write(block)
        self._digest.update(block)
        self._num_tokens += len(ids)

    def close(self) -> dict[str, Stamp]:
        """Move the shard and its sidecar into place. Return their stamps by name, of the content that was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        path, sha256 = self.path.with_suffix(".json"), self._digest.hexdigest()
        sidecar = replace(
            self._like,
            num_tokens=self._num_tokens,
            num_documents=self._num_documents,
            num_text_bytes=self._num_text_bytes,
            sha256=sha256,
        )
        write_json(path, asdict(sidecar))
        self._written.replace(self.path)
        return {self.path.name: stamp(self.path, sha256), path.name: stamp(path, file_hash(path))}

    def abandon(self) -> None:
        """Remove all files."""
        self._file.close()
        self._written.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write the file to the disk, completely or not at all."""
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
