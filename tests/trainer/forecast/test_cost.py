"""Which layout: the arithmetic by hand, what does not fit left out, and the script that prints the command."""

import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
from composed import config_of, model_of

from models.config import Activation
from models.flops import arriving
from precision import Plan
from trainer.config import Config, Dispatch, GpuChoice, PipelineSchedule, Recompute, Switch
from trainer.forecast.cost import DRAG, HOST, SPARE, SYMMETRIC, TRAVEL, Machine, cost
from trainer.forecast.dry_run import report
from trainer.forecast.expert_messages import buffer_bytes
from trainer.forecast.gpus import KNOWN
from trainer.forecast.memory import forecast_memory, parameters
from trainer.forecast.muon import busiest
from trainer.forecast.search import Search, fewest
from trainer.forecast.stages import idle_share, stage_models, stages_line
from trainer.forecast.tensor import tensor_bytes
from trainer.parallel.mesh import Degrees

ROOT = Path(__file__).parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]
H200S = Machine(gpus=8, per_node=8, memory=139 * 2**30, flops=500e12, node_link=350e9, network=45e9)
EXPERTS, OTHERS = 26 * 64 * 3 * 2048 * 1408, 15960108544 - 26 * 64 * 3 * 2048 * 1408


@pytest.fixture
def moonlight() -> tuple[Config, Plan]:
    batch = ["trainer.sequence_length=4096", "trainer.microbatch_size=2", "trainer.global_batch_size=64"]
    config = config_of(["model=moonlight_16b", "+recipe=fp8_delayed", *batch])
    _, plan = model_of(config)
    return config, plan


@pytest.mark.parametrize("activation", Activation)
def test_parameters_in_experts_and_outside_are_those_of_the_model(activation: Activation) -> None:
    """xIELU's two numbers an expert count outside."""
    config = config_of(["model=moonlight_16b", f"model.activation={activation.value}"])
    model, plan = model_of(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name and name.endswith(".weight"))
    assert parameters(plan, config=config.model) == (sum(sizes.values()) - experts, experts)


def test_one_gpu_sends_nothing(moonlight: tuple[Config, Plan]) -> None:
    alone = cost(*moonlight, Degrees(), replace(H200S, gpus=1))
    assert alone.hidden == alone.waiting == 0
    assert alone.step == alone.compute == pytest.approx(64 * 4096 * 17.174074368e9 / 500e12)


def with_(config: Config, **parallel: Switch | PipelineSchedule | Dispatch | int) -> Config:
    return replace(config, parallel=replace(config.parallel, **parallel))


FREED = {"reshard_after_forward": Switch.true, "reduce_each_microbatch": Switch.false}


def test_sharding_gathers_twice_and_reduces_once(moonlight: tuple[Config, Plan]) -> None:
    """Four microbatches of BF16 there and back, FP32 gradients at the end."""
    config, plan = moonlight
    found = cost(with_(config, **FREED), plan, Degrees(shard=8), H200S)
    assert (found.microbatches, found.tokens) == (4, 8 * 4096)
    assert found.hidden == pytest.approx(7 / 8 * (OTHERS + EXPERTS) * (2 * 2 * 4 + 4) / 350e9)


def test_weights_are_kept_gathered_where_memory_allows(moonlight: tuple[Config, Plan]) -> None:
    roomy, less = (replace(H200S, memory=size * 2**30) for size in (1000, 139))
    assert cost(*moonlight, Degrees(shard=8), roomy).hidden == pytest.approx(7 / 8 * (OTHERS + EXPERTS) * 6 / 350e9)
    found = cost(*moonlight, Degrees(shard=8), less)  # whole gradients in FP32 are not there, the weights are
    assert found.hidden == pytest.approx(7 / 8 * (OTHERS + EXPERTS) * (2 + 4 * 4) / 350e9)


def test_fp8_weights_are_gathered_in_half_the_bytes(moonlight: tuple[Config, Plan]) -> None:
    plan = moonlight[1]
    config = with_(moonlight[0], **FREED)
    in_fp8 = with_(config, fp8_all_gather=Switch.true)
    rows = [row for row in plan.gemms.values() if row.recipe.is_fp8]
    halved = sum(row.in_features * row.out_features * row.groups for row in rows)
    assert 0.9 < halved / (OTHERS + EXPERTS) < 1
    plain, less = (cost(c, plan, Degrees(shard=8), H200S) for c in (config, in_fp8))
    assert plain.hidden - less.hidden == pytest.approx(7 / 8 * halved * 2 * 4 / 350e9)
    assert less.memory < plain.memory + halved / 8, "the parts that are sent stay for the step"


def test_experts_that_stay_are_not_gathered_but_tokens_travel(moonlight: tuple[Config, Plan]) -> None:
    config, plan = moonlight
    found = cost(with_(config, **FREED), plan, Degrees(shard=8, expert=8), H200S)
    assert found.hidden == pytest.approx(7 / 8 * OTHERS * 20 / 350e9)
    sent = 7 * (1 - (7 / 8) ** 6) * 8 * 4096 * 2048 * 26 * 2 * (1 + 2)
    assert found.waiting == pytest.approx(SYMMETRIC * sent / 350e9)
    assert found.step == pytest.approx(found.compute + DRAG * found.hidden + found.waiting)


@pytest.mark.parametrize("dispatch", Dispatch)
def test_ranks_wait_for_tokens_as_the_dispatch_that_a_run_takes(
    moonlight: tuple[Config, Plan], dispatch: Dispatch
) -> None:
    """auto is symmetric in a node with NVLink, all_to_all beyond; slots only where they are used."""
    config, plan = with_(moonlight[0], dispatch=dispatch), moonlight[1]
    near, far = (cost(config, plan, Degrees(shard=8, expert=8), replace(H200S, per_node=n)) for n in (8, 4))
    sent = 7 * (1 - (7 / 8) ** 6) * 8 * 4096 * 2048 * 26 * 2 * (1 + 2)
    symmetric = dispatch in (Dispatch.auto, Dispatch.symmetric)
    assert near.waiting == pytest.approx((SYMMETRIC if symmetric else TRAVEL) * sent / 350e9)
    if dispatch is Dispatch.two_hops:  # a row to the other node, and from both to three ranks
        row = 8 * 4096 * 2048 * 26 * 2 * (1 + 2)
        to_node, to_ranks = row * (1 - (1 / 2) ** 6), 2 * 3 * row * (1 - (7 / 8) ** 6)
        assert far.waiting == pytest.approx(to_node / 45e9 + (to_ranks + (TRAVEL - 1) * (to_node + to_ranks)) / 350e9)
    elif dispatch is not Dispatch.symmetric:  # which a run refuses beyond a node
        assert far.waiting == pytest.approx(sent / 7 * 4 / 45e9 + (TRAVEL - 1) * sent / 350e9)
        over_pcie = cost(config, plan, near.degrees, replace(H200S, node_link=50e9))
        assert over_pcie.waiting == pytest.approx(TRAVEL * sent / 50e9)
    in_slots = dispatch in (Dispatch.auto, Dispatch.symmetric, Dispatch.slots)
    exact = cost(with_(config, dispatch=Dispatch.all_to_all), plan, near.degrees, H200S)
    assert (near.memory > exact.memory) is in_slots


def test_buffers_hold_the_rows_of_each_hop(moonlight: tuple[Config, Plan]) -> None:
    """Rows that arrive on 16 ranks; in two hops also those that arrive on the 2 nodes."""
    degrees, tokens = Degrees(shard=16, expert=16), 2 * 4096
    one, two = (
        buffer_bytes(with_(moonlight[0], dispatch=way), moonlight[1], degrees, tokens)
        for way in (Dispatch.all_to_all, Dispatch.two_hops)
    )
    to_ranks, to_nodes = (n * (1 - (1 - 1 / n) ** 6) for n in (16, 2))
    assert one == pytest.approx(2 * tokens * to_ranks * 2048 * 2)
    assert two / one == pytest.approx((to_ranks + to_nodes) / to_ranks)


def test_a_group_that_leaves_the_node_uses_the_network(moonlight: tuple[Config, Plan]) -> None:
    near = cost(*moonlight, Degrees(replicate=2, shard=4), H200S)
    far = cost(*moonlight, Degrees(replicate=2, shard=4), replace(H200S, per_node=4))
    added = 8 / 2 * (OTHERS + EXPERTS) / 4
    assert far.hidden - near.hidden == pytest.approx(added / 45e9 - added / 350e9)


def test_groups_of_weights_are_a_tensor_group_apart(moonlight: tuple[Config, Plan]) -> None:
    """In two nodes of 8, ranks 0, 2, ... 14 share weights; neighbours sum the gradients of those they do not split."""
    config, plan = with_(moonlight[0], **FREED, fp8_all_gather=Switch.false), moonlight[1]
    machine, apart = replace(H200S, gpus=16), Degrees(shard=8, tensor=2)
    far, near = (cost(config, plan, apart, replace(machine, per_node=n)) for n in (8, 16))
    alone = cost(config, plan, Degrees(shard=8), H200S)
    attention = 27 * (2048 * 3072 + 512 * 4096 + 2048 * 2048)
    split = (attention + 2 * config.model.vocab_size * 2048) / 2  # that the other rank has
    gathered = 1 - split / (OTHERS + EXPERTS)
    assert far.hidden - near.hidden == pytest.approx(alone.hidden * gathered * (350 / 45 - 1))
    whole = 8 * 1 / 2 * (OTHERS - 2 * split + EXPERTS) / 8 / 350e9  # summed over the two
    beside = near.tokens * tensor_bytes(plan, apart, 1)[0] / 350e9
    assert near.hidden == pytest.approx(alone.hidden * gathered + whole + beside)


def test_a_group_with_ranks_on_two_nodes_uses_the_network() -> None:
    machine = replace(H200S, gpus=24)
    assert machine.seconds(350e9, 4) == machine.seconds(350e9, 4, 2) == 1
    assert machine.seconds(45e9, 6) == machine.seconds(45e9, 3, 2) == machine.seconds(45e9, 12) == 1
    assert replace(H200S, gpus=6).seconds(350e9, 6) == 1, "all in one node"


def test_tokens_travel_only_where_a_run_accepts_it(moonlight: tuple[Config, Plan]) -> None:
    """Shared memory within nodes with NVLink, two hops over whole ones; auto takes all_to_all where a group of some is
    on two."""
    six = replace(H200S, gpus=24, per_node=6)
    assert [n for n in (1, 2, 3, 4, 6, 9, 12) if six.carries(Dispatch.symmetric, n)] == [1, 2, 3, 6]
    assert [n for n in (1, 2, 3, 4, 6, 9, 12) if six.carries(Dispatch.two_hops, n)] == [1, 12]
    assert not replace(six, node_link=50e9).carries(Dispatch.symmetric, 2)
    auto, exact = (with_(moonlight[0], dispatch=way) for way in (Dispatch.auto, Dispatch.all_to_all))
    degrees = Degrees(shard=12, expert=4)
    assert cost(auto, moonlight[1], degrees, six).waiting == cost(exact, moonlight[1], degrees, six).waiting


def test_the_fewest_gpus_that_do_are_found(moonlight: tuple[Config, Plan]) -> None:
    small = replace(H200S, gpus=1, memory=24 * 2**30)
    enough = fewest(*moonlight, small)
    assert enough is not None and enough > 8
    one = replace(moonlight[0].trainer, microbatch_size=1, global_batch_size=1)
    for gpus, some in ((enough // 2, False), (enough, True)):
        search = Search(replace(moonlight[0], trainer=one), moonlight[1])
        assert any(search.fastest_first(replace(small, gpus=gpus), [gpus])) is some
    assert fewest(*moonlight, replace(small, memory=2**20)) is None


def test_layouts_fit_and_come_fastest_first(moonlight: tuple[Config, Plan]) -> None:
    found = list(Search(*moonlight).fastest_first(H200S, [64]))
    speeds = [float(f"{one.tokens_per_second:.3g}") for one in found]
    assert speeds == sorted(speeds, reverse=True) and len({one.degrees for one in found}) == len(found) > 4
    assert all(one.memory <= SPARE * H200S.memory and one.degrees.world == 8 for one in found)
    assert all(one.microbatch * one.microbatches * one.degrees.data == 64 for one in found)
    assert not list(Search(*moonlight).fastest_first(replace(H200S, gpus=1), [8]))


def test_the_fastest_of_all_comes_first(moonlight: tuple[Config, Plan]) -> None:
    """Of all that a search without bounds looks at: each microbatch, recomputation and number of stages a rank."""
    given, speeds = asdict(Degrees(shard=4, pipeline=2)), []
    for size, recompute, v in product((1, 2, 4, 8), Recompute, (1, 2, 4)):
        trainer = replace(moonlight[0].trainer, microbatch_size=size, global_batch_size=64)
        made = with_(replace(moonlight[0], trainer=trainer, recompute=recompute), stages_per_rank=v)
        one = cost(made, moonlight[1], Degrees(**given), H200S)
        speeds += [one.tokens_per_second] if one.memory <= SPARE * H200S.memory else []
    (best,) = Search(*moonlight, given).fastest_first(H200S, [64])
    assert best.tokens_per_second == pytest.approx(max(speeds), rel=5e-3), "as equal as three digits are"


def test_owners_are_found_only_for_layouts_that_may_be_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longest. Costs are those of a layout alone."""
    batch = ["trainer.sequence_length=4096", "trainer.global_batch_size=64", "parallel.pipeline=1"]
    config = config_of(["model=moonlight_16b", "+recipe=fp8_delayed", "optim=muon_wsd", *batch])
    _, plan = model_of(config)
    asked: list[Degrees] = []

    def counted(config: Config, plan: Plan, degrees: Degrees) -> float:
        asked.append(degrees)
        return busiest(config, plan, degrees)

    monkeypatch.setattr("trainer.forecast.search.busiest", counted)
    found = Search(config, plan, {"pipeline": 1}).fastest_first(H200S, [64])
    first = next(found)
    few = len(asked)
    list(found)
    assert few < len(asked) / 2
    trainer = replace(config.trainer, microbatch_size=first.microbatch)
    alone = cost(replace(config, trainer=trainer, recompute=first.recompute), plan, first.degrees, H200S)
    assert first == alone


def test_tokens_of_an_expert_group_on_two_nodes_take_links_and_network_at_once() -> None:
    """To three neighbours 1 GB each by their links, to four ranks beyond by the network; 1.5 GB of picking for each."""
    found = replace(H200S, gpus=16, per_node=4).dispatch_seconds(1e9, 8)
    assert found == pytest.approx(max(3 / 350, 4 / 45) + (TRAVEL - 1) * 7 / 350)


def test_groups_of_experts_bound_the_ranks_that_a_token_goes_to() -> None:
    """8 experts of 4 of 8 groups: at most 4 of 8 ranks; of one rank with two groups one, and of 256 ranks nearly 8."""
    model = config_of(["model=deepseek_v3"]).model
    assert arriving(model, 1) == 1 and arriving(model, 8) == pytest.approx(4 * (1 - (3 / 4) ** 8))
    assert arriving(model, 4) < arriving(model, 8) < arriving(model, 64) < arriving(model, 256) < 8
    assert arriving(replace(model, num_expert_groups=1, num_groups_per_token=1), 8) == 8 * (1 - (7 / 8) ** 8)


def test_a_stage_has_its_part_of_the_arithmetic_and_waits_for_the_others(moonlight: tuple[Config, Plan]) -> None:
    """Two stages of four ranks: half of the blocks' FLOPs, streams between them, and the share that the dry run says.
    What a stage gathers and reduces is that of its own blocks."""
    config, plan = moonlight[0], moonlight[1]
    one, two = (cost(with_(config, **FREED), plan, d, H200S) for d in (Degrees(shard=8), Degrees(shard=4, pipeline=2)))
    assert (two.microbatches, two.tokens) == (8, one.tokens)
    assert two.compute == one.compute
    assert two.waiting == pytest.approx(2 * 2 * 2048 * 8 * 2 * 4096 / 350e9), "there and back, in BF16"
    assert 1 / 9 < two.bubble < 0.2 and two.bubble == idle_share(config, plan, two.degrees)
    exposed = max(two.hidden - two.compute, 0) + DRAG * min(two.hidden, two.compute)
    assert two.step == pytest.approx((two.compute + two.waiting) / (1 - two.bubble) + exposed)
    twice = with_(config, **FREED)
    twice = replace(twice, parallel=replace(twice.parallel, stages_per_rank=2))
    more = cost(twice, plan, two.degrees, H200S)
    assert more.bubble < two.bubble and more.waiting == 2 * two.waiting
    larger = max(sum(parameters(rows, config=own.model)) for own, rows, _ in stage_models(config, plan, two.degrees))
    assert two.hidden == pytest.approx(3 / 4 * larger * (2 * 2 * 8 + 4) / 350e9)


def test_a_host_launches_no_faster_for_small_microbatches(moonlight: tuple[Config, Plan]) -> None:
    config = replace(moonlight[0], trainer=replace(moonlight[0].trainer, microbatch_size=1))
    assert cost(config, moonlight[1], Degrees(shard=8), H200S).compute == pytest.approx(HOST * 27 * 8)
    assert cost(config, moonlight[1], Degrees(pipeline=8), H200S).compute == pytest.approx(HOST * 27 * 8)


def test_a_small_model_on_one_gpu_takes_the_time_of_its_launches() -> None:
    """As measured on an H200: 307,000 tokens/s with CUDA graphs and 44,000 without (docs/benchmarks.md)."""
    config = config_of([])
    _, plan = model_of(config)
    eager = replace(config, cuda_graph=Switch.false)
    graphed, launched = (
        cost(each, plan, Degrees(), replace(H200S, gpus=1)).tokens_per_second for each in (config, eager)
    )
    assert (graphed, launched) == pytest.approx((307e3, 44e3), rel=0.3)


def test_layouts_with_stages_equal_a_dry_run(moonlight: tuple[Config, Plan]) -> None:
    """Memory and bubble, of layouts that a run accepts."""
    config, plan = replace(moonlight[0], gpu=GpuChoice.h200, dry_run=True), moonlight[1]
    machine = replace(H200S, memory=KNOWN[GpuChoice.h200].memory)
    staged = [one for one in Search(config, plan).fastest_first(machine, [64]) if one.degrees.pipeline > 1]
    assert {one.degrees.pipeline for one in staged} >= {2, 4, 8}
    assert {one.stages_per_rank for one in staged} >= {1, 2}
    for one in staged[:: len(staged) // 4]:
        d = one.degrees
        trainer = replace(config.trainer, microbatch_size=one.microbatch, global_batch_size=64)
        parallel = replace(config.parallel, **asdict(d), stages_per_rank=one.stages_per_rank)
        said = report(replace(config, trainer=trainer, parallel=parallel, recompute=one.recompute), plan, 8)
        assert f"total            {one.memory / 2**30:10.3f}" in said, d
        assert f"ranks wait {one.bubble:.1%} of a step" in said, d


def test_layouts_in_a_v_have_two_stages_a_rank_and_wait_less(moonlight: tuple[Config, Plan]) -> None:
    """Recomputation does not free the operands of weight gradients that wait."""
    config, plan = replace(moonlight[0], recompute=Recompute.full), moonlight[1]
    degrees, v = Degrees(shard=4, pipeline=2), with_(config, schedule=PipelineSchedule.zbv, stages_per_rank=2)
    in_turn = with_(v, schedule=PipelineSchedule.interleaved)
    assert idle_share(v, plan, degrees) < idle_share(in_turn, plan, degrees)
    assert forecast_memory(v, plan, degrees)["activations"] > forecast_memory(in_turn, plan, degrees)["activations"]
    found = list(Search(with_(config, schedule=PipelineSchedule.zbv), plan).fastest_first(H200S, [64]))
    assert found and {one.stages_per_rank for one in found} == {2}
    assert "not compiled" in stages_line(v, plan, degrees) and "compiled" not in stages_line(in_turn, plan, degrees)


def test_stages_are_not_searched_where_they_are_refused(moonlight: tuple[Config, Plan]) -> None:
    config = with_(moonlight[0], fp8_all_gather=Switch.true)
    assert {one.degrees.pipeline for one in Search(config, moonlight[1]).fastest_first(H200S, [16])} == {1}


def test_a_stage_of_dense_blocks_alone_has_no_experts_to_send_to() -> None:
    config = config_of(["model=deepseek_v3", "trainer.global_batch_size=64", "parallel.stages=[3,58]"])
    _, plan = model_of(config)
    found = cost(config, plan, Degrees(shard=4, expert=4, pipeline=2), H200S)
    assert found.memory > 0 and found.bubble > 0.3, "the other stage has nearly everything"
