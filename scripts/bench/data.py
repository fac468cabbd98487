"""The speed from text to tokens: all of the preparation against the tokenizer alone, in one run.

    python scripts/bench/data.py                      made-up jsonl of 256 MB, a vocabulary of 32768, one process a core
    python scripts/bench/data.py --mb 2000 --workers 1,8,16 --format zst

The tokenizer alone is `encode_batch_fast` of the library `tokenizers`, on all cores, over documents that are in memory
already: a third of the text, before and after each of the others. Preparing is everything from the files to the shards:
reading, parsing, checking, splitting, encoding, hashing, writing. Numbers are megabytes (10^6 bytes) of text a second.
"""

import gzip
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import frame

from precision.errors import UserError
from trainer.data import DataConfig, Source, prepare
from trainer.data.tokenizer import load_tokenizer, train_tokenizer
from trainer.launch.command_line import Parser, guarded


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--mb", type=int, default=256, help="megabytes of text")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--workers", default="", help="numbers of processes to try, with commas; empty: one a core")
    parser.add_argument("--format", choices=["jsonl", "gz", "zst", "parquet"], default="jsonl")
    parser.add_argument("--shard-mb", type=int, default=16)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    frame.check_positive(options, "mb", "shard_mb")
    words = [word for word in options.workers.split(",") if word]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--workers {options.workers}: want counts with commas between, as 1,8,16")
    counts = [int(word) for word in words] or [cores]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = made_up(options.mb * 1_000_000)
        size = write(texts, folder / "text", options.format)
        tokenizer = folder / "tokenizer.json"
        train_tokenizer(texts[: len(texts) // 10 + 1], options.vocab_size, "<|endoftext|>").save(str(tokenizer))
        third = texts[: len(texts) // 3 + 1]
        alone = [encode(third, tokenizer)]
        print(f"{options.mb} MB of text in {options.format} files, {cores} cores, a vocabulary of {options.vocab_size}")
        for count in counts:
            data = DataConfig(
                source=Source.files,
                path=str(folder / "text"),
                glob="*",
                tokenizer=str(tokenizer),
                workers=count,
                shard_mb=options.shard_mb,
                cache_dir=str(folder / f"cache_{count}"),
            )
            begin = time.perf_counter()
            prepare(data, options.vocab_size)
            rate = size / (time.perf_counter() - begin)
            alone.append(encode(third, tokenizer))
            base = statistics.mean(alone[-2:])
            print(
                f"prepare, {count} processes: {rate / 1e6:.2f} MB/s; encode_batch_fast alone: {base / 1e6:.2f} MB/s "
                f"({alone[-2] / 1e6:.2f} before, {alone[-1] / 1e6:.2f} after); ratio {rate / base:.2f}"
            )


def made_up(num_bytes: int) -> list[str]:
    """Return documents of some kilobytes: the standard library's text, cut at lines and reassembled."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [line for path in sources for line in path.read_text(errors="ignore").splitlines(keepends=True)]
    documents, size, begin = [], 0, 0
    while size < num_bytes:
        count = 40 + begin * 7919 % 120
        documents.append("".join(lines[(begin + i) % len(lines)] for i in range(count)))
        size, begin = size + len(documents[-1].encode()), begin + count + size % 31
    return documents


def write(texts: list[str], folder: Path, kind: str) -> int:
    """Write the documents as some files of a kind. Returns the bytes of their text."""
    folder.mkdir()
    each = len(texts) // 8 + 1
    for number in range(8):
        part = texts[number * each : (number + 1) * each]
        data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in part)
        path = folder / f"{number}.jsonl"
        if kind == "jsonl":
            path.write_bytes(data)
        elif kind == "gz":
            path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(data, 1))
        elif kind == "zst":
            import zstandard

            path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(data))
        else:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table({"text": part}), path.with_suffix(".parquet"), row_group_size=1000)
    return sum(len(text.encode()) for text in texts)


def encode(texts: list[str], path: Path) -> float:
    """Return the bytes a second of the tokenizer alone, on all cores."""
    tokenizer = load_tokenizer(path)
    tokenizer.encode_special_tokens = True
    size = sum(len(text.encode()) for text in texts)
    begin = time.perf_counter()
    for start in range(0, len(texts), 1000):
        tokenizer.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)
    return size / (time.perf_counter() - begin)


if __name__ == "__main__":
    sys.exit(guarded(run))
