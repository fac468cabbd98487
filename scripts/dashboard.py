"""Look at runs: loss, norms, scales, experts, speed, power and events, in one HTML file or live.

    python scripts/dashboard.py runs/mine                     writes runs/mine/dashboard.html
    python scripts/dashboard.py runs/bf16 runs/fp8_delayed    several, gaps to the first: runs/bf16/comparison.html
    python scripts/dashboard.py runs/mine --serve             live, at http://127.0.0.1:8765, until Ctrl-C

The file needs no network and no other file: it can be mailed, or opened on a phone. With --serve, a run may still be
training, or start later; to view it from another machine: `ssh -L 8765:127.0.0.1:8765 HOST`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from precision.errors import UserError
from trainer.files import replace_file
from trainer.launch.command_line import Parser, guarded

if TYPE_CHECKING:
    from trainer.health.dashboard.read import Run


def run() -> None:
    """Read the command line; write the page, or serve it."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder; the first is the measure")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: in the first run's folder, dashboard.html; comparison.html of several)",
    )
    parser.add_argument("--serve", action="store_true", help="serve the page on this machine, as it changes")
    parser.add_argument("--port", type=int, metavar="PORT", help="of --serve (8765)")
    arguments = parser.parse_args()
    if len({path.resolve() for path in arguments.runs}) < len(arguments.runs):
        raise UserError(f"{' '.join(map(str, arguments.runs))}: a run is named twice; name each once")
    if arguments.serve:
        if arguments.out is not None:
            raise UserError(f"--out {arguments.out}: --serve writes no file; give one of the two")
        serve(arguments.runs, 8765 if arguments.port is None else arguments.port)
        return
    if arguments.port is not None:
        raise UserError(f"--port {arguments.port}: it is for --serve; add that, or leave it out")
    from trainer.health.dashboard.page import page, payload

    runs = [read(path) for path in arguments.runs]
    out = arguments.out or runs[0].path / ("dashboard.html" if len(runs) == 1 else "comparison.html")
    is_other = out.exists() and not out.is_file()  # a folder, or a device, which the page would replace
    if is_other or not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: {'not a file' if is_other else 'its folder does not exist'}; give a file")
    replace_file(out, page(payload(runs)).encode(errors="replace"))
    print(out)


def read(path: Path) -> "Run":
    """Return a run with data. Raises UserError without any."""
    from trainer.health.dashboard.read import Run
    from trainer.run.names import METRICS

    if not (path / METRICS).is_file():
        lacks = f"no {METRICS} in it" if path.is_dir() else "no such folder"
        raise UserError(f"{path}: {lacks}; give the folder of a run that has begun, as runs/NAME")
    (path / METRICS).open().close()  # its reader waits for a file that it may not read
    found = Run(path)
    found.poll()
    if not found.series:
        raise UserError(f"{path}: {METRICS} has no step yet; wait for the first logged one, or use --serve")
    return found


def serve(paths: list[Path], port: int) -> None:
    """Serve until Ctrl-C. A folder may appear later, if its parent exists."""
    from trainer.health.dashboard.serve import Server
    from trainer.run.names import METRICS

    for path in paths:
        if (
            path.exists()
            and not (path / METRICS).is_file()
            and path.is_dir()
            and any((one / METRICS).is_file() for one in path.iterdir())
        ):
            raise UserError(f"{path}: a folder of runs; name the runs, as {path}/*")
        if not path.absolute().parent.is_dir() or (path.exists() and not path.is_dir()):
            why = "not a folder" if path.exists() else f"no such folder, and no {path.parent} where it could appear"
            raise UserError(f"{path}: {why}; give the folder of a run, as runs/NAME")
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: not between 0 and 65535")
    try:
        server = Server(paths, port)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; choose another, or 0 for any") from error
    for path in paths:
        if not (path / METRICS).is_file():
            print(f"{path} is not there yet; it will be shown when it is")
    print(f"{server.url}    Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


if __name__ == "__main__":
    sys.exit(guarded(run))
