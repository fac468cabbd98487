"""Preparing data in front of somebody: a bar for each stage on a terminal, a line elsewhere, nothing from the cache."""

from rich.console import Console
from rich.progress import Progress, TaskID

from trainer.data.config import DataConfig
from trainer.data.prepare import Prepared, prepare


def prepare_with_bars(data: DataConfig, vocab_size: int) -> Prepared:
    """`prepare`, showing its stages as they come."""
    console = Console()
    tasks: dict[str, TaskID] = {}
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bars:

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
                if not console.is_terminal:
                    print(what, flush=True)
            bars.update(tasks[what], completed=done)

        return prepare(data, vocab_size, show)
