"""The end of a run on the screen: a sample of the model's text, and the next commands.

The text is sampled from the weights in memory, only in a single process. Errors in showing a run do not make it fail.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import torch

from models import DeepSeek
from models.generate import Sampling, generate
from models.hf import to_hf_config
from precision import Plan, bind, refresh_weights
from precision.errors import RunError, UserError
from precision.hardware import detect
from trainer.config import TrainerConfig
from trainer.config.paths import as_typed
from trainer.config.timeline import Timeline
from trainer.data.tokenizer import end_of_text_id, load_tokenizer
from trainer.files import script
from trainer.forecast.header import shown
from trainer.forecast.words import aligned
from trainer.launch.launcher import Launch
from trainer.run.run_folder import saved_backends
from trainer.sinks import Summary
from trainer.sinks.console import BestEffortStream

if TYPE_CHECKING:
    from trainer.build import Run

TEMPERATURE, TOP_P = 0.8, 0.95


def say(text: str) -> None:
    """Print in the characters that the terminal has; ignores a closed stream."""
    encoding, screen = sys.stdout.encoding or "utf-8", BestEffortStream(sys.stdout)
    screen.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    screen.flush()


def sample(run: "Run", tokens: int) -> str:
    """Sample `tokens` tokens of a new document from a run's model, with the run's seed."""
    engine, config = run.engine, run.config
    try:
        tokenizer = load_tokenizer(run.data.tokenizer_path)
        end = end_of_text_id(tokenizer, config.data.end_of_text)
        chosen = saved_backends(run.folder.path)
        plan = Plan(config.precision, config.model.num_layers, detect(engine.device), saved=chosen)
        with torch.device("meta"):
            model = DeepSeek(config.model, plan)  # the same weights, without the graphs compiled for a step
        model.load_state_dict(engine.model.state_dict(), assign=True)
        arena = bind(model, plan, engine.device)
        arena.load_state_dict(engine.arena.state_dict())
        refresh_weights(model, force=True)  # with its scales
        count = min(tokens, config.model.max_position_embeddings - 1)
        sampling = Sampling(TEMPERATURE, TOP_P, config.trainer.seed)
        ids = list(generate(model.eval(), [end], count, end=end, sampling=sampling))
    except (UserError, RunError, OSError, torch.OutOfMemoryError) as error:
        return f"none: {str(error).splitlines()[0]}"
    return printable_text(tokenizer.decode(ids))


def printable_text(text: str) -> str:
    """Remove control characters, which would move a terminal's cursor, from `text`."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def next_commands(run: Path, length: TrainerConfig, steps: int, launch: Launch) -> list[tuple[str, str]]:
    """Return commands with their purposes. length: of the run; steps: that it had. launch: of its processes; the
    launch command of several nodes is unknown here."""
    place, export = shlex.quote(str(run)), shlex.quote(f"{run.absolute().name}-hf")
    resume = as_typed("run.resume", str(run))
    nodes = f"PROCESSES={launch.size} {script('scripts/launch/one_node.sh')}"
    start = f"python {script('train.py')}" if launch.size == 1 else nodes if launch.size == launch.local_size else None
    timeline = Timeline(length)
    longer, key = replace(length, max_steps=2 * steps, max_tokens=None), "max_steps"
    if length.max_steps is None:
        longer, key = replace(length, max_tokens=2 * timeline.tokens(timeline.steps)), "max_tokens"
    further = f"trainer.{key}={getattr(longer, key)}"
    if Timeline(longer).read_by(steps) != timeline.read_by(steps):  # phases that end at a share move with the length
        start = None
    return [
        ("see its curves", f"python {script('scripts/dashboard.py')} {place}"),
        ("let it write", f'python {script("scripts/sample.py")} {place} --prompt "The" --temperature 0.8'),
        ("evaluate it", f"python {script('scripts/evaluate.py')} {place}"),
        *([("train on", f"{start} {resume} {further}")] if start else []),
        ("export it", f"python {script('scripts/export_hf.py')} {place} {export}"),
    ]


def ending(summary: Summary, run: "Run", launch: Launch) -> str:
    """Return the last lines of a run. With several ranks there is no sample."""
    lines = [""]
    if run.config.eval.sample and launch.size == 1:
        text = sample(run, run.config.eval.sample).splitlines()
        lines += ["It writes (eval.sample):", *(f"    {line}" for line in text), ""]
    commands = dict(next_commands(summary.folder, run.config.trainer, summary.step, launch))
    try:
        to_hf_config(replace(run.config.model, num_mtp_layers=0))
    except UserError:  # transformers has no such model: the command would be refused
        del commands["export it"]
    lines += [f"{what:<18} {command}" for what, command in commands.items()]
    return "\n".join(lines)


def sweep_table(done: Sequence[tuple[Summary, Sequence[str]]]) -> str:
    """Return the runs of a sweep, a line each: what sets it apart, and the result. In a terminal that is too narrow for
    that, what sets a run apart is on a line of its own."""
    common = set.intersection(*(set(overrides) for _, overrides in done))
    rows, apart = [("run", "validation loss", "tokens/s", "peak GiB", "skipped steps")], ["differs in"]
    for s, overrides in done:
        loss, rate, memory = f"{s.validation_loss:.4f}", f"{s.tokens_per_second:,.0f}", f"{s.peak_memory_gib:.2f}"
        rows.append((s.folder.name, loss, rate, memory, str(s.skipped_steps)))
        apart.append(shown([override for override in overrides if override not in common]))
    wide = [(row[0], own, *row[1:]) for row, own in zip(rows, apart, strict=True)]
    table = aligned(wide, left=(0, 1))
    if max(map(len, table)) <= get_terminal_size((sys.maxsize, 0)).columns:
        return "\n".join(table)
    rows[0] = "run", "loss", "tok/s", "GiB", "skipped"
    return "\n".join(f"{line}\n    {own}" for line, own in zip(aligned(rows), apart, strict=True))
