"""Text to batches: corpus -> tokenizer -> bins -> loader.

    files (corpus)  ->  byte-level BPE (tokenizer)  ->  uint16 files + sidecar (bins)  ->  [B, S+1] batches (loader)
    |___________ prepare(): once, cached by the source's fingerprint ____________|

`prepare` is the only entry that writes; everything after it reads the files window by window. `bigram_loss` is the bar
that a trained model has to clear on the same bins.
"""

from trainer.data.bigram import bigram_loss
from trainer.data.bins import Bins, DamagedShard
from trainer.data.config import DataConfig, Source, check_data
from trainer.data.loader import Loader, validation_batches
from trainer.data.prepare import Prepared, Progress, prepare
from trainer.data.tokenizer import load_tokenizer

__all__ = [
    "Bins",
    "DamagedShard",
    "DataConfig",
    "Loader",
    "Prepared",
    "Progress",
    "Source",
    "bigram_loss",
    "check_data",
    "load_tokenizer",
    "prepare",
    "validation_batches",
]
