"""Text to batches: sources -> tokenizer -> bins -> loader.

    documents (sources)  ->  BPE (tokenizer)  ->  uint16 files + sidecar (bins)  ->  [B, S+1] batches (loader)
    |_____ prepare(): once, by several processes, cached by the sources' state ______|

`prepare` (with several ranks: `find_or_build`, then `check_whole`) is the only entry that writes; everything after it
reads the files window by window. `bigram_loss` is the baseline that a trained model must beat on the same bins,
computed when they are prepared. The processes that prepare import this package and do not need torch, which takes
seconds to import: the loader, which does, is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from trainer.config.data import DataConfig, Source, check_data
from trainer.data.bigram import bigram_loss
from trainer.data.bins import Bins, DamagedShard
from trainer.data.prepare import find_or_build, prepare
from trainer.data.prepared import Prepared
from trainer.data.tokenizer import load_tokenizer
from trainer.data.tokenizer_sample import new_tokenizer
from trainer.data.verified import check_whole

if TYPE_CHECKING:
    from trainer.data.loader import Loader, validation_batches


def __getattr__(name: str) -> Any:
    if name in ("Loader", "validation_batches"):
        from trainer.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
