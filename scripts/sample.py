"""Generate text from a checkpoint of a run.

    python scripts/sample.py runs/mine --prompt "def "                          the likeliest text, 128 tokens
    python scripts/sample.py runs/mine --prompt "def " --speculative            the same text, with drafts of MTP's
    python scripts/sample.py runs/mine --temperature 0.8 --top-p 0.95 --seed 1  drawn; without a prompt, a new document

RUN is a run folder, one of its checkpoints, or an imported model; it is only read. The prompt and the text go to
stdout, remarks to stderr. The text ends at the end-of-text token, after --tokens, or at the model's last position. It
is computed in the run's own precision unless --precision names another one; KEY=VALUE changes keys of the run's config.
More: docs/export.md.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from precision.errors import UserError, counted
from trainer.launch.command_line import Parser, guarded

if TYPE_CHECKING:
    from models.generate import Tally

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or one of its checkpoints")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="changes to the run's config")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with (nothing: a document)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="how many at most (128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (0)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest of this share (1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what is drawn (0)")
    parser.add_argument("--step", type=int, metavar="N", help="of which checkpoint (the newest whole one)")
    parser.add_argument("--precision", default="run", metavar="NAME", help="of configs/precision (the run's)")
    parser.add_argument("--speculative", action="store_true", help="draft with multi-token prediction (temperature 0)")
    given = parser.parse_intermixed_args()
    check(given)
    from models.generate import Sampling, Tally, generate
    from trainer.offline.saved_model import open_run, precision_named
    from trainer.offline.text_stream import TextStream

    saved = open_run(given.run, given.step, given.overrides, precision_named(given.precision, CONFIGS))
    if given.speculative and not saved.config.model.num_mtp_layers:
        raise UserError(f"--speculative: {saved.run} has no multi-token prediction to draft with; leave it out")
    tokenizer, end = saved.tokenizer()
    prompt = tokenizer.encode(given.prompt, add_special_tokens=False).ids
    if not prompt or saved.config.trainer.document_masking:  # in training it precedes every token
        prompt = [end, *prompt]
    positions, trained = saved.config.model.max_position_embeddings, saved.shape.length
    if len(prompt) >= positions:
        raise UserError(
            f"--prompt: it has {counted(len(prompt), 'token')} and the model {positions:,} positions "
            f"(model.max_position_embeddings); give a shorter one"
        )
    count = min(given.tokens, positions - len(prompt))
    log(*saved.remarks, f"{saved.checkpoint}, {saved.config.precision.name} on {saved.device}")
    if count < given.tokens:
        log(f"{counted(count, 'token')} at most: the model has {positions:,} positions, and the prompt {len(prompt):,}")
    if len(prompt) + count > trained:
        log(f"the run was trained on {trained:,} tokens at a time: expect worse text beyond that")

    sampling, tally, stream = (
        Sampling(given.temperature, given.top_p, given.seed),
        Tally(),
        TextStream(tokenizer, prompt),
    )
    show(given.prompt)
    made, began, first = 0, time.perf_counter(), None
    try:
        for token in generate(
            saved.model, prompt, count, end=end, sampling=sampling, speculative=given.speculative, tally=tally
        ):
            first = first or time.perf_counter()
            made += 1
            show(stream.put(token))
    finally:  # an error has a line of its own
        show(stream.end() + "\n")
    now = time.perf_counter()
    log(*summary(len(prompt), made, (first or now) - began, now - (first or now), tally))


def check(given: argparse.Namespace) -> None:
    """Raise UserError for invalid or incompatible arguments."""
    if any("\ud800" <= c <= "\udfff" for c in given.prompt):  # bytes that Python could not decode
        raise UserError("--prompt: it is not UTF-8; give it in UTF-8")
    if given.tokens < 1:
        raise UserError(f"--tokens {given.tokens}: out of range; give 1 or more")
    if not 0 <= given.temperature < float("inf"):
        raise UserError(f"--temperature {given.temperature}: out of range; give 0, or a number above it")
    if not 0 < given.top_p <= 1:
        raise UserError(f"--top-p {given.top_p}: it is a share; give a number above 0, at most 1")
    if given.top_p < 1 and given.temperature == 0:
        raise UserError(f"--top-p {given.top_p}: with temperature 0 nothing is drawn; give --temperature, as 0.8")
    if not 0 <= given.seed < 1 << 63:
        raise UserError(f"--seed {given.seed}: out of range; give 0 to 2^63 - 1")
    if given.speculative and given.temperature > 0:
        raise UserError("--speculative: it keeps the greedy text; leave out --temperature, or --speculative")


def summary(prompt: int, made: int, before: float, after: float, tally: "Tally") -> list[str]:
    """Return the speed. before, after: seconds up to the first token, and from there on."""
    rate = f", then {(made - 1) / after:,.1f} tokens/s" if made > 1 and after > 0 else ""
    lines = [f"{counted(made, 'token')} after {prompt:,}: the first in {before:.2f} s{rate}"]
    if tally.drafted:
        share = tally.accepted / tally.drafted
        lines.append(f"{tally.passes:,} passes of the main model; {share:.0%} of {tally.drafted:,} drafts were right")
    return lines


def show(text: str) -> None:
    """Print to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def log(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(guarded(run))
