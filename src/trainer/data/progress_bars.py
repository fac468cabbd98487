"""Progress of preparing data: a bar for each stage on a terminal, a line elsewhere, nothing from the cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from trainer.config.data import DataConfig
from trainer.data.prepare import find_or_build, prepare
from trainer.data.prepared import Prepared
from trainer.data.tokenizer_sample import Progress as Report


def prepare_with_bars(data: DataConfig, vocab_size: int, folder: Path | None = None) -> Prepared:
    """Run `prepare` and show its stages."""
    with bars() as show:
        return prepare(data, vocab_size, show, folder)


def find_or_build_with_bars(data: DataConfig, vocab_size: int) -> Prepared:
    """Run `find_or_build` and show its stages."""
    with bars() as show:
        return find_or_build(data, vocab_size, show)


@contextmanager
def bars() -> Iterator[Report]:
    """Show the progress of stages."""
    console = Console()
    tasks: dict[str, TaskID] = {}
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total or None)
                if not console.is_terminal:
                    print(what, flush=True)
            progress.update(tasks[what], completed=done, total=total or None)

        yield show
