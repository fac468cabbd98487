"""Prove that every row of the precision plan is what happens:  python scripts/audit_precision.py +recipe=fp8_delayed
[KEY=VALUE ...]

Takes the same config as train.py, trains two short steps on random tokens (two sequences of at most 64), records what
really happened at each row of the plan, and prints both side by side. Exit code 1 if a row differs.
"""

import sys
from pathlib import Path

from trainer.launch.command_line import compose, guarded

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def run() -> None:
    """Audit each composed config."""
    jobs = compose(CONFIGS)
    import torch

    from precision import bind
    from trainer.config import load
    from trainer.forecast.preflight import check
    from trainer.offline.audit import audit
    from trainer.optim.adamw import Optimizer
    from trainer.step.engine import build_model

    for job in jobs:
        config = load(job.tree)
        check(config)
        cpu = torch.device("cpu")
        plan, model = build_model(config, cpu)
        arena = bind(model, plan, cpu)
        optimizer = Optimizer(model, model.no_decay(), config.optim, config.trainer.max_steps, cpu)
        torch.manual_seed(config.trainer.seed)
        shape = 2, min(config.trainer.sequence_length, 64) + 1
        batches = [torch.randint(config.model.vocab_size, shape) for _ in range(2)]
        findings = audit(model, plan, arena, optimizer, batches)
        wrong = [finding for finding in findings if not finding.agrees]
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            line = f"{'ok' if finding.agrees else 'NO':<3} {finding.name:<{width}}  {finding.seen}"
            print(line if finding.agrees else f"{line}\n    {'planned':<{width}}  {finding.planned}")
        print(f"{config.precision.name}: {len(findings) - len(wrong)} of {len(findings)} rows are what the plan says")
        if wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(guarded(run))
