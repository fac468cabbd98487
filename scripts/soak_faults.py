"""Damaged files of a run and of its data, for the soak test (`soak.py`): is any of it trained on silently?

A small run that has rewound is made once. Each fault then befalls a copy of its folder and of its prepared data: a bit
is flipped, a file is cut off or removed, a checkpoint is renamed or exchanged with another. The copy is resumed, and
the result is one of

    noticed   refused in one line, or an event or a warning names what was damaged; or another checkpoint was used
    same      the run ends with the bits of the undamaged one: what was damaged decides nothing, or is written again
    lost      it ends with other bits, without a report
"""

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak_bits import STATE, Wrong, difference

from trainer.checkpoint import list_checkpoints, read
from trainer.files import parse_line

RUN_FILES = (
    "recovery.json", "backends.json", "config.yaml", "overrides.txt", "environment.json", "precision_plan.txt",
    "metrics.jsonl", "tensors.jsonl", "events.jsonl", "tokenizer.json",
)  # fmt: skip
DATA_FILES = (
    "train.bin",
    "train.json",
    "validation.bin",
    "validation.json",
    "tokenizer.json",
    "prepared.json",
    "verified.json",
)
STEPS, RESUMED_AT = 8, 6
Train = Callable[[list[str], Path], tuple[int, str]]
"""Called with (overrides, a file for what is printed); the exit code, and what was printed."""
Tally = dict[str, Counter[str]]
"""Kind of fault -> the result -> how often."""


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


HOW = {"a bit flipped in": flip, "cut off": cut, "removed": remove}


def rename(run: Path, chance: random.Random) -> None:
    """A checkpoint under the name of another step, which it may exchange with that one's."""
    folder = run / "checkpoints"
    one = chance.choice(list_checkpoints(folder))
    other = folder / f"step_{chance.choice([2, 4, 6, 8]):08d}"
    while other == one:
        other = folder / f"step_{chance.choice([2, 4, 6, 8]):08d}"
    aside = folder / "aside"
    one.rename(aside)
    if other.exists():
        other.rename(one)
    aside.rename(other)


def damage(run: Path, data: Path, number: int, chance: random.Random) -> str:
    """Do something to the copy; in turn to each kind of file. Returns the kind."""
    kinds = ["rename", "checkpoint", "checkpoint", *RUN_FILES, *(f"data/{name}" for name in DATA_FILES)]
    kind = kinds[number % len(kinds)]
    if kind == "rename":
        rename(run, chance)
        return "checkpoints renamed or exchanged"
    if kind == "checkpoint":
        path, name = chance.choice(sorted(list_checkpoints(run / "checkpoints")[-1].iterdir())), "the newest checkpoint"
    elif kind.startswith("data/"):
        path, name = next(data.glob(f"*/{kind[5:]}")), f"`{kind[5:]}` of the data"
    else:
        path, name = run / kind, f"`{kind}`"
    how = chance.choice(sorted(HOW)) if chance.random() < 0.5 else "a bit flipped in"  # bits above all
    if path.stat().st_size:
        HOW[how](path, chance)
    return f"{how} {name}" if how == "a bit flipped in" else f"{name} {how}"


@dataclass
class Outcome:
    """Of a run that was resumed: exit code, what was printed, what its new events say (without numbers), and, where it
    came to its end, its state."""

    code: int
    printed: str
    events: set[str]
    state: dict[str, Any] | None


def faults(folder: Path, count: int, seed: int, words: list[str], train: Train) -> Tally:
    """Try `count` faults on runs of these overrides. Prints those that are lost, or end in a traceback."""
    words = [*words, "checkpoint.every=2", "checkpoint.keep=0", "recovery.max_consecutive_skips=1", "eval.every=0"]
    words += ["debug.inject={step: 1, where: loss, value: nan, steps: 100, windows: [8, 16]}", "run.name=run"]
    words.append(f"trainer.max_steps={STEPS}")
    base, data, said = folder / "base", folder / "faults_data", folder / "said.txt"
    code, text = train([*words, f"run.dir={base}", f"data.cache_dir={data}"], said)
    if code:
        raise Wrong(f"the run to damage ended with {code}: {text}")
    for checkpoint in list_checkpoints(base / "run" / "checkpoints"):
        if int(checkpoint.name[5:]) > RESUMED_AT:
            shutil.rmtree(checkpoint)

    def resume(number: int | None) -> tuple[str, Outcome]:
        """With that fault; None: with none."""
        place = folder / "fault"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(base, place / "runs")
        shutil.copytree(data, place / "data")
        run = place / "runs" / "run"
        kind = "" if number is None else damage(run, place / "data", number, random.Random(f"{seed} {number}"))
        events = run / "events.jsonl"
        before = Counter(messages(events))
        code, text = train([*words, f"run.dir={place / 'runs'}", f"data.cache_dir={place / 'data'}"], said)
        new = Counter(messages(events)) - before
        state = None if code else read(run / "checkpoints" / f"step_{STEPS:08d}")[0]
        return kind, Outcome(code, text, set(new), state)

    _, expected = resume(None)
    tally: Tally = {}
    for number in range(count):
        kind, found = resume(number)
        what, why = judge(found, expected)
        tally.setdefault(kind, Counter())[what] += 1
        print(f"fault {number + 1}/{count}  {kind}  {what}", flush=True)
        if what == "lost":
            print(f"soak: LOST (--seed {seed}, fault {number}): {kind}: {why}", flush=True)
            shutil.copytree(folder / "fault", folder / f"lost{number}")
    return tally


def messages(path: Path) -> list[str]:
    """Of the events in a file, without numbers; of damaged lines, nothing."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    found = [entry for line in lines if (entry := parse_line(line)) is not None]
    return [re.sub(r"[\d.,]+", "#", f"{entry.get('kind')} {entry.get('message')}") for entry in found]


def judge(found: Outcome, expected: Outcome) -> tuple[str, str]:
    """noticed, same or lost; why it is lost."""
    if "Traceback" in found.printed:
        return "lost", f"a traceback: {found.printed}"
    if found.code:
        refused = found.printed.startswith("octet: error: ") and found.printed.count("\n") == 1
        return ("noticed", "") if refused else ("lost", f"exit code {found.code}: {found.printed}")
    if found.events - expected.events or "octet: " in found.printed:
        return "noticed", ""
    assert found.state is not None and expected.state is not None
    for branch in STATE:
        if (where := difference(found.state[branch], expected.state[branch], branch)) is not None:
            return "lost", f"{where} has other bits, without a report"
    return "same", ""


def table(tally: Tally) -> str:
    """In Markdown."""
    rows = ["| fault | tried | noticed | same bits | lost |", "| --- | --- | --- | --- | --- |"]
    total: Counter[str] = Counter()
    for found in tally.values():
        total += found
    for kind, found in [*sorted(tally.items()), ("all", total)]:
        rows.append(f"| {kind} | {found.total()} | {found['noticed']} | {found['same']} | {found['lost']} |")
    return "\n".join(rows)
