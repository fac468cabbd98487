"""Muon: orthogonal updates of logical matrices, by the side of AdamW for the rest."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from composed import config_of, model_of
from torch import Tensor, nn

from models.matrices import Division
from models.matrices import division as division_of
from trainer.config import Coefficients, Config, Iteration, Moments, MuonConfig, OptimConfig, OptimizerName, Schedule
from trainer.forecast.cost import Machine, cost
from trainer.forecast.memory import forecast_memory
from trainer.forecast.muon import muon_size
from trainer.forecast.preflight import check
from trainer.optim import muon as muon_module
from trainer.optim.adamw import LearningRate
from trainer.optim.build_optimizer import muon_layouts, muon_rows
from trainer.optim.muon import Muon
from trainer.optim.orthogonalise import polynomials
from trainer.optim.owners import layout
from trainer.parallel.mesh import Degrees
from trainer.step.engine import build_engine
from trainer.trainer import Trainer

MUON = MuonConfig(
    momentum=0.95, nesterov=True, coefficients=Coefficients.quintic, steps=None, iteration=Iteration.fp32, scale=0.2,
    router=False,
)  # fmt: skip
CONFIG = OptimConfig(
    lr=0.1, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, clip=None, moments=Moments.fp32, schedule=Schedule.wsd,
    warmup_steps=0, decay_fraction=0.0, min_lr_ratio=0.1, name=OptimizerName.muon, muon=MUON,
)  # fmt: skip


def optimizer(weight: Tensor, division: Division, config: OptimConfig = CONFIG) -> tuple[nn.Module, Muon]:
    """Of a model of one matrix, and a norm that is AdamW's."""
    model = nn.Module()
    model.weight, model.norm = nn.Parameter(weight.clone()), nn.Parameter(torch.ones(3))
    return model, Muon(
        model,
        {"norm"},
        config,
        LearningRate(config, 100),
        torch.device("cpu"),
        {"weight": layout(weight.shape, division)},
    )


def apart(weight: Tensor, division: Division) -> list[Tensor]:
    """Copies of its logical matrices."""
    groups = weight.reshape(-1, division.period, weight.shape[-1])
    boxes = division.boxes(weight.shape[-1])
    return [g[b.row : b.row + b.rows, b.column : b.column + b.columns].clone() for b in boxes for g in groups]


@pytest.mark.parametrize("nesterov", [True, False])
def test_two_steps_are_those_of_torch(nesterov: bool) -> None:
    """torch.optim.Muon iterates in BF16: the difference is as large as BF16 makes to ours."""
    torch.manual_seed(0)
    weight, gradients = torch.randn(24, 40), torch.randn(2, 24, 40)
    ours = {}
    for iteration in Iteration:
        assert CONFIG.muon is not None
        how = replace(MUON, iteration=iteration, nesterov=nesterov)
        model, muon = optimizer(weight, Division((24,)), replace(CONFIG, muon=how))
        for i, gradient in enumerate(gradients):
            model.weight.grad, model.norm.grad = gradient.clone(), torch.ones(3)  # type: ignore[union-attr]
            muon.step(torch.tensor(True), torch.tensor(i))
        ours[iteration] = model.weight.detach() - weight  # type: ignore[operator]
    theirs = nn.Parameter(weight.clone())
    keys = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.95, "nesterov": nesterov}
    plain = torch.optim.Muon([theirs], **keys, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        theirs.grad = gradient.clone()
        plain.step()
    spread = (ours[Iteration.bf16] - ours[Iteration.fp32]).norm()
    assert (ours[Iteration.fp32] - (theirs.detach() - weight)).norm() < 3 * spread
    finer = (ours[Iteration.fp16] - ours[Iteration.fp32]).norm()
    largest = sum(map(abs, polynomials(Coefficients.quintic)[-1])) * 2.0**-8  # roundings of a step's three terms
    assert spread < largest * ours[Iteration.fp32].norm()
    assert 4 * finer < spread < 16 * finer, "a rounding of BF16 is 8 times one of FP16"


@pytest.mark.parametrize("size", [2.0**-24, 2.0**17])
@pytest.mark.parametrize("iteration", Iteration)
def test_a_gradient_of_any_size_gives_the_same_update(iteration: Iteration, size: float) -> None:
    """In FP16 it would be 0 or infinite before it is normed."""
    torch.manual_seed(0)
    weight, gradient, moved = torch.randn(24, 40), torch.randn(24, 40), []
    for each in (1.0, size):
        muon_config = replace(MUON, iteration=iteration)
        model, muon = optimizer(weight, Division((24,)), replace(CONFIG, muon=muon_config, clip=None))
        model.weight.grad = gradient * each  # type: ignore[operator]
        muon.step(torch.tensor(True), torch.tensor(0))
        moved.append(model.weight.detach() - weight)  # type: ignore[operator]
    assert torch.equal(*moved)


@pytest.mark.parametrize("at_once", [1 << 20, 100])
@pytest.mark.parametrize(
    ("shape", "division"),
    [
        ((24, 8), Division((4, 2))),  # four heads, two kinds of rows
        ((5, 12, 8), Division((6, 6))),  # experts, gate and up
        ((3, 8, 6), Division((8,))),
        ((8, 16), Division((8,), columns=2)),
    ],
)
def test_logical_matrices_move_as_parameters_of_their_own(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], division: Division, at_once: int
) -> None:
    """However they are batched; and a fused weight does not, so that the test would see it."""
    torch.manual_seed(0)

    weight, gradients = torch.randn(shape), torch.randn(2, *shape)
    each = [optimizer(matrix, Division((matrix.shape[0],))) for matrix in apart(weight, division)]
    fused = optimizer(weight, Division((shape[-2],)))
    monkeypatch.setattr(muon_module, "AT_ONCE", at_once)
    whole = optimizer(weight, division)
    for i, gradient in enumerate(gradients):
        parts = [gradient, gradient.clone(), *apart(gradient, division)]
        for (model, muon), part in zip([whole, fused, *each], parts, strict=True):
            model.weight.grad = part  # type: ignore[union-attr]
            muon.step(torch.tensor(True), torch.tensor(i))
    for ours, (model, _) in zip(apart(whole[0].weight.detach(), division), each, strict=True):  # type: ignore[operator]
        torch.testing.assert_close(ours, model.weight.detach(), rtol=1e-5, atol=1e-5)  # type: ignore[operator]
    if len(division.rows) > 1 or division.columns > 1:
        assert not torch.allclose(fused[0].weight, whole[0].weight, atol=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("degrees", [Degrees(shard=4), Degrees(2, 2, 4), Degrees(shard=2, tensor=4)], ids=str)
def test_the_forecast_counts_the_parts_of_a_rank(degrees: Degrees) -> None:
    made = config_of(["model=moonlight_16b", "optim=muon_wsd"])
    _, plan = model_of(made)
    held = [0] * degrees.world
    for each in muon_layouts(made, plan, degrees).values():
        for part in each.parts:
            for rank in part.ranks:
                held[rank] += (part.end - part.begin) * part.columns
    assert muon_size(made, plan, degrees).elements == sum(held) / degrees.world


@pytest.mark.parametrize("name", ["moonlight_16b", "deepseek_v3"])
def test_the_forecast_counts_what_the_model_has(name: str) -> None:
    made = config_of([f"model={name}", "optim=muon_wsd", "trainer.device=cpu"])
    model, plan = model_of(made)
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    mine = {f"{row}.weight" for row in muon_rows(made, plan)}
    size = muon_size(made, plan)
    assert size.elements == sum(sizes[n] for n in mine)
    left = sum(of for n, of in sizes.items() if n not in mine)
    assert forecast_memory(made, plan)["optimizer"] == 4.0 * size.elements + 8.0 * left
    narrow = config_of([f"model={name}", "optim=muon_wsd", "precision.table.optim.moments=bf16"])
    _, in_bf16 = model_of(narrow)
    assert forecast_memory(narrow, in_bf16)["optimizer"] == 2.0 * size.elements + 4.0 * left
    machine = Machine(1, 1, 1e12, 1e15, 1e12, 1e12)
    slower = cost(made, plan, Degrees(), machine).compute
    slower -= cost(config_of([f"model={name}", "trainer.device=cpu"]), plan, Degrees(), machine).compute
    assert slower == pytest.approx(size.flops / 1e15)
    if name == "moonlight_16b":
        experts = sum(of for n, of in sizes.items() if n in mine and ".experts." in n)
        assert experts > 0.9 * size.elements, "no rule by shape sends them to AdamW"


def test_a_skipped_step_changes_no_bit() -> None:
    torch.manual_seed(0)
    model, muon = optimizer(torch.randn(8, 6), Division((8,)))
    for i, ok in enumerate((True, False)):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        state = {name: {k: t.clone() for k, t in of.items()} for name, of in muon.state_dict().items()}
        for p in model.parameters():
            p.grad = torch.randn_like(p) * (1.0 if ok else torch.nan)
        muon.step(torch.tensor(ok), torch.tensor(i))
        same = [torch.equal(p, before[name]) for name, p in model.named_parameters()]
        same += [torch.equal(t, state[name][k]) for name, of in muon.state_dict().items() for k, t in of.items()]
        assert not any(same) if ok else all(same)
    assert float(muon.norms(torch.tensor(False))[1]) == 0, "though the gradients were not numbers"


def test_updates_have_the_rms_of_adamw() -> None:
    """0.2 times the learning rate, up to the spread of the singular values, whatever the shape."""
    torch.manual_seed(0)
    low, high = 0.65, 1.25  # of the singular values (`orthogonalise`), and so of the root of their mean square
    for shape in ((16, 64), (64, 16), (32, 32)):
        model, muon = optimizer(torch.zeros(shape), Division(shape[:1]))
        model.weight.grad = torch.randn(shape)  # type: ignore[union-attr]
        muon.step(torch.tensor(True), torch.tensor(0))
        rms = model.weight.detach().square().mean().sqrt()  # type: ignore[union-attr]
        assert low < float(rms) / (0.1 * 0.2) < high
        assert float(muon.norms(torch.tensor(True))[1]) == pytest.approx(
            float(rms) * (shape[0] * shape[1]) ** 0.5, rel=1e-4
        )


@pytest.mark.parametrize("keys", [[], ["model.q_lora_rank=48"], ["optim.muon.router=true"]])
def test_every_hidden_matrix_is_muons(config: Callable[..., Config], keys: list[str]) -> None:
    made = config("optim=muon_wsd", "precision=bf16", "precision.backend=reference", *keys)
    engine = build_engine(made, torch.device("cpu"))
    muon = {name for name, of in engine.optimizer.state_dict().items() if "momentum" in of}
    matrices = {name for name, p in engine.model.named_parameters() if p.dim() >= 2}
    left = {name for name in matrices - muon if not name.endswith("router.weight")}
    assert left == {"embed.weight", "lm_head.weight"}
    assert any(name.endswith("router.weight") for name in muon) == bool(keys and "router" in keys[0])
    shapes = dict(engine.model.named_parameters())
    for row, of in muon_rows(made, engine.plan).items():
        name, division = f"{row}.weight", division_of(made.model, of)
        numbers = torch.arange(shapes[name].numel()).view(shapes[name].shape)
        found = torch.cat([matrix.flatten() for matrix in apart(numbers, division)])
        assert found.sort()[0].equal(numbers.flatten())


def test_a_resumed_run_has_the_same_bits(config: Callable[..., Config]) -> None:
    keys = "optim=muon_cosine", "precision=fp8_delayed", "precision.backend=reference", "optim.decay_fraction=0"
    keys = *keys, "precision.table.optim.moments=bf16"
    whole = Trainer(config(*keys, "run.name=whole", "trainer.max_steps=4"))
    whole.train()
    Trainer(config(*keys, "run.name=cut", "trainer.max_steps=2")).train()
    cut = Trainer(config(*keys, "run.name=cut", "run.resume=auto", "trainer.max_steps=4"))
    cut.train()
    models = (trainer.run.engine.model for trainer in (cut, whole))
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)
    for change, why in (
        (
            "optim=adamw_cosine",
            r"optim\.name=adamw: .* was trained with muon; set optim\.name=muon, or .*init_from",
        ),
        ("optim.muon.coefficients=polar_express", r"optim\.muon\.coefficients=polar_express: .* with quintic; set"),
        ("optim.muon.steps=6", r"optim\.muon\.steps=6: .* with 5; set optim\.muon\.steps=5"),
    ):
        with pytest.raises(ValueError, match=why):
            Trainer(config(*keys, "run.name=cut", "run.resume=auto", change))
    Trainer(config(*keys, "run.name=cut", "run.resume=auto", "optim.muon.steps=5")).run.close(None)  # what null means


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["optim.muon.momentum=1"], r"^optim\.muon\.momentum=1\.0: out of range; set 0\.95"),
        (
            ["optim.muon.momentum=0.99", "precision.table.optim.moments=bf16"],
            r"^optim\.muon\.momentum=0\.99: moments in BF16 lose .*; set 0\.98 or less, or optim\.moments=fp32",
        ),
        (
            ["optim.betas=[0.9,0.999]", "precision.table.optim.moments=bf16"],
            r"^optim\.betas=\[0\.9, 0\.999\]: moments in BF16 lose .*; set \[0\.9,0\.98\] or less, or",
        ),
        (["optim.muon.scale=0"], r"^optim\.muon\.scale=0\.0: out of range"),
        (
            ["optim.muon.coefficients=deepseek_v4", "optim.muon.steps=2"],
            r"^optim\.muon\.steps=2: out of range; set 3 to",
        ),
    ],
)
def test_unsupported_muon_settings_are_refused(config: Callable[..., Config], keys: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check(config("optim=muon_wsd", "parallel=fsdp", *keys), 2)
    with pytest.raises(ValueError, match=r"^optim\.name=muon: optim\.muon is null; leave optim\.muon out, or set"):
        check(config("optim.name=muon", "optim.muon=null"))
    check(config("optim.name=muon"))
