"""Check every row of the precision plan against a real step:  python scripts/audit_precision.py +recipe=fp8_delayed
[--device cuda] [KEY=VALUE ...]

Takes the same config as train.py, trains two short steps on random tokens (two sequences), records what happens at each
row of the plan, and prints both side by side; then how the GEMMs of a GPU add up, and what could not be observed. Exit
code 1 if a row differs. It audits `reference` on a CPU, and with --device cuda the backends that train on a GPU: choose
a model that fits into one (model.num_layers=5).
"""

import sys
from pathlib import Path

from precision.errors import UserError
from trainer.launch.command_line import Parser, guarded
from trainer.launch.composition import compose

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
LENGTHS = {"cpu": 64, "cuda": 256}  # tokens of a sequence, at most


def run() -> None:
    parser = Parser(__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=LENGTHS, default="cpu", help="what is audited (default: cpu)")
    given, overrides = parser.parse_known_args()
    asked = [word for word in overrides if word.lstrip("+").startswith("trainer.device=")]
    if any(word.partition("=")[2] != given.device for word in asked):
        device = asked[0].partition("=")[2]
        choice = device if device in LENGTHS else " or ".join(LENGTHS)
        raise UserError(f"{asked[0]}: the audit has an option for it; write --device {choice}")
    sys.argv[1:] = [*overrides, f"trainer.device={given.device}"]
    from trainer.run.own_settings import own_settings

    jobs = compose(CONFIGS, own=own_settings)
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU; leave it out, or install a CUDA build of torch")
    from precision import bind, proof
    from trainer.config import load
    from trainer.forecast.preflight import check
    from trainer.launch.device import pick_device
    from trainer.offline.audit import audit
    from trainer.optim.build_optimizer import build_optimizer
    from trainer.step.engine import build_model

    for job in jobs:
        config = load(job.tree)
        device = pick_device(config.trainer.device)
        check(config)
        plan, model = build_model(config, device)
        arena = bind(model, plan, device)
        optimizer = build_optimizer(config, plan, model, device)
        torch.manual_seed(config.trainer.seed)
        t = config.trainer
        shape = 2, min(t.sequence_length, LENGTHS[given.device]) + 1
        batches = [torch.randint(config.model.vocab_size, shape) for _ in range(2)]
        found = audit(model, plan, arena, optimizer, batches, t.microbatch_size * t.sequence_length)
        wrong = [finding for finding in found.findings if not finding.agrees]
        width = max(len(finding.name) for finding in found.findings)
        for finding in found.findings:
            line = f"{'ok' if finding.agrees else 'NO':<3} {finding.name:<{width}}  {finding.seen}"
            print(line if finding.agrees else f"{line}\n    {'planned':<{width}}  {finding.planned}")
        for name, probe in found.probes.items():
            print(f"sum {name:<{width}}  {probe}")
        proved = proof.latest()
        for line in [*plan.notes, *([] if proved is None else [f"kernels: {proved.line}"])]:
            print(f"note: {line}")
        masked = ["trainer.document_masking: the text is random, and its attention is that of whole sequences"]
        for line in [*found.unseen, *(masked if t.document_masking else [])]:
            print(f"not seen: {line}")
        rows = f"{len(found.findings) - len(wrong)} of {len(found.findings)} rows"
        print(f"{config.precision.name} on {device.type}: {rows} are what the plan says", flush=True)
        if wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(guarded(run))
