"""Prepare the data that a config names, without training: tokenizer and bins, into data.cache_dir.

    python scripts/prepare_data.py                                       the default corpus
    python scripts/prepare_data.py data=text data.path=FOLDER model=deepseek_300m
    python scripts/prepare_data.py data=files data.path=FOLDER --out OUT    and then: train.py data=bins data.path=OUT
    python scripts/prepare_data.py +recipe=fp8_jit ...                   any arguments of train.py

train.py does the same when it starts; this script does it once, ahead, and prints the size of a corpus. If killed and
started again, it continues. --out FOLDER: write there instead of into the cache. The loss of bigrams is added to an
older folder that lacks it.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from precision.errors import UserError, counted
from trainer.launch.command_line import Parser, guarded
from trainer.launch.composition import compose

if TYPE_CHECKING:
    from trainer.data import Prepared


def run() -> None:
    """Prepare each config of the command line (several with -m); all are loaded before the first is prepared."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--out", type=Path)
    own, sys.argv[1:] = parser.parse_known_args()
    if own.help:
        print(str(__doc__).strip())
        return
    shown = str(own.out).encode(errors="backslashreplace").decode()
    if shown != str(own.out):
        raise UserError(f"--out={shown}: not UTF-8, as data.path of a run has to be; choose another folder")
    from trainer.config import load
    from trainer.config.data import Source
    from trainer.config.unused_data_keys import without_effect
    from trainer.data.prepare import prepare
    from trainer.data.prepared import SUMMARY, add_bigram
    from trainer.data.progress_bars import bars
    from trainer.run.own_settings import own_settings

    jobs = compose(Path(__file__).resolve().parents[1] / "configs", own=own_settings)
    configs = [load(job.tree) for job in jobs]
    if own.out is not None and len(configs) > 1:
        raise UserError(f"--out={own.out}: one folder for {len(configs)} configs; prepare one at a time")
    if own.out is not None and configs[0].data.source is Source.bins:
        raise UserError(f"--out={own.out}: data.source=bins is prepared already; leave --out out, or name the text")
    for config in configs:
        print("".join(f"{line}\n" for line in without_effect(config.data)), end="", flush=True)
        start = time.monotonic()
        with bars() as show:
            prepared = prepare(config.data, config.model.vocab_size, show, own.out)
        print(summary(prepared, time.monotonic() - start))
        if prepared.bigram_loss is None:
            for folder in {shard.path.parent for shard in prepared.shards}:
                print(f"bigrams: {add_bigram(folder):.4f} nats per token, added to {folder / SUMMARY}")


def summary(prepared: "Prepared", seconds: float) -> str:
    """Return a summary of the prepared data, one line a fact."""
    sides = [("train", prepared.train)]
    several = len(prepared.validations) > 1
    sides += [(f"validation of {name}" if several else "validation", bins) for name, bins in prepared.validations]
    lines = [f"{'prepared' if prepared.built else 'found in the cache'} in {seconds:.1f} s: {prepared.folder}"]
    for name, bins in sides:
        facts = bins.sidecar
        shards = f" in {len(bins.shards)} shards" if len(bins.shards) > 1 else ""
        lines.append(
            f"{name}: {counted(facts.num_documents, 'document')}, {counted(facts.num_text_bytes, 'byte')}, "
            f"{counted(facts.num_tokens, 'token')} "
            f"({facts.num_text_bytes / facts.num_tokens:.2f} bytes a token, {facts.dtype}){shards}"
        )
    total = sum(size for _, size in prepared.documents.values())
    if len(prepared.documents) > 1:
        shares = (f"{name} {size / total:.1%}" for name, (_, size) in prepared.documents.items())
        lines.append(f"of the training text: {', '.join(shares)}")
    lines += [f"left out: {skipped}" for skipped in prepared.skipped[:20]]
    if len(prepared.skipped) > 20:
        lines.append(f"left out: {len(prepared.skipped) - 20:,} more places, see prepared.json")
    if prepared.bigram_loss is not None:
        lines.append(f"bigrams: {prepared.bigram_loss:.4f} nats per token of the held-out text")
    lines.append(f"tokenizer: {prepared.train.sidecar.vocab_size:,} entries, {prepared.tokenizer_path}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(guarded(run))
