"""Diagnosis: of a dropped step, which tensor went bad first, on which rank, and from which text.

It reads the evidence that the step left behind (`evidence`), after the fact and only if there was a bad step:

    where      each rank finds its own first place (in the order of `StepGuard.places`) in its own first bad microbatch;
               they compare. The earliest is where it began: what came after it was infected, on other ranks too
    how        the tensor's amax there (NaN or inf), and the scale it was cast with: FP8 holds numbers up to limit /
               scale. A tensor that was finite and still above that range was clipped, which is often the cause: the
               worst of them is named
    from what  rank and microbatch say which windows of the run's stream these were, the loader which tokens of
               train.bin, the tokenizer what text

Numbers: a window is counted in the run's stream, as the data cursor counts; tokens are offsets into train.bin.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from precision import ScalingArena
from trainer.data import Loader, load_tokenizer
from trainer.distributed import World
from trainer.recovery.evidence import Evidence, EvidenceKeeper
from trainer.recovery.guard import GRAD_SUFFIX, StepGuard, Verdict

CHARACTERS = 60
"""Of the offending text, in an event."""


@dataclass
class BadStep:
    """What is known of a dropped step. what: the fields of its event."""

    place: str
    """Where it went bad first, one of `StepGuard.places`."""
    details: list[str] = field(default_factory=list)
    what: dict[str, Any] = field(default_factory=dict)

    def line(self, step: int) -> str:
        """In words."""
        return f"step {step} is not finite, first at {'; '.join([self.place, *self.details])}; nothing of it was kept"


class Diagnosis:
    """Tells of the dropped steps of a run. A collective: all ranks ask the same."""

    def __init__(
        self,
        guard: StepGuard,
        arena: ScalingArena,
        keeper: EvidenceKeeper,
        world: World,
        loader: Loader,
        tokenizer: Path,
        microbatch_size: int,
    ):
        self._guard, self._arena, self._keeper, self._world = guard, arena, keeper, world
        self._loader, self._tokenizer, self._microbatch_size = loader, tokenizer, microbatch_size
        self._rows = {name: i for i, name in enumerate(arena.names)}
        self._limit = arena.limit.cpu()

    def tell(self, dropped: list[tuple[Verdict, np.ndarray]]) -> list[BadStep]:
        """dropped: all verdicts since the last call that are not ok, each with the windows that its step was given."""
        kept = self._keeper.take()
        assert len(kept) == len(dropped)
        return [self._tell(*pair, evidence) for pair, evidence in zip(dropped, kept, strict=True)]

    def _tell(self, verdict: Verdict, served: np.ndarray, evidence: Evidence | None) -> BadStep:
        place, mine = int(verdict.place), None
        if evidence is not None and (microbatch := evidence.microbatch) is not None:
            own, loss = evidence.own[microbatch], evidence.loss[microbatch]
            at = self._guard.first_place(own, loss[None])
            assert at is not None
            mine = microbatch, at, _word(float(own[row] if (row := self._row(at)) is not None else loss))
        found = [(theirs, rank) for rank, theirs in enumerate(self._world.gather(mine)) if theirs is not None]
        origin = None
        if found:
            (microbatch, place, amax), rank = min(found)
            origin = rank, microbatch
        text = self._guard.places[place]
        name, _, direction = text.partition(" ")
        bad = BadStep(text, what={"module": name.partition(":")[0], "where": direction.strip("()")})
        bad.what["tensor"] = name if self._row(place) is None else self._arena.names[self._row(place) or 0]
        if origin is not None:
            self._how(bad, self._row(place), amax, evidence)
        elif evidence is None:
            bad.details.append("too many bad steps since the last log to keep more of this one")
        self._from_what(bad, served, origin)
        return bad

    def _row(self, place: int) -> int | None:
        """The arena row of a place; None: it has none (the loss, weight gradients)."""
        name, _, direction = self._guard.places[place].partition(" ")
        return self._rows.get(name + GRAD_SUFFIX if direction == "(backward)" else name)

    def _how(self, bad: BadStep, row: int | None, amax: str, evidence: Evidence | None) -> None:
        bad.what["amax"] = amax
        bad.details.append(f"amax {amax}" if row is not None else amax)
        if evidence is None:
            return
        if row is not None and (limit := float(self._limit[row])) > 0:
            scale = float(evidence.scale[row]) if self._arena.delayed else 0.0
            bad.what |= {"scale": scale or None, "limit": limit}
            bad.details.append(
                f"scale {scale:.3g}, for numbers up to {limit / scale:.3g}" if scale else "its own scale"
            )
        if not self._arena.delayed:
            return
        times = torch.where(self._limit > 0, evidence.amax * evidence.scale / self._limit.clamp(min=1.0), 0.0)
        times = torch.where(torch.isfinite(times), times, 0.0)
        worst = int(times.argmax())
        if times[worst] > 1:
            bad.what["clipped"] = {
                "tensors": int((times > 1).sum()),
                "worst": self._arena.names[worst],
                "amax": float(evidence.amax[worst]),
                "scale": float(evidence.scale[worst]),
                "times": round(float(times[worst]), 2),
            }
            more = f"{int((times > 1).sum())} finite tensors above their range, the most"
            bad.details.append(f"{more} {self._arena.names[worst]} ({times[worst]:.3g} times)")

    def _from_what(self, bad: BadStep, served: np.ndarray, origin: tuple[int, int] | None) -> None:
        """Which data: of the microbatch if it is known, else of the step."""
        if origin is not None:
            rank, microbatch = origin
            size, share = self._microbatch_size, len(served) // self._world.size
            start = rank * share + microbatch * size
            served = served[start : start + size]
            bad.what |= {"rank": rank, "microbatch": microbatch}
            which = f"rank {rank}, " if self._world.many else ""
            bad.details.append(f"{which}microbatch {microbatch} of {share // size}")
        bad.what["windows"] = [int(served.min()), int(served.max())]
        bad.details.append(f"windows {served.min():,} to {served.max():,} of the run")
        if origin is not None:
            bad.what["tokens"] = self.tokens_of(served)

    def tokens_of(self, served: np.ndarray) -> list[list[int]]:
        """First and last token of each window, as offsets into train.bin."""
        S = self._loader.sequence_length
        return [[int(w) * S, int(w) * S + S] for w in self._loader.windows_at(served)]

    def text_of(self, number: int) -> str:
        """How the text of window `number` of the run begins."""
        tokens = self._loader.bins.gather(self._loader.windows_at(np.array([number])), self._loader.sequence_length)[0]
        text = load_tokenizer(self._tokenizer).decode(tokens[: 2 * CHARACTERS].tolist(), skip_special_tokens=False)
        return text if len(text) <= CHARACTERS else text[:CHARACTERS] + "..."


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "inf" if math.isinf(value) else f"{value:.4g}"
