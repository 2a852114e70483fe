"""Tables and progress: in colour on a terminal, plain ASCII text in a pipe."""

import os
import sys
import time
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table


def make_console(width: int = 110) -> Console:
    """Return a console as wide as the terminal, or of this width if the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else width)


def make_table(console: Console, left: Iterable[str], right: Iterable[str] = ()) -> Table:
    """Return an empty table with columns aligned to the left and, after them, to the right."""
    table = Table(box=box.ROUNDED if console.is_terminal else box.ASCII2)
    # Long cells are folded and not cut, because the mark of a cut cell is not ASCII.
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    return table


def make_progress(console: Console) -> Progress:
    """Return a progress bar that leaves no trace, and that only a terminal shows."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def announce(text: str, progress: Progress, task: TaskID) -> None:
    """Print what is being done: in the progress bar on a terminal, and elsewhere as a line of the error stream.

    If errors and results go to the same file, print nothing, so that a table stays whole.
    """
    progress.update(task, description=text)
    if progress.disable and not _one_file():
        print(f"{text} ...", file=sys.stderr, flush=True)


def first_line(problem: Exception) -> str:
    """Return the type of an exception and the first line of its text."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"


def as_lines(cells: str, passed: bool, name: str, message: str) -> list[str]:
    """Return the cells of a row with its verdict, and a second line with the name if there was an exception."""
    verdict = "[green]pass[/]" if passed else f"[bold red]{'RAISED' if message else 'FAIL'}[/]"
    return [f"{cells}  {verdict}", *([f"[red]{escape(f'{name}: {message}')}[/]"] if message else [])]


def took(elapsed: float, processor: float) -> str:
    """Return the time since a start, as a text; the arguments are `perf_counter` and `process_time` at the start."""
    seconds = time.perf_counter() - elapsed, time.process_time() - processor
    return "{:.0f} seconds, {:.0f} seconds of processor time".format(*seconds)


def _one_file() -> bool:
    """Return whether output and errors go to one file or pipe, as after `2>&1`."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:  # The streams are no files, as in a notebook.
        return False
