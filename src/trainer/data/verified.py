"""Which token files are known to be complete: hashed once, and again only if size or time have changed.

    verified.json   {"files": {"train.bin": [BYTES, MTIME_NS, SHA256], ...}, "digest": "..."}

Reading a corpus to hash it takes hours at 10^12 tokens, so a start compares the size, the modification time and the
sidecar's SHA-256 with this list. Files that are not listed (bins that were copied or altered, or prepared by an older
version) are read; `data.verify=true` reads all. Ranks that see the same files (inode, size and time) read a part each.
Only `data.verify=true` finds damage that leaves the time unchanged, a disk that returns wrong bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from precision.errors import UserError
from trainer.data.bins import Shard
from trainer.digests import DIGEST, digest_of, write_signed

VERIFIED = "verified.json"
Stamp = tuple[int, int, str]
"""Size in bytes, modification time in ns, SHA-256 (hexadecimal)."""
_THREADS = 8


def alone(value: Any, named: str = "") -> list[Any]:
    """`World.gather` of a single process."""
    return [value]


def stamp(path: Path | int, sha256: str) -> Stamp:
    """Return the stamp of a file (or a descriptor of it) that has this SHA-256 now."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, sha256


def add_verified(folder: Path, stamps: dict[str, Stamp]) -> None:
    """Add complete files of a folder to its list. Raises OSError if it cannot be written."""
    write_signed(folder / VERIFIED, {"files": {**_known(folder), **stamps}})


def check_whole(
    shards: Sequence[Shard], everything: bool, rank: int = 0, gather: Callable[..., list[Any]] = alone
) -> None:
    """Check that all `shards` match their sidecars, and are the same on all ranks, whose nodes may have copies.
    everything: read all of them, even known ones. A collective, by `gather`. Raises UserError, on all ranks, naming the
    first damaged file or the rank that differs."""
    by_path = {shard.path.absolute(): shard for shard in shards}
    opened = [by_path[path] for path in sorted(by_path)]
    known = {folder: _known(folder) for folder in {shard.path.parent for shard in opened}}
    unread = [shard for shard in opened if everything or known[shard.path.parent].get(shard.path.name) != _stamp(shard)]
    tokens = hashlib.sha256("\n".join(shard.sidecar.sha256 for shard in shards).encode()).hexdigest()
    contents = tokens, f"{platform.node()}, {shards[0].path.parent}"
    everyone = gather((_identity(opened), _identity(unread) if unread else "", contents))
    _check_same([theirs for _, _, theirs in everyone])
    if not any(to_read for _, to_read, _ in everyone):
        return
    same = [other for other, (files, _, _) in enumerate(everyone) if files == everyone[rank][0]]
    if len({everyone[other][1] for other in same}) > 1:  # another run has just written a list
        unread = opened
    largest_first = sorted(unread, key=lambda shard: -shard.sidecar.num_tokens)
    part = largest_first[same.index(rank) :: len(same)]  # of about equal size
    with ThreadPoolExecutor(_THREADS) as pool:
        damage = next((each for each in pool.map(_damage, part) if each is not None), None)
    for other, message in enumerate(gather(damage, "verify")):
        if message is not None:
            raise UserError(message if len(same) == len(everyone) else f"rank {other}: {message}")
    if rank == same[0]:
        _remember(unread)


def _stamp(shard: Shard) -> Stamp:
    return stamp(shard.descriptor, shard.sidecar.sha256)


def _identity(shards: Sequence[Shard]) -> str:
    """Return a key that is the same on all nodes with the files on one file system, and different for each copy."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{os.fstat(shard.descriptor).st_ino} {_stamp(shard)}\n".encode())
    return digest.hexdigest()


def _check_same(everyone: Sequence[tuple[str, str]]) -> None:
    """Raise UserError if ranks have different tokens. everyone: contents and place of each rank's."""
    usual = Counter(contents for contents, _ in everyone).most_common(1)[0][0]
    differ = [(rank, place) for rank, (contents, place) in enumerate(everyone) if contents != usual]
    if differ:
        rank, place = differ[0]
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise UserError(
            f"data: rank {rank} ({place}){more} would train on another text than the others: give its node the same "
            "text, or prepare it once, in a data.cache_dir that all nodes share"
        )


def _damage(shard: Shard) -> str | None:
    fix = f"delete {shard.path.parent} and prepare the data again"
    try:
        if shard.sha256() == shard.sidecar.sha256:
            return None
    except OSError as error:
        return f"bins {shard.path}: cannot be read ({error.strerror}): {fix}"
    return f"bins {shard.path}: the contents are not those that its sidecar describes (SHA-256): {fix}"


def _remember(shards: Sequence[Shard]) -> None:
    for folder in {shard.path.parent for shard in shards}:
        try:
            add_verified(folder, {shard.path.name: _stamp(shard) for shard in shards if shard.path.parent == folder})
        except OSError as error:
            why = f"cannot be written ({error.strerror}), so these bins are hashed again at each start"
            warnings.warn(f"{folder / VERIFIED}: {why}; make the folder writable once", stacklevel=2)


def _known(folder: Path) -> dict[str, Stamp]:
    """Return the list, empty if it is missing or damaged: then the files themselves are read."""
    try:
        content: dict[str, Any] = json.loads((folder / VERIFIED).read_text())
        if content[DIGEST] != digest_of(content):
            return {}
        return {name: (size, time, sha256) for name, (size, time, sha256) in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
