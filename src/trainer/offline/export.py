"""Between a run folder and the world of Hugging Face: what `trainer.offline.hf_export` needs to know of a run.

The checkpoint itself says what model it is of. The run folder says with which recipe it computes (config.yaml,
backends.json) and what its tokens mean (tokenizer.json, and in config.yaml which of them ends a text).
"""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from precision import PrecisionConfig
from trainer.checkpoint import checkpoint_name, read_meta
from trainer.files import check_new
from trainer.offline.hf_export import Exported, Numbers, export, saved_model
from trainer.offline.hf_fp8 import KeptQuantizer, Quantizer, RunQuantizer
from trainer.offline.hf_tokenizer import TOKENIZER, TokenizerSource
from trainer.offline.row_reader import SavedTensors
from trainer.run.run_folder import CHECKPOINTS, CONFIG, find_checkpoint, saved_backends


def export_run(
    run: Path,
    out: Path,
    numbers: Numbers,
    *,
    step: int | None = None,
    mtp: bool = False,
    max_file_bytes: int = 5 * 10**9,
    tokenizer: Path | None = None,
) -> tuple[Exported, list[str]]:
    """Export a run folder, one of its checkpoints, or an imported model; `export` says how.

    step: of the checkpoint, None for the newest whole one. tokenizer: a tokenizer.json instead of the run's. Returns
    what was made and remarks, a line each. ValueError for what the user can correct.
    """
    check_new(out)
    given = run if step is None else run / CHECKPOINTS / checkpoint_name(step)
    if not given.is_dir():
        raise ValueError(f"{given}: no such folder; give a run folder that has checkpoints, as runs/NAME")
    remarks: list[str] = []
    checkpoint = find_checkpoint(given, "RUN", lambda kind, step, message, **_: remarks.append(message))
    folder, meta = checkpoint.parent.parent, read_meta(checkpoint)
    model = saved_model(meta, checkpoint)
    if mtp and not model.num_mtp_layers:
        raise ValueError(f"--mtp: {folder} has no multi-token prediction; leave it out")
    source = _tokenizer(folder, meta, tokenizer)
    quantizer = _quantizer(folder, checkpoint, meta) if numbers is Numbers.fp8 else None
    made = export(checkpoint, out, model, numbers, source, quantizer=quantizer, mtp=mtp, max_file_bytes=max_file_bytes)
    if made.left:
        shown = ", ".join(made.left[:4]) + (f" and {len(made.left) - 4} more" if len(made.left) > 4 else "")
        remarks.append(f"in BF16, though trained in FP8, because loaders read it so only: {shown}")
    if model.num_mtp_layers and not mtp:
        remarks.append("without multi-token prediction (--mtp adds it)")
    if source is None:
        remarks.append("without a tokenizer: the imported folder had none")
    return made, remarks


def _quantizer(folder: Path, checkpoint: Path, meta: dict[str, Any]) -> Quantizer:
    """What makes the FP8: the run's own recipe, or the scales that an imported model came with."""
    saved = SavedTensors(checkpoint)
    if "source" in meta:
        return KeptQuantizer(saved, checkpoint)
    try:
        precision = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(PrecisionConfig), _config(folder)["precision"])
        )
    except (OmegaConfBaseException, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{folder / CONFIG}: precision cannot be read ({reason}); use the version of the run"
        ) from None
    assert isinstance(precision, PrecisionConfig)
    if precision.name != meta["precision"]:
        raise ValueError(
            f"--dtype fp8: {checkpoint} was trained as {meta['precision']}, since when the run is {precision.name}; "
            "export a later step, or use --dtype bf16"
        )
    return RunQuantizer(saved_model(meta, checkpoint), precision, saved_backends(folder) or {}, saved, checkpoint)


def _tokenizer(folder: Path, meta: dict[str, Any], given: Path | None) -> TokenizerSource | None:
    """Where the tokenizer comes from; None if an imported model had none."""
    if "source" in meta:
        if given is not None:
            raise ValueError(f"--tokenizer {given}: {folder} is an imported model, which has its own; leave it out")
        return TokenizerSource(folder) if (folder / TOKENIZER).is_file() else None
    path = given or folder / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name the run's tokenizer with --tokenizer FILE")
    try:
        return TokenizerSource(path, str(_config(folder)["data"]["end_of_text"]))
    except KeyError:
        raise ValueError(f"{folder / CONFIG}: has no data.end_of_text; is it a run's?") from None


def _config(folder: Path) -> dict[str, Any]:
    """A run's config.yaml, as it is."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a run folder, or a checkpoint inside one")
    return yaml.safe_load(path.read_text())
