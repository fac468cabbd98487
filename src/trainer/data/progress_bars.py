"""Progress of preparing data: a bar for each stage on a terminal, a line elsewhere, nothing from the cache."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import Progress, TaskID

from trainer.data.tokenizer_sample import Progress as Report


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
                    with suppress(OSError):  # of a lost output, which `prepare` would take for one of its files
                        print(what, flush=True)
            progress.update(tasks[what], completed=done, total=total or None)

        yield show
