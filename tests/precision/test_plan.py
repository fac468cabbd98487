"""The plan decides every GEMM exactly once and says what it decided."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest

from precision import Plan, PrecisionConfig
from precision.config import Accumulation, Precision, RulesException
from precision.plan import _module_in_all_blocks
from precision.resolve import CORE_IN_FP32

Recipe = Callable[..., PrecisionConfig]


def resolve(config: PrecisionConfig, layers: int = 3, first: str = "gate_up") -> Plan:
    """A small model's rows: dense and MoE blocks, the head. first: GEMM of the experts."""
    plan = Plan(config, layers)
    plan.tensor("residual", "residual")
    for i in range(layers):
        plan.gemm(f"layers.{i}.attn.q", "attn.q", 64, 96)
        plan.gemm(f"layers.{i}.attn.kv_a", "attn.kv_a", 64, 40)
        plan.gemm(f"layers.{i}.moe.router", "moe.router", 64, 5)
        plan.gemm(f"layers.{i}.moe.experts.{first}", "moe.experts", 64, 128, groups=5, rows_per_token=2)
        plan.tensor(f"layers.{i}.moe.dispatch", "moe.dispatch")
    plan.gemm("mtp.0.proj", "mtp.proj", 128, 64)
    plan.gemm("lm_head", "lm_head", 64, 100)
    plan.finish()
    return plan


def test_swiglu_saves_fp8_where_a_gated_layer_multiplies_in_it(recipe: Recipe) -> None:
    plan = resolve(recipe("fp8_block", table__swiglu="fp8", rules__first_blocks=1))
    saved = {name: row.recipe.swiglu.name for name, row in plan.gemms.items() if name.endswith("gate_up")}
    assert saved == {f"layers.{i}.moe.experts.gate_up": "bf16" if i == 0 else "e4m3" for i in range(3)}
    assert plan.tensors["swiglu"].format.name == "e4m3" and not plan.notes
    assert "swiglu" not in resolve(recipe("fp8_block")).tensors
    for name, first in (("bf16", "gate_up"), ("fp8_block", "up")):
        assert "swiglu=fp8 has no effect" in resolve(recipe(name, table__swiglu="fp8"), first=first).notes[0]
    with pytest.raises(ValueError, match=r"swiglu=fp32: it is saved as GEMMs return it, or in fp8; set bf16 or fp8"):
        resolve(recipe("fp8_block", table__swiglu="fp32"))
    with pytest.raises(ValueError, match=r"swiglu=fp8: only BF16 is cast, and residual=fp32; set fp32"):
        resolve(recipe("fp8_block", table__swiglu="fp8", table__residual="fp32"))


def test_attention_on_the_reference_backend_sums_in_fp32_and_the_plan_says_so(recipe: Recipe) -> None:
    for rules in ({"accumulation": "fast"}, {"rules__exceptions": [{"match": "*.core", "accumulation": "fast"}]}):
        plan = Plan(recipe("fp8_full", **rules), 1)
        row = plan.core("layers.0.attn.core", 4, 32, 16, qk_bound=6.0)
        assert row.recipe.accumulation is Accumulation.fp32 and plan.notes == [CORE_IN_FP32]
        assert "fp8 scaling: delayed, per tensor, history 1024" in plan.to_text()  # of the core alone


def formats(plan: Plan, name: str) -> tuple[str, str, str, str]:
    recipe = plan.gemms[name].recipe
    return recipe.input.name, recipe.grad.name, recipe.saved.name, recipe.output.name


def test_recipes_mean_what_they_say(recipe: Recipe) -> None:
    assert formats(resolve(recipe("bf16")), "layers.0.attn.q") == ("bf16",) * 4
    assert formats(resolve(recipe("fp32")), "lm_head") == ("fp32",) * 4
    delayed = resolve(recipe("fp8_delayed"))
    assert formats(delayed, "layers.1.attn.q") == ("e4m3", "e5m2", "e4m3", "bf16")
    assert formats(delayed, "layers.1.attn.kv_a") == ("bf16",) * 4
    assert formats(delayed, "layers.1.moe.router") == ("bf16", "bf16", "bf16", "fp32")
    assert delayed.tensors["layers.1.moe.dispatch"].format.name == "e4m3"
    assert formats(resolve(recipe("fp8_block")), "layers.0.attn.q") == ("e4m3", "e4m3", "e4m3", "bf16")


def test_share_counts_multiply_adds(recipe: Recipe) -> None:
    fp8 = 3 * (64 * 96 + 2 * 64 * 128)
    rest = 3 * (64 * 40 + 64 * 5) + 128 * 64
    plan = resolve(recipe("fp8_jit"))
    assert plan.blocks_fp8_share == pytest.approx(fp8 / (fp8 + rest))
    assert plan.fp8_share == pytest.approx(fp8 / (fp8 + rest + 64 * 100))
    assert resolve(recipe("bf16")).fp8_share == 0


def test_first_and_last_blocks_stay_in_bf16(recipe: Recipe) -> None:
    plan = resolve(recipe("fp8_jit", rules__first_blocks=1, rules__last_blocks=1))
    kinds = [formats(plan, f"layers.{i}.attn.q")[0] for i in range(3)]
    assert kinds == ["bf16", "e4m3", "bf16"]
    assert plan.tensors["layers.0.moe.dispatch"].format.name == "bf16"
    assert plan.gemms["layers.0.attn.q"].decided_by == "first_blocks: 1"


@pytest.mark.parametrize("first", ["gate_up", "up"])
def test_exception_by_name(recipe: Recipe, first: str) -> None:
    config = recipe("fp8_jit")
    config.rules.exceptions = [RulesException("layers.*.moe.experts.*", Precision.bf16)]
    plan = resolve(config, first=first)
    assert formats(plan, f"layers.2.moe.experts.{first}")[0] == "bf16"
    assert plan.tensors["layers.2.moe.dispatch"].decided_by == "follows moe.experts", "nothing reads FP8 there"
    assert formats(plan, "layers.2.attn.q")[0] == "e4m3"


def broken(config: PrecisionConfig, change: Callable[[PrecisionConfig], None]) -> PrecisionConfig:
    change(config)
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c.table.attn, "q", None), r"precision\.table\.attn\.q has no value.*layers\.0\.attn\.q"),
        (lambda c: setattr(c.table.moe, "router", None), r"moe\.router has no value.*; set it to fp32 or bf16$"),
        (lambda c: setattr(c.table.grad, "reduce", Precision.bf16), r"precision\.table\.grad\.reduce=bf16"),
        (lambda c: setattr(c.table, "residual", Precision.fp8), r"precision\.table\.residual=fp8"),
        (lambda c: setattr(c.table.moe, "router", Precision.fp8), r"precision\.table\.moe\.router=fp8"),
        (
            lambda c: setattr(c.rules, "exceptions", [RulesException("nothing.*")]),
            r"match: nothing\.\* matches nothing",
        ),
        (
            lambda c: setattr(c.rules, "exceptions", [RulesException("optim.master")]),
            r"optim\.master matches nothing in this plan that rules decide \(GEMMs, dispatches\)",
        ),
        (
            lambda c: setattr(c.rules, "exceptions", [RulesException("*.router", Precision.fp8)]),
            r"^precision\.rules\.exceptions: match: \*\.router takes layers\.0\.moe\.router, which cannot be in FP8",
        ),
        (lambda c: setattr(c.rules, "exceptions", [RulesException()]), r"an entry has no match"),
        (lambda c: setattr(c.rules, "first_blocks", 4), r"precision\.rules\.first_blocks=4: the model has 3 blocks"),
        (
            lambda c: setattr(
                c.rules, "exceptions", [RulesException("*.q"), RulesException("layers.1.*", Precision.fp32)]
            ),
            r"layers\.1\.attn\.q is decided twice, by match: \*\.q \(bf16\) and match: layers\.1\.\* \(fp32\)",
        ),
        (
            lambda c: setattr(c.table, "lm_head", Precision.fp8),
            r"lm_head \[64 -> 100\] cannot run in FP8.*out features",
        ),
        (lambda c: setattr(c.scaling, "history", 0), r"precision\.scaling\.history=0"),
        (lambda c: setattr(c.scaling, "history", 10**9), r"precision\.scaling\.history=1000000000.*65536"),
        (lambda c: setattr(c.scaling, "max_jump", 1), r"precision\.scaling\.max_jump=1.*set 2 or more"),
        (lambda c: setattr(c.scaling, "margin", -1), r"precision\.scaling\.margin=-1"),
    ],
)
def test_mistakes_are_named(recipe: Recipe, change: Callable[[PrecisionConfig], None], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        resolve(broken(recipe("fp8_delayed"), change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [Precision.fp8, Precision.bf16])
def test_a_norm_is_in_fp32_alone(value: Precision, recipe: Recipe) -> None:
    config = recipe("fp8_delayed")
    config.table.norm = value
    with pytest.raises(ValueError, match=rf"precision\.table\.norm={value.value}.*set it to fp32"):
        Plan(config, 3).tensor("norm", "norm")


def test_scaling_that_does_not_exist_is_refused(recipe: Recipe) -> None:
    with pytest.raises(ValueError, match=r"granularity=block with method=delayed"):
        resolve(recipe("fp8_delayed", scaling__granularity="block"))
    with pytest.raises(ValueError, match=r"method=current with precision\.scaling\.power_of_two=true$"):
        resolve(recipe("fp8_delayed", scaling__granularity="row"))
    with pytest.raises(ValueError, match=r"granularity=row with power_of_two=false"):
        resolve(recipe("fp8_jit", scaling__power_of_two=False))
    with pytest.raises(ValueError, match=r"first_blocks: 1 matches nothing .* FP8"):
        resolve(recipe("bf16", rules__first_blocks=1))


def test_names_are_unique_and_ops_known(recipe: Recipe) -> None:
    plan = Plan(recipe("bf16"), 1)
    plan.gemm("a", "ffn", 16, 16)
    with pytest.raises(ValueError, match="twice"):
        plan.gemm("a", "ffn", 16, 16)
    with pytest.raises(ValueError, match="not a GEMM op"):
        plan.gemm("b", "attn.z", 16, 16)
    with pytest.raises(ValueError, match="not a tensor op"):
        plan.tensor("c", "ffn")


def test_text_merges_equal_blocks(recipe: Recipe) -> None:
    text = resolve(recipe("fp8_delayed", rules__first_blocks=1)).to_text()
    assert "fp8 scaling: delayed, per tensor, history 16, margin 0" in text
    line = next(line for line in text.splitlines() if line.startswith("layers.1-2.attn.q "))
    assert line.split() == [
        "layers.1-2.attn.q",
        "attn.q",
        "64",
        "->",
        "96",
        "e4m3",
        "e5m2",
        "e4m3",
        "fp32",
        "bf16",
        "reference",
        "table",
    ]
    assert any(line.startswith("layers.0.attn.q ") and "first_blocks: 1" in line for line in text.splitlines())
    assert max(map(len, text.splitlines())) < 140


@pytest.mark.parametrize(
    ("name", "glob"),
    [
        ("layers.1.moe.shared.down", "*.moe.*.*"),
        ("layers.0.attn.q", "*.attn.*"),
        ("mtp.0.proj", "*.proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_the_glob_advised_for_a_module_takes_its_gemms(name: str, glob: str) -> None:
    assert _module_in_all_blocks(name) == glob
    assert fnmatchcase(name, glob)
