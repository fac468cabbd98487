"""Accept files that were edited by hand: sign them as they are now.

    python scripts/accept_edit.py runs/first/recovery.json
    python scripts/accept_edit.py runs/first/config.yaml
    python scripts/accept_edit.py .cache/data/stdlib-1f0c.../prepared.json

A run refuses `recovery.json`, `backends.json` and `prepared.json` that do not match their digests (`trainer.digests`);
instead of such a `config.yaml` it resumes with the settings that its newest checkpoint keeps. With `prepared.json`, the
sidecars of all shards that it names are accepted too. Checkpoints and tokens cannot be accepted: start a new run from
other weights, or prepare the data again.
"""

import sys
from pathlib import Path

from precision.errors import UserError
from trainer.launch.command_line import Parser, guarded

NAMES = "recovery.json, backends.json, config.yaml or prepared.json"


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=NAMES)
    files = parser.parse_args().files
    from trainer.data.prepared import SUMMARY, accept_prepared
    from trainer.digests import accept, accept_stamped
    from trainer.run.names import BACKENDS, CONFIG, RECOVERY

    for path in files:
        if path.name == SUMMARY:
            accept_prepared(path.parent)
        elif path.name in (RECOVERY, BACKENDS):
            accept(path)
        elif path.name == CONFIG:
            accept_stamped(path)
        else:
            raise UserError(f"{path}: has no digest of its own; give {NAMES}")
        print(f"accepted {path}")


if __name__ == "__main__":
    sys.exit(guarded(run))
