"""Checkpoints of a run: saved in the background, visible when complete, verified when read, never pickled.

`checkpointer` and `reading` are the interface. Below them: `shard_view` (a rank's part of a tensor), `state_tree`
(state as JSON and tensors), `staging` (a copy in host memory), `storage` (tensors in safetensors files), `manifest`
(proof that a folder is complete) and `folder` (the checkpoints of a run).
"""

from trainer.checkpoint.checkpointer import Checkpointer, CheckpointError
from trainer.checkpoint.folder import (
    OnEvent,
    Verify,
    as_given,
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
    newest_checkpoint,
    set_aside_after,
    verify_checkpoint,
    verify_on_all_ranks,
)
from trainer.checkpoint.manifest import DamagedCheckpoint
from trainer.checkpoint.reading import read, read_meta, read_values, saved_shapes
from trainer.checkpoint.shard_view import ShardView
