"""Export of a run folder to Hugging Face: reads from the run what `trainer.offline.hf_export` needs.

The checkpoint records the model, the recipe, the token that ends a text, and the hash of the run folder's
tokenizer.json. The run folder records the backends (backends.json).
"""

from pathlib import Path
from typing import Any

from models import ModelConfig
from models.config import RouterScoring
from precision import PrecisionConfig
from precision.errors import UserError
from trainer.checkpoint import checkpoint_step, read_meta
from trainer.checkpoint.storage import SavedTensors
from trainer.config.data import TOKENIZER
from trainer.files import check_new
from trainer.offline.hf_export import Exported, ExportFormat, export
from trainer.offline.hf_fp8 import KeptQuantizer, Quantizer, RunQuantizer
from trainer.offline.hf_tokenizer import TokenizerSource
from trainer.offline.saved_model import check_tokenizer, chosen_checkpoint, config_at, section_of
from trainer.run.names import CONFIG
from trainer.run.run_folder import saved_backends


def export_run(
    run: Path,
    out: Path,
    numbers: ExportFormat,
    *,
    step: int | None = None,
    mtp: bool = False,
    max_file_bytes: int = 5 * 10**9,
    tokenizer: Path | None = None,
) -> tuple[Exported, list[str]]:
    """Export a run folder, one of its checkpoints, or an imported model; see `hf_export.export`.

    step: of the checkpoint, None for the newest valid one. tokenizer: a tokenizer.json instead of the run's. Returns
    the result and remarks, a line each. Raises UserError for errors that the user can correct.
    """
    check_new(out)
    checkpoint, remarks = chosen_checkpoint(run, step)
    folder, meta = checkpoint.parent.parent, read_meta(checkpoint)
    model = section_of(ModelConfig, meta.get("model"), "model", checkpoint)
    if mtp and not model.num_mtp_layers:
        raise UserError(f"--mtp: {folder} has no multi-token prediction; leave it out")
    source = _tokenizer(checkpoint, meta, tokenizer)
    quantizer = _quantizer(model, checkpoint, meta) if numbers is ExportFormat.fp8 else None
    remarks.append(f"of {checkpoint}")
    made = export(checkpoint, out, model, numbers, source, quantizer=quantizer, mtp=mtp, max_file_bytes=max_file_bytes)
    if made.left:
        shown = ", ".join(made.left[:4]) + (f" and {len(made.left) - 4} more" if len(made.left) > 4 else "")
        remarks.append(f"in BF16, though trained in FP8, because loaders read it so only: {shown}")
    if model.num_mtp_layers and not mtp:
        adds = " (--mtp adds it)" if model.router_scoring is RouterScoring.sigmoid else ""
        remarks.append(f"without multi-token prediction{adds}")
    if not source.has_tokenizer:
        remarks.append("without a tokenizer: the imported folder had none")
    return made, remarks


def _quantizer(model: ModelConfig, checkpoint: Path, meta: dict[str, Any]) -> Quantizer:
    """Return the FP8 quantiser: the run's own recipe, or the scales that an imported model came with."""
    folder, saved = checkpoint.parent.parent, SavedTensors(checkpoint)
    if "source" in meta:
        return KeptQuantizer(saved, checkpoint)
    precision = section_of(PrecisionConfig, _config(checkpoint).get("precision"), "precision", folder / CONFIG)
    if precision.name != meta["precision"]:
        raise UserError(
            f"--dtype fp8: {checkpoint} was trained as {meta['precision']}, and the run is {precision.name} now; "
            "export a later step, or use --dtype bf16"
        )
    backends = saved_backends(folder, checkpoint_step(checkpoint)) or {}
    return RunQuantizer(model, precision, backends, saved, checkpoint)


def _tokenizer(checkpoint: Path, meta: dict[str, Any], given: Path | None) -> TokenizerSource:
    """Return the source of the tokenizer."""
    folder = checkpoint.parent.parent
    if "source" in meta:
        if given is not None:
            raise UserError(f"--tokenizer {given}: {folder} is an imported model, which has its own; leave it out")
        return TokenizerSource(folder)
    path = given or folder / TOKENIZER
    if not path.is_file():
        raise UserError(f"{path}: no such file; name the run's tokenizer with --tokenizer FILE")
    check_tokenizer(path, meta)
    return TokenizerSource(path, str(_config(checkpoint)["data"]["end_of_text"]))


def _config(checkpoint: Path) -> dict[str, Any]:
    """Return the config tree that made a checkpoint."""
    return config_at(checkpoint.parent.parent, checkpoint_step(checkpoint) or 0)
