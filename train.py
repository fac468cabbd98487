"""Train a DeepSeek-style model: python train.py +recipe=fp8_delayed (--help says more).

Compose the config with Hydra, load it strictly, train.
"""

import os
import sys
from pathlib import Path

from trainer.cli import compose, guarded, refuse_many_processes


def run() -> None:
    """Everything the command line asks for. All of it is checked before the first run starts."""
    refuse_many_processes(os.environ)
    jobs = compose(Path(__file__).resolve().parent / "configs")
    from trainer.config import load
    from trainer.preflight import check, report

    configs = [load(job.tree) for job in jobs]
    plans = [check(config) for config in configs]
    for job, config, plan in zip(jobs, configs, plans, strict=True):
        if config.dry_run:
            print(report(config, plan))
            continue
        from trainer.trainer import Trainer

        Trainer(config, job.overrides).train()


def main() -> int:
    """Exit code: 0 done, 1 the run failed, 2 the command or its config is wrong, 130 interrupted."""
    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
