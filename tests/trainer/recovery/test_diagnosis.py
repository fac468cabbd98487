"""What is reported of a bad step: tensor, rank, microbatch and text; and that a good one pays nothing for it."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from composed import config_of
from ranks import joined
from run_lines import events
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import Config
from trainer.config.timeline import Timeline
from trainer.data import Loader, load_tokenizer, prepare
from trainer.launch.world import World
from trainer.parallel.mesh import Degrees
from trainer.recovery import diagnosis
from trainer.recovery.diagnosis import BadStep, Diagnosis, Origin
from trainer.recovery.nonfinite_probe import probe_microbatch
from trainer.step.engine import Engine, build_engine
from trainer.step.guard import Verdict
from trainer.step.step_snapshot import KEPT
from trainer.step.train_step import train_step
from trainer.trainer import Trainer

Configs = Callable[..., Config]
Small = Callable[..., list[str]]
Dropped = list[tuple[Verdict, np.ndarray]]
FAST = ("data.validation_fraction=0.03", "model.num_mtp_layers=0", "health.every=0", "checkpoint.every=0")
FP8 = (*FAST, "precision=fp8_delayed")


def event_of(config: Config, steps: int = 2) -> tuple[Trainer, dict[str, Any]]:
    """The event of the one bad step among these."""
    trainer = Trainer(config)
    for step in range(1, steps + 1):
        trainer.step = step
        trainer._step(trainer.run.loader.next())
    trainer.run.close(None)
    (event,) = events(trainer.run.folder.path, "nonfinite")
    return trainer, event


def fault(where: str, value: str = "nan") -> str:
    return f"debug.inject={{step: 2, where: {where}, value: {value}}}"


def text_at(trainer: Trainer, tokens: list[int]) -> str:
    data = trainer.run.data
    return load_tokenizer(data.tokenizer_path).decode(data.train.tokens[tokens[0] : tokens[1] + 1].tolist())


def test_a_text_that_cannot_be_read_costs_the_text_and_not_the_run(
    config: Configs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tokenizer is a file of the data's cache, which a user may clear during a run."""
    monkeypatch.setattr(diagnosis, "load_tokenizer", lambda path: load_tokenizer(tmp_path / "gone.json"))
    _, event = event_of(config(*FP8, fault("activation")))
    assert event["windows"] == [4, 4] and len(event["tokens"]) == 1 and "text" not in event
    assert "cannot be read" in event["message"]


@pytest.mark.parametrize(
    "degrees", [Degrees(shard=2), Degrees(shard=2, context=3), Degrees(replicate=2, shard=2, tensor=2)]
)
def test_the_sequences_of_a_microbatch_are_those_that_its_rank_reads(degrees: Degrees) -> None:
    batch = torch.arange(6 * degrees.data)
    engine = cast(Any, SimpleNamespace(degrees=degrees))
    diagnosis = cast(Any, SimpleNamespace(_engine=engine, microbatch_size=2))
    for rank in range(degrees.world):
        engine.world = SimpleNamespace(rank=rank)
        part, parts = cast(Any, Engine.data_share).fget(engine)
        for microbatch, expected in enumerate(batch.chunk(parts)[part].split(2)):
            assert torch.equal(batch[Diagnosis._rows_of(diagnosis, Origin(rank, microbatch), len(batch))], expected)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("where", ["activation", "gradient"])
def test_one_number_is_found(config: Configs, where: str, value: str) -> None:
    trainer, event = event_of(config(*FP8, fault(where, value)))
    assert event["module"] == "layers.1.attn" and event["step"] == 2
    assert event["tensor"] == ("layers.1.attn" if where == "activation" else "layers.1.attn:grad")
    assert event["where"] == ("forward" if where == "activation" else "backward")
    assert event["amax"] == {"nan": "NaN", "inf": "inf"}[value]
    assert (event["elements"], event["of"]) == (1, 2 * 24 * 64)
    assert (event["rank"], event["microbatch"], event["windows"]) == (0, 0, [4, 4]), "the first sequence of step 2"
    (tokens,) = event["tokens"]
    assert tokens[1] - tokens[0] == 24
    window = trainer.run.loader.windows_at(np.array([4]))[0]
    assert tokens[0] == window * 24
    assert text_at(trainer, tokens).startswith(event["text"].removesuffix("..."))
    message = event["message"]
    for part in ("1 of 3,072 numbers", "microbatch 0 of 2", "window 4 of the run", json.dumps(event["text"])):
        assert part in message, message


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("where", ["loss", "weight"])
def test_a_fault_of_the_loss_or_the_weights_names_no_text(config: Configs, where: str, value: str) -> None:
    _, event = event_of(config(*FP8, fault(where, value)))
    assert event["module"] == {"loss": "loss", "weight": "layers.1.moe"}[where] and event["where"] == "forward"
    assert event["elements"] >= 1 and "text" not in event
    assert event["windows"] == [4, 5] and len(event["tokens"]) == 2, "the microbatch"


def test_rows_of_experts_show_no_sequences(config: Configs) -> None:
    """With one expert a token they are as many as tokens, in another order."""
    made = config("precision=bf16", *FAST, "model.num_experts_per_token=1", "trainer.sequence_length=4")
    engine = build_engine(made, torch.device("cpu"))
    moe, chosen = cast(Any, engine.model.layers[1]).moe, []
    moe.gate.register_forward_hook(lambda module, args, routing: chosen.append(routing.expert[..., 0]))
    tokens = torch.arange(20).view(4, 5)
    probe_microbatch(engine, 1, 0, tokens, 4)
    used, count = chosen[0].unique(return_counts=True)
    rare = used[count.argmin()]
    with torch.no_grad():
        moe.experts.down.weight[rare] = math.inf
    seen = probe_microbatch(engine, 1, 0, tokens, 4)
    assert seen.first_bad is not None and seen.first_bad.name == "layers.1.moe.experts.down"
    assert seen.bad_sequences == (chosen[1] == rare).any(1).nonzero().flatten().tolist()
    assert seen.first_bad.sequences == []


def test_a_scale_that_was_left_behind_is_named(config: Configs) -> None:
    """What goes into a projection grows out of BF16; another tensor has eight times the scale that would fit it."""
    trainer = Trainer(config(*FP8))
    engine = trainer.run.engine
    trainer.step = 1
    trainer._step(trainer.run.loader.next())
    engine.arena.scale[engine.arena.names.index("layers.0.ffn.down:input")] *= 8
    scale = float(engine.arena.scale[engine.arena.names.index("layers.0.attn.o:input")])
    engine.model.layers[0].attn.o.register_forward_pre_hook(lambda m, args: (args[0] * 1e39,))  # type: ignore
    trainer.step = 2
    trainer._step(trainer.run.loader.next())
    trainer.run.close(None)
    event = events(trainer.run.folder.path)[-1]
    assert event["module"] == "layers.0.attn.o" and event["tensor"] == "layers.0.attn.o:input", event
    assert event["scale"] == pytest.approx(scale) and event["limit"] == 448.0
    assert f"for numbers up to {448 / scale:.3g}" in event["message"]
    assert event["saturated"] > 0.9 and event["elements"] > 1000
    worst = event["clipped"]
    assert worst["tensor"] == "layers.0.ffn.down:input" and worst["amax"] * worst["scale"] > 2 * 448
    assert "layers.0.ffn.down:input was" in event["message"]


def test_a_bad_step_before_a_phase_is_run_again_with_its_own_scales(config: Configs) -> None:
    """On a GPU, where the next phase reviews it: its fewer tokens raise the histories of gradients."""
    seen, spoil = [], torch.tensor([math.inf, *[9.0] * 63], dtype=torch.bfloat16)
    for phases in (), ("trainer.phases=[{until: 2}, {global_batch_size: 2}]",):
        trainer = Trainer(config(*FP8, *phases))
        layer, review = cast(Any, trainer.run.engine.model.layers[1]).attn.o, trainer._review
        trainer._review = lambda: None  # type: ignore[method-assign]
        for step in (1, 2):
            trainer.step = step
            trainer._enter()
            if step == 2:
                layer.register_forward_hook(lambda m, args, y: y.register_hook(lambda grad: grad * spoil) and None)
            trainer._step(trainer.run.loader.next())
        trainer._review, trainer.step = review, 3  # type: ignore[method-assign]
        trainer._enter()
        trainer._review()
        trainer.run.close(None)
        (event,) = events(trainer.run.folder.path, "nonfinite")
        seen.append({key: event[key] for key in ("step", "tensor", "scale", "saturated")})
    assert seen[0] == seen[1]


def poison(engine: Any, sequences: Tensor, times: int = 1 << 30) -> None:
    """Sequences [n, S + 1] whose embedding is not a number, wherever they are read, the first `times`."""
    left = [times]

    def spoil(module: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        bad = (args[0][:, None] == sequences).all(-1).any(-1)
        left[0] -= int(bad.any())
        return torch.where(bad[:, None, None], torch.nan, output) if left[0] >= 0 else output

    engine.model.embed.register_forward_hook(spoil)


def test_a_later_microbatch_and_its_text(config: Configs) -> None:
    """The third sequence of four: one of the data, so that it comes again where it is read again."""
    trainer = Trainer(config(*FP8))
    tokens = trainer.run.loader.next()
    poison(trainer.run.engine, tokens[2:3])
    trainer.step = 1
    trainer._step(tokens)
    trainer.run.close(None)
    event = events(trainer.run.folder.path)[-1]
    assert (event["microbatch"], event["windows"]) == (1, [2, 2])
    assert event["elements"] == 24 * 64 and event["of"] == 2 * 24 * 64
    assert text_at(trainer, event["tokens"][0]).startswith(event["text"].removesuffix("..."))


def test_what_does_not_come_again_is_reported(config: Configs) -> None:
    trainer = Trainer(config(*FP8))
    tokens = trainer.run.loader.next()
    poison(trainer.run.engine, tokens[2:3], times=1)
    trainer.step = 1
    trainer._step(tokens)
    trainer.run.close(None)
    event = events(trainer.run.folder.path)[-1]
    assert event["elements"] == 0 and event["windows"] == [2, 3]
    assert "finite when the same microbatch ran again" in event["message"]


class Waits(TorchDispatchMode):
    """Counts where the host asks for a number."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        scalar = func is torch.ops.aten._local_scalar_dense.default
        self.count += scalar and args[0].dtype != torch.int8  # FP8 codes, which are looked at on CPUs only
        return func(*args, **(kwargs or {}))


class Run:
    """An engine with its diagnosis, without a folder; on a GPU verdicts would wait like this."""

    def __init__(self, config: Config, world: World | None = None):
        self.config, t = config, config.trainer
        data = prepare(config.data, config.model.vocab_size)
        self.loader = Loader(data.train, Timeline(t).segments, t.seed)
        self.engine = build_engine(config, torch.device("cpu"), world=world)
        self.diagnosis = Diagnosis(self.engine, self.loader, data.tokenizer_path, t.microbatch_size, Path("runs/run"))
        self.verdicts: Dropped = []

    def step(self, step: int) -> None:
        tokens = self.loader.next(*self.engine.data_share)
        result = train_step(self.engine, step, tokens, self.config.trainer.microbatch_size)
        self.verdicts.append((result.verdict, self.loader.served))

    def report(self) -> list[BadStep]:
        return self.diagnosis.report([pair for pair in self.verdicts if not bool(pair[0].ok)])


def test_no_step_waits_for_the_host(config: Configs) -> None:
    run = Run(config(*FP8, fault("gradient")))
    run.step(1)  # what is made once
    run.loader.cursor -= 4
    with Waits() as waits:
        run.step(2)
        run.step(3)
    assert waits.count == 0 and [bool(verdict.ok) for verdict, _ in run.verdicts] == [True, False, True]


def test_snapshots_are_kept_until_the_host_reads_them(config: Configs) -> None:
    """Of many bad steps in one interval: the first and the last in full, of the others where and when."""
    bad = KEPT + 1
    run = Run(config(*FP8, f"debug.inject={{step: 2, steps: {bad}, where: activation, value: inf}}"))
    for step in range(1, bad + 2):
        run.step(step)
    reports = run.report()
    assert [step.place for step in reports] == ["layers.1.attn (forward)"] * bad
    assert ["amax" in step.what for step in reports] == [True] * (KEPT - 1) + [False, True]
    assert reports[KEPT - 1].what["windows"] == [4 * KEPT, 4 * KEPT + 3], "all of the step"
    assert "too many" in reports[KEPT - 1].details[0]
    assert reports[-1].what["windows"] == [4 * bad, 4 * bad + 1]
    assert [step.what.get("elements") for step in reports] == [1] + [None] * (bad - 1), "one is run again, not all"
    run.verdicts.clear()
    run.step(bad + 2)
    assert run.report() == []


def test_weights_that_have_moved_on_name_the_command(config: Configs) -> None:
    run = Run(config(*FP8, fault("activation")))
    for step in (1, 2, 3):
        run.step(step)
    before = run.engine.arena.amax.clone()
    (bad,) = run.report()
    assert "elements" not in bad.what and bad.what["windows"] == [4, 5]
    assert "python scripts/replay_step.py runs/run 2" in bad.line(2)
    assert torch.equal(run.engine.arena.amax, before)


def main(keys: list[str], out: Path) -> None:
    """Two ranks, in the second step a sequence of the second one."""
    with joined() as world:
        config = config_of(keys)
        run = Run(config, world)
        run.step(1)
        tokens = run.loader.next()
        run.loader.cursor -= 4
        poison(run.engine, tokens[3:4])
        run.step(2)
        (bad,) = run.report()
        run.verdicts.clear()
        run.step(3)
        assert math.isfinite(float(run.engine.optimizer.norms(torch.tensor(True))[0])) and bool(run.verdicts[0][0].ok)
        everyone = world.gather([bad.what, bad.line(2)])
        assert everyone[0] == everyone[1], "all ranks say the same"
        if world.is_first:
            out.write_text(json.dumps(everyone[0]))


def test_a_bad_step_names_its_rank(overrides: Small, start_ranks: Callable[..., None], tmp_path: Path) -> None:
    out = tmp_path / "reports.json"
    start_ranks(__file__, 2, json.dumps(overrides(*FP8, "parallel=fsdp", "trainer.microbatch_size=1")), out)
    what, line = json.loads(out.read_text())
    assert (what["rank"], what["microbatch"], what["windows"]) == (1, 1, [7, 7])
    assert what["module"] == "layers.0.attn.q" and what["tensor"] == "layers.0.attn.q:input" and what["elements"] > 1
    assert "rank 1, microbatch 1 of 2; window 7 of the run" in line and what["text"]
    assert what["amax"] == "NaN" and "amax NaN" in line, "as in one process, where ranks compare no amaxes"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
