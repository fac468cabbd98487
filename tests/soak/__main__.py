"""The soak test: after any fault from outside, a run ends with the bits of an undisturbed one, or reports why not.

    python tests/soak                            50 faults, some minutes; make soak does the same
    python tests/soak --faults 200 --first 400 --seed 3      one part of many, with other faults than the rest

A *course* trains a tiny model on the CPU, undisturbed: the reference. Each fault (`faults.py`) is applied to a
copy of the course's folder after step 6, or to a run that starts from nothing; the copy is then resumed to the end, by
`run.name` alone. Courses differ by recipe, by bad steps (one is skipped; or a streak of them, so that the run rewinds)
and by ranks: every fourth has two, started without torchrun. The result of a fault is one of

    noticed   refused in one line; or reported (event, warning), and the run ends with the reference's bits
    same      the run ends with the reference's bits: the damaged part decides nothing, or is written again
    lost      anything else: other bits, a traceback, a wrong exit code, a file elsewhere overwritten

Bits: weights, moments, scales, counters, data cursor and random numbers at the end, and metrics loss/ optim/ moe/ fp8/
of every step. Processes are forked from this one, which has imported everything: a fault costs a second or two. Exit
code 0: nothing was lost; 1: something was, and the folder is kept.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: no threads here, which would not survive a fork
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from bits import SoakFailure
from courses import Course, warm_up, write_corpus
from faults import FAULTS

from precision.errors import UserError
from trainer.launch.command_line import REFUSED, Parser

COURSE_FAULTS = 20
RECIPES = ("fp8_delayed", "bf16", "fp8_jit", "fp8_block", "fp16")


def course(folder: Path, number: int, seed: int, ranks: int) -> Course:
    """Return the course of this number. Raises SoakFailure if its reference does not end."""
    chance = random.Random(f"course {seed} {number}")
    value, where = chance.choice(["nan", "inf"]), chance.choice(["loss", "activation", "gradient", "weight"])
    words = [f"+recipe={RECIPES[number % len(RECIPES)]}", f"trainer.seed={chance.randrange(100)}"]
    kind = ["rewinds", "skips a step", "is clean"][number % 3]
    if kind == "rewinds":  # steps 3 and 4 are bad, and their data is left out
        words.append(f"debug.inject={{step: 1, where: {where}, value: {value}, steps: 100, windows: [8, 16]}}")
        words.append("recovery.max_consecutive_skips=1")
    elif kind == "skips a step":
        words.append(f"debug.inject={{step: {chance.choice([3, 7, 8])}, where: {where}, value: {value}}}")
    many = ranks if number % 4 == 3 else 1
    words += ["parallel=fsdp"] if many > 1 else []
    print(f"course {number}: {words[0][8:]}, {kind}, {many} rank{'s' * (many > 1)}", flush=True)
    return Course(folder / f"course{number}", words, many)


def soak(folder: Path, numbers: range, seed: int, ranks: int) -> dict[str, Counter[str]]:
    """Try the faults of these numbers. Return kind of fault -> result -> count."""
    tally: dict[str, Counter[str]] = {}
    now = course(folder, numbers.start // COURSE_FAULTS, seed, ranks)
    for number in numbers:
        if now.folder.name != (name := f"course{number // COURSE_FAULTS}"):
            shutil.rmtree(now.folder)
            now = course(folder, int(name[6:]), seed, ranks)
        kind, apply = FAULTS[number % len(FAULTS)]
        chance, began, why = random.Random(f"{seed} {number}"), time.monotonic(), ""
        place = now.copy()
        try:
            detail = apply(now, place, chance)
            result = now.verdict(place, refusable=not kind.startswith("process"))
        except SoakFailure as wrong:
            detail, result, why = "", "lost", str(wrong)
            place.rename(folder / f"lost{number}")
        tally.setdefault(kind, Counter())[result] += 1
        print(f"fault {number}  {kind}: {detail}  {result}  {time.monotonic() - began:.1f} s", flush=True)
        if why:
            print(f"soak: LOST (--seed {seed} --first {number} --faults 1): {why}", flush=True)
    return tally


def table(tally: dict[str, Counter[str]]) -> str:
    """Return the table in Markdown."""
    rows = ["| fault | tried | noticed | same bits | lost |", "| --- | --- | --- | --- | --- |"]
    for kind, found in [*sorted(tally.items()), ("all", sum(tally.values(), Counter()))]:
        rows.append(f"| {kind} | {found.total()} | {found['noticed']} | {found['same']} | {found['lost']} |")
    return "\n".join(rows)


def read_options() -> argparse.Namespace:
    """Read the command line. Raises UserError for what cannot be meant."""
    parser = Parser(__doc__)
    parser.add_argument("--faults", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default 0)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of what happens (default 1); moments also vary by themselves"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of every fourth course (default 2)")
    options = parser.parse_args()
    for name, least in (("faults", 1), ("ranks", 1), ("first", 0)):
        if (value := getattr(options, name)) < least:
            raise UserError(f"--{name} {value}: set {least} or more")
    return options


def main() -> int:
    try:
        options = read_options()
    except UserError as error:
        print(f"octet: error: {error}", file=sys.stderr)
        return REFUSED
    torch.set_num_threads(1)
    folder, began = Path(tempfile.mkdtemp(prefix="octet-soak-")), time.monotonic()
    numbers = range(options.first, options.first + options.faults)
    try:
        write_corpus(folder)
        warm_up(folder)
        tally = soak(folder, numbers, options.seed, options.ranks)
    except SoakFailure as wrong:
        print(f"soak: WRONG (--seed {options.seed}): {wrong}\nsee {folder}", flush=True)
        return 1
    lost, minutes = sum(found["lost"] for found in tally.values()), (time.monotonic() - began) / 60
    print(f"{table(tally)}\nsoak: {len(numbers)} faults in {minutes:.1f} minutes, {lost} lost")
    if lost:
        print(f"see {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
