"""Export a run to a folder in Hugging Face's layout, which transformers loads. No GPU, little memory.

    python scripts/export_hf.py runs/mine mine-hf                     BF16, from the newest checkpoint
    python scripts/export_hf.py runs/mine mine-fp8 --dtype fp8        layers trained in FP8 are served in FP8
    python scripts/export_hf.py runs/mine mine-fp32 --dtype fp32 --mtp --step 200

RUN is a run folder, one of its checkpoints, or the output of scripts/import_hf.py. More: docs/export.md.
"""

import re
import sys
from pathlib import Path

from precision.errors import UserError, counted
from trainer.launch.command_line import Parser, guarded

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or one of its checkpoints")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument("--dtype", choices=["bf16", "fp32", "fp8"], default="bf16", help="of the weights (bf16)")
    parser.add_argument("--mtp", action="store_true", help="with the blocks of multi-token prediction")
    parser.add_argument("--step", type=int, metavar="N", help="of which checkpoint (the newest whole one)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights (5GB)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, if the run folder has none")
    arguments = parser.parse_args()
    most = size_of(arguments.max_shard_size)

    from trainer.offline.export import export_run
    from trainer.offline.hf_export import ExportFormat

    made, remarks = export_run(
        arguments.run,
        arguments.out,
        ExportFormat(arguments.dtype),
        step=arguments.step,
        mtp=arguments.mtp,
        max_file_bytes=most,
        tokenizer=arguments.tokenizer,
    )
    files = counted(made.files, "file")
    fp8 = f", {made.fp8_share:.0%} of the numbers in FP8" if made.fp8_share else ""
    print(f"{made.folder}: {counted(made.tensors, 'tensor')}, {made.bytes / 1e9:.3f} GB in {files}{fp8}")
    for remark in remarks:
        print(remark)


def size_of(text: str) -> int:
    """Return the bytes that `5GB`, `512MiB` or `1000000` mean."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]I?B)?", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if not size:
        raise UserError(f"--max-shard-size {text}: not a size; write it as 5GB or 512MiB")
    return size


if __name__ == "__main__":
    sys.exit(guarded(run))
