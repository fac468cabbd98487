"""Import a model from a folder in Hugging Face's layout, as a checkpoint that a run starts from. No GPU, little memory.

    python scripts/import_hf.py FOLDER mine        DeepseekV3ForCausalLM or V2, in BF16, FP16, FP32 or FP8 (128 x 128)
    python train.py --config-dir mine/configs model=imported run.init_from=mine ...      printed at the end

scripts/evaluate.py, sample.py and export_hf.py also take OUT: weights that came in FP8 leave as the same FP8. More:
docs/export.md.
"""

import shlex
import sys
from pathlib import Path

from precision.errors import counted
from trainer.launch.command_line import Parser, guarded


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with config.json and *.safetensors")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    arguments = parser.parse_args()

    from trainer.config import load
    from trainer.config.paths import kept_tree
    from trainer.files import script
    from trainer.launch.composition import compose
    from trainer.offline.hf_import import import_hf

    sys.argv[1:] = []
    (job,) = compose(Path(__file__).resolve().parents[1] / "configs")
    made = import_hf(arguments.folder, arguments.out, kept_tree(load(job.tree)))
    print(f"{made.folder}: {counted(made.fp8, 'tensor')} came in FP8" if made.fp8 else f"{made.folder}: imported")
    for remark in made.remarks:
        print(remark)
    if made.tokenizer is not None:
        words = f"{shlex.quote(str(made.folder))} --precision fp8_block --batches 16"
        print("to evaluate it, in FP8 and in BF16:")
        print(f"    python {script('scripts/evaluate.py')} {words}")
    print("to train on from its weights:")
    print(f"    python {script('train.py')} {' '.join(made.overrides)} data=text data.path=TEXT")


if __name__ == "__main__":
    sys.exit(guarded(run))
