"""Checkpoints of a run: saved in the background, visible when whole, verified when read, never pickled.

`checkpointer` is the way in; below it `tree` (state as JSON and tensors), `staging` (a copy in host memory), `storage`
(tensors in safetensors files, planned by torch.distributed.checkpoint), `manifest` (proof that a folder is whole) and
`folder` (which checkpoint is which).
"""

from trainer.checkpoint.checkpointer import Checkpointer, CheckpointError, read, read_meta
from trainer.checkpoint.folder import (
    OnEvent,
    checkpoint_name,
    checkpoint_step,
    delete_leftovers,
    list_checkpoints,
    newest_checkpoint,
    set_aside_after,
)
from trainer.checkpoint.manifest import DamagedCheckpoint, sync_folder, verify

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpoint",
    "OnEvent",
    "checkpoint_name",
    "checkpoint_step",
    "delete_leftovers",
    "list_checkpoints",
    "newest_checkpoint",
    "read",
    "read_meta",
    "set_aside_after",
    "sync_folder",
    "verify",
]
