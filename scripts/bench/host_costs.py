"""The cost of a start, a resume and a step on the host, at simulated sizes: python scripts/bench/host_costs.py

Shards are sparse files, checkpoints are indexes without tensors, and a rank of thousands is a loader that reads its
share. Each line is a cost per unit, from which docs/scale.md computes whole runs: CPU seconds, which other work on the
machine changes little. Takes some seconds, 1 GB of memory at most, and no GPU.
"""

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import frame
import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from trainer.checkpoint import ShardView
from trainer.checkpoint.storage import SavedTensors
from trainer.config.timeline import Segment
from trainer.data import Bins, Loader, check_whole
from trainer.data.bins import FORMAT, Sidecar
from trainer.data.verified import add_verified, stamp
from trainer.launch.command_line import Parser, guarded

SHARD_TOKENS = 30_000_000
"""Tokens in a shard of 128 MB of text, at about 4.3 bytes a token."""


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """Return the CPU seconds of all threads: the minimum of some calls."""
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def sparse_shards(folder: Path, count: int) -> list[Path]:
    """Create shards of zeros that take no disk space, with their sidecars and the list of complete files."""
    digest, stamps, paths = "0" * 64, {}, []
    for number in range(count):
        path = folder / f"train-{number:05d}.bin"
        with path.open("wb") as file:
            file.truncate(2 * SHARD_TOKENS)
        sidecar = Sidecar(FORMAT, "text", SHARD_TOKENS, 9, 9, "uint16", digest, 50_000, 0, "t", "s")
        path.with_suffix(".json").write_text(json.dumps(asdict(sidecar)))
        stamps[path.name] = stamp(path, digest)
        paths.append(path)
    add_verified(folder, stamps)
    return paths


def index_of(folder: Path, tensors: int, ranks: int) -> float:
    """Write the index of a checkpoint of tensors that are cut over ranks. Returns its bytes."""
    index = {
        f"optimizer/layers.{number}.moe.experts.gate_up.exp_avg": {
            "dtype": "F32",
            "shape": [ranks, 7168],
            "pieces": [
                {"offsets": [rank, 0], "shape": [1, 7168], "file": f"rank{rank:05d}.safetensors", "key": f"x@{rank},0"}
                for rank in range(ranks)
            ],
        }
        for number in range(tensors)
    }
    (folder / "tensors.json").write_text(json.dumps(index))
    return (folder / "tensors.json").stat().st_size


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--shards", type=int, default=1000, help="sparse files of 60 MB (default 1000)")
    parser.add_argument("--ranks", type=int, default=512, help="pieces of a tensor, shares of a batch (default 512)")
    options = parser.parse_args()
    frame.check_positive(options, "shards", "ranks")
    shards, ranks = options.shards, options.ranks
    folder = Path(tempfile.mkdtemp(prefix="octet-host-"))
    try:
        paths = sparse_shards(folder, shards)
        bins = Bins.open(paths, "t")
        opening = seconds(lambda: Bins.open(paths, "t"))
        known = seconds(lambda: check_whole(bins.shards, False))
        print(f"start: open a shard and read its sidecar: {opening / shards * 1e6:.0f} us")
        print(f"start: compare a shard with verified.json: {known / shards * 1e6:.0f} us")
        block = bytes(1 << 26)
        print(
            f"data.verify: SHA-256 of one thread: {len(block) / seconds(lambda: hashlib.sha256(block)) / 1e9:.2f} GB/s"
        )
        batch = 15 * ranks * 2
        loader = Loader(bins, [Segment(1, 0, batch, batch, 4096, 0)], seed=1)
        numbers = np.arange(batch)
        whole = seconds(lambda: loader.windows_at(numbers))
        print(
            f"step: order of a batch of {batch:,} windows: {whole * 1e3:.2f} ms, {whole / batch * 1e9:.0f} ns a window"
        )
        share = seconds(lambda: loader.next(ranks // 2, ranks), 5)
        rows = batch // ranks
        print(f"step: a rank's {rows} windows of 4,097 tokens, from the page cache: {share * 1e3:.2f} ms")
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("pulse", "1|2|trainer.py:57 in train")
        look = seconds(
            lambda: [(store.check(["pulse"]), store.check(["left"]), store.get("pulse")) for _ in range(300)]
        )
        print(f"always: rank 0's look at the pulse of a rank, every 5 s: {look / 300 * 1e6:.0f} us")
        for tensors in (20, 100):
            size = index_of(folder, tensors, ranks)
            pieces = tensors * ranks
            names = SavedTensors(folder).names()
            row = ShardView(torch.empty(1, 7168), torch.Size([ranks, 7168]), (ranks // 2, 0))
            reading = seconds(lambda names=names, row=row: SavedTensors(folder).plan(dict.fromkeys(names, row)), 1)
            each = f"{size / pieces:.0f} bytes and {reading / pieces * 1e6:.1f} us each"
            print(f"resume: {pieces:,} pieces in tensors.json: {each}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(guarded(run))
