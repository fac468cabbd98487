"""Validation loss and perplexity of a run's checkpoint, in the run's own recipe and in BF16, side by side.

    python scripts/evaluate.py runs/mine                           all held-out text, the newest checkpoint
    python scripts/evaluate.py runs/mine --step 200 --batches 16   16 microbatches, spread over it, as `eval.batches`
    python scripts/evaluate.py runs/mine --precision fp8_block     in another recipe than the run's
    python scripts/evaluate.py runs/mine --lm-eval hellaswag,piqa  also the tasks of lm-eval, on the BF16 export

RUN is a run folder, one of its checkpoints, or an imported model; it is only read. Model and weights are the same: the
gap is the cost of the casts to FP8. KEY=VALUE changes keys of the run's config. --lm-eval needs
`pip install "lm-eval[hf]"`, which is not part of this project. More: docs/export.md.
"""

import importlib.util
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from precision.errors import RunError, UserError
from trainer.forecast.words import aligned
from trainer.launch.command_line import Parser, guarded

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

if TYPE_CHECKING:
    from trainer.offline.evaluate import Scores
    from trainer.offline.saved_model import Saved


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or one of its checkpoints")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="changes to the run's config")
    parser.add_argument("--step", type=int, metavar="N", help="of which checkpoint (the newest whole one)")
    parser.add_argument("--precision", default="run", metavar="NAME", help="of configs/precision (the run's)")
    parser.add_argument("--batches", type=int, metavar="N", help="microbatches of each source (all)")
    parser.add_argument("--lm-eval", metavar="TASKS", help="also tasks of lm-eval, as hellaswag,piqa")
    given = parser.parse_intermixed_args()
    if given.batches is not None and given.batches < 1:
        raise UserError(f"--batches {given.batches}: out of range; give 1 or more, or leave it out for all text")
    if given.lm_eval is not None and importlib.util.find_spec("lm_eval") is None:
        raise UserError(f'--lm-eval {given.lm_eval}: it is not installed; run pip install "lm-eval[hf]"')
    from trainer.data import prepare
    from trainer.offline.evaluate import evaluate
    from trainer.offline.saved_model import open_run, precision_named

    saved = open_run(given.run, given.step, given.overrides, precision_named(given.precision, CONFIGS))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "model.vocab_size=")  # the run has warned of it, about its own text
        data = prepare(saved.config.data, saved.config.model.vocab_size)
    for remark in saved.remarks:
        print(remark)
    if saved.text is not None and saved.text != data.validation.sidecar.sha256:
        print("the held-out text is not the run's")
    print(f"{saved.checkpoint}, on {saved.device}, sequences of {saved.shape.length:,} tokens")
    print("\n".join(["", *table(evaluate(saved, data, given.batches), saved.config.precision.name)]))
    logged = logged_loss(saved)
    if logged is not None:
        own = ", over windows of its own" if given.overrides else ""
        print(f"\nthe run logged loss/validation {logged:.4f} at this step{own}", flush=True)
    if given.lm_eval is not None:
        run_lm_eval(saved, given.lm_eval)


def table(scores: "list[Scores]", recipe: str) -> list[str]:
    """Return a row a source."""
    from trainer.offline.evaluate import perplexity

    both = any(score.bf16 is not None for score in scores)
    titles = ["", "", recipe, "", *(["bf16", "", "gap"] if both else [])]
    units = ["source", "sequences", "loss", "perplexity", *(["loss", "perplexity", "nats"] if both else [])]
    rows = [titles, units]
    for score in scores:
        row = [score.source, f"{score.windows:,}", f"{score.own:.4f}", f"{perplexity(score.own):.2f}"]
        if score.bf16 is not None:
            row += [f"{score.bf16:.4f}", f"{perplexity(score.bf16):.2f}", f"{score.gap:+.4f}"]
        elif both:  # a source without a whole sequence
            row += ["", "", ""]
        rows.append(row)
    return aligned(rows)


def logged_loss(saved: "Saved") -> float | None:
    """Return the loss that the run itself logged at the checkpoint's step."""
    from trainer.files import parse_lines
    from trainer.run.names import METRICS

    path = saved.run / METRICS
    entries = parse_lines(path) if path.is_file() else ()
    found = [
        entry["loss/validation"] for entry in entries if entry["step"] == saved.step and "loss/validation" in entry
    ]
    return found[-1] if found else None


def run_lm_eval(saved: "Saved", tasks: str) -> None:
    """Run lm-eval's own program on the export, which is deleted afterwards. Its output goes to the terminal."""
    from trainer.offline.export import export_run
    from trainer.offline.hf_export import ExportFormat

    with tempfile.TemporaryDirectory() as folder:
        export_run(saved.checkpoint, out := Path(folder) / "hf", ExportFormat.bf16)
        where = ["--model", "hf", "--model_args", f"pretrained={out},dtype=bfloat16", "--device", saved.device.type]
        done = subprocess.run([sys.executable, "-m", "lm_eval", *where, "--tasks", tasks], check=False)
    if done.returncode:
        raise RunError(f"--lm-eval {tasks}: it ended with exit code {done.returncode}; its output is above")


if __name__ == "__main__":
    sys.exit(guarded(run))
