"""The loader: bins to batches, with one number for its whole state.

The stream is cut into windows of S+1 tokens at stride S: neighbours share one token, the last target of one and the
first input of the other, so that each token is a target exactly once an epoch (except a remainder shorter than a window
at the end). The cursor counts windows since the start of the run. Window number `cursor + i` of the run is row i of the
next batch; quotient and remainder are its epoch and its place in the epoch, and `order.permute` maps the place to a
window. Nothing depends on how many processes share a batch: rank r of W reads rows [r B/W, (r+1) B/W). A run that
resumes on another number of processes, or comes to a phase with another batch size, continues where it stopped.

A run may change its sequence length (`trainer.phases`), which changes the windows. The numbers of a *section* of one
length begin at a multiple of 2^48: the text is read from its start, in another order. The run's timeline sets batch and
length of a step; `step` counts the batches returned, and is reset when the cursor is rewound.

Windows that broke the run can be left out (`leave_out`): their numbers are skipped as if they did not exist.

A thread can read batches `ahead` (`data.ahead`). The cursor is that of the batches returned, whatever has been read: a
checkpoint does not know of the thread, and a rewind drops what it has read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from precision.errors import UserError
from trainer.config.timeline import Segment
from trainer.data.bins import Bins
from trainer.data.order import permute
from trainer.data.prefetch import DeviceCopy, ReadThread

CPU = torch.device("cpu")
SECTION = 1 << 48
"""Windows of the run's stream between the starts of two sections, more than any run reads."""


def window_name(first: int, last: int) -> str:
    """Return "4", or "4 to 11", for these windows of the run's stream; in a later section "4 to 11 of section 1"."""
    section, begin, end = first // SECTION, first % SECTION, last % SECTION
    text = f"{begin:,}" if first == last else f"{begin:,} to {end:,}"
    return f"{text} of section {section}" if section else text


class _Reading(NamedTuple):
    """A batch that is being read: cursor and step before it, the rows to read (rank, world size), the numbers of all
    rows in the run's stream, and the future tokens."""

    begin: tuple[int, int]
    share: tuple[int, int]
    numbers: np.ndarray
    tokens: Future[Callable[[], torch.Tensor]]

    @property
    def end(self) -> tuple[int, int]:
        """Cursor and step after it."""
        return int(self.numbers[-1]) + 1, self.begin[1] + 1


class Loader:
    """Endless shuffled batches of a split, reshuffled each epoch. The same seed gives the same batches anywhere."""

    def __init__(
        self,
        bins: Bins,
        segments: Sequence[Segment],
        seed: int,
        *,
        device: torch.device = CPU,
        ahead: int = 0,
    ) -> None:
        """segments: of the run's timeline: batch and sequence length of each step. device: of the returned batches.
        ahead: number of batches read in advance; `close` ends that. Raises UserError if the bins do not hold one
        batch."""
        self._segments = segments
        for each in segments:
            bins.check_length(each.length, each.batch)
        if not 0 <= seed < 1 << 63:
            raise UserError(f"trainer.seed={seed}: must be from 0 to 2^63 - 1: set a smaller one, not negative")
        self.bins = bins
        self.seed = seed
        self._lengths = {each.section: each.length for each in segments}
        self.cursor = 0
        self.step = 0
        """Batches returned since the start of the run."""
        self._left_out: list[list[int]] = []  # [begin, end) of the run's stream, in order and disjoint
        self.served = np.arange(0)
        """Numbers, in the run's stream, of the windows that `next` returned last."""
        self._delivery = DeviceCopy(device)
        self._ahead, self._thread = ahead, ReadThread()
        self._readings: deque[_Reading] = deque()

    @property
    def num_windows(self) -> int:
        """Windows in an epoch, at the cursor."""
        return self.bins.num_windows(self.length_of(self.cursor))

    def length_of(self, number: int) -> int:
        """Return the tokens in the window with this number in the run's stream."""
        return self._lengths[number // SECTION]

    def next(self, rank: int = 0, world_size: int = 1) -> torch.Tensor:
        """Return this rank's rows of the next batch, int64 [B / world_size, S+1]; inputs [:, :-1], targets [:, 1:].
        Sets `served` to the numbers of the whole batch's windows [B].

        Raises DamagedShard as `Bins.gather` does; the cursor then stays.
        """
        batch_size = self._at(self.step + 1).batch
        if batch_size % world_size:
            raise UserError(
                f"trainer.global_batch_size={batch_size}: does not divide among {world_size} processes: "
                "make it a multiple of them"
            )
        reading = self._reading((rank, world_size))
        tokens = reading.tokens.result()()
        (self.cursor, self.step), self.served = reading.end, reading.numbers
        return tokens

    def _at(self, step: int) -> Segment:
        return self._segments[bisect_right(self._segments, step, key=lambda each: each.first) - 1]

    def _reading(self, share: tuple[int, int]) -> _Reading:
        """Return the next batch, and start reading those after it."""
        now = self.cursor, self.step
        if self._readings and self._readings[0][:2] != (now, share):
            self._forget()
        while len(self._readings) <= self._ahead:
            self._readings.append(self._begin(self._readings[-1].end if self._readings else now, share))
        return self._readings.popleft()

    def _begin(self, begin: tuple[int, int], share: tuple[int, int]) -> _Reading:
        now = self._at(begin[1] + 1)
        numbers = self._following(max(begin[0], now.section * SECTION), now.batch)
        rank, rows = share[0], now.batch // share[1]
        own = numbers[rank * rows : (rank + 1) * rows]
        read = partial(self._read, own)
        if self._ahead:
            tokens = self._thread.submit(read)
        else:
            tokens = Future()
            tokens.set_result(read())
        return _Reading(begin, share, numbers, tokens)

    def _read(self, numbers: np.ndarray) -> Callable[[], torch.Tensor]:
        return self._delivery.send(self.gather(numbers))

    def gather(self, numbers: np.ndarray) -> torch.Tensor:
        """Return the tokens of windows with these numbers in the run's stream [B], of one section: int64 [B, S+1]."""
        return torch.from_numpy(self.bins.gather(self.windows_at(numbers), self.length_of(int(numbers[0]))))

    def _forget(self) -> None:
        """Drop batches read ahead."""
        for reading in self._readings:
            reading.tokens.cancel()
        self._readings.clear()

    def close(self) -> None:
        """Stop reading ahead."""
        self._forget()
        self._thread.close()

    def _following(self, cursor: int, count: int) -> np.ndarray:
        """Return the numbers, in the run's stream, of the `count` windows from a cursor on [B]."""
        pieces, start, missing = [], cursor, count
        for begin, end in [*self._left_out, [1 << 62, 1 << 62]]:
            count = min(max(begin - start, 0), missing)
            pieces.append(np.arange(start, start + count))
            start, missing = max(start, end), missing - count
        return np.concatenate(pieces)

    def leave_out(self, ranges: list[list[int]]) -> None:
        """Never read the windows with these numbers in the run's stream, [begin, end) each. Calls accumulate."""
        self._forget()
        self._left_out = merge_ranges([*self._left_out, *ranges])

    def windows_at(self, number: np.ndarray) -> np.ndarray:
        """Map numbers of windows in the run's stream [B], of one section, to windows of the bins [B]; window w has the
        tokens from w S to w S + S."""
        section, count = int(number[0]) // SECTION, self.bins.num_windows(self.length_of(int(number[0])))
        epoch, index = np.divmod(number - section * SECTION, count)
        return permute(index, epoch + (section << 32), count, self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, its units, and the windows left out."""
        return {"cursor": self.cursor, "left_out": [list(span) for span in self._left_out]} | self._units(self.cursor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved cursor. Raises UserError as `check` does."""
        self.check(state)
        self._forget()
        self.cursor = int(state["cursor"])
        self._left_out = []
        self.leave_out(state.get("left_out", []))

    def check(self, state: dict[str, Any]) -> None:
        """Raise UserError if a saved cursor counts the windows of other data or in another order."""
        other = "so its data cursor does not apply: set it back, or start a new run from its weights with run.init_from"
        for key, now in self._units(state["cursor"]).items():
            if state[key] == now:
                continue
            if key == "data":
                raise UserError(f"data: {self.bins.path} is not the text of the run to resume, {other}")
            raise UserError(f"trainer.{key}={now}: the run to resume has {state[key]}, {other}")

    def _units(self, cursor: int) -> dict[str, int | str]:
        length = self._lengths.get(cursor // SECTION, 0)
        return {"sequence_length": length, "seed": self.seed, "data": self.bins.sidecar.sha256[:16]}


def merge_ranges(ranges: Iterable[list[int]]) -> list[list[int]]:
    """Sort [begin, end) ranges and merge those that overlap or touch."""
    out: list[list[int]] = []
    for begin, end in sorted(ranges):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return out


def validation_batches(
    bins: Bins, sequence_length: int, batch_size: int, max_windows: int | None = None
) -> Iterator[torch.Tensor]:
    """Yield int64 [<= batch_size, S+1] batches over the bins, each window at most once; all of them without
    `max_windows`.

    With it, windows are taken at even distances, so that few of them still come from all files. The same at each call.
    Raises UserError if the bins hold no window.
    """
    bins.check_length(sequence_length)
    num_windows = bins.num_windows(sequence_length)
    count = num_windows if max_windows is None else min(num_windows, max_windows)
    windows = np.arange(count) * num_windows // max(count, 1)
    for start in range(0, count, batch_size):
        yield torch.from_numpy(bins.gather(windows[start : start + batch_size], sequence_length))
