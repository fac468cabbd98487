"""The benches run to the end on a machine without a GPU, and what they share computes what it says."""

import argparse
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from precision.rates import load_rates

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"
Run = Callable[..., subprocess.CompletedProcess[str]]
QUICK = ["--rounds", "1", "--repeat", "1"]
SMALL_STEP = [
    *("model.vocab_size=320", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.kv_lora_rank=16", "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16"),
    *("model.intermediate_size=48", "model.moe_intermediate_size=16", "model.num_experts=4"),
    *("trainer.global_batch_size=2", "trainer.microbatch_size=2", "trainer.sequence_length=24", "trainer.device=cpu"),
    *("data=text", "data.path=.", "data.glob='*.txt'", "data.validation_fraction=0.5"),
]


@pytest.fixture
def bench(run_python: Run) -> Run:
    """bench(name, folder, *arguments): run a bench in a folder, without a GPU."""

    def run(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_python(BENCH / f"{name}.py", *arguments, cwd=folder)

    return run


def rows(output: str) -> dict[str, list[str]]:
    """Lines of a table by their first word."""
    return {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure", BENCH / "measure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**({"rounds": 2, "repeat": 2, "hold": 0.0, "no_graph": False} | given))


def test_variants_run_in_turn(measure: ModuleType) -> None:
    order: list[str] = []
    variants = [measure.Variant(name, lambda name=name: order.append(name)) for name in "ab"]
    measure.measure(variants, options(rounds=3, repeat=1))
    assert order == ["a", "b", *"ababab"]  # once each to warm up, then in turn


def test_times_are_medians_short_and_sustained(measure: ModuleType) -> None:
    timing = measure.measure([measure.Variant("nap", lambda: time.sleep(0.01))], options(hold=0.05))["nap"]
    assert 0.01 <= timing.short < 0.1 and 0.01 <= timing.sustained < 0.1
    assert len(timing.rounds["short"]) == len(timing.rounds["sustained"]) == 2
    assert timing.watts is None and timing.joules is None
    assert measure.columns(timing, 1e9)["W"] == "n/a"


def test_a_variant_that_fails_costs_a_line(measure: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("refused\nhere")

    timings = measure.measure([measure.Variant("bad", fail), measure.Variant("good", lambda: None)], options())
    assert list(timings) == ["good"]
    assert capsys.readouterr().out == "bad: left out, RuntimeError: refused here\n"


def test_ratios_and_joules(measure: ModuleType) -> None:
    slow, fast = measure.Timing("slow", "cpu", 3.0, 4.0), measure.Timing("fast", "cpu", 2.0, 2.0, watts=700.0)
    assert measure.both(slow, fast) == "1.50 / 2.00" and measure.both(None, fast) == "n/a"
    assert measure.share(fast, slow) == "67% / 50%"
    assert fast.joules == 1400.0
    assert measure.columns(fast, 4e12)["sust. TF/s"] == "2"


def test_linear(tmp_path: Path, bench: Run) -> None:
    shapes = ["--shape", "33x32x48", "--shape", "16x16x16"]
    done = bench("linear", tmp_path, *shapes, *QUICK, "--hold", "0.001", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert "33 x 32 x 48" in done.stdout
    assert {"torch", "bf16", "fp8_delayed", "fp8_jit", "fp8_block"} <= set(rows(done.stdout))
    assert "te_bf16, te_delayed, te_current, te_block: left out" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"].startswith("CPU") and "--shape 33x32x48" in found["command"]
    names = {result["name"] for result in found["results"] if result["shape"] == [33, 32, 48]}
    assert {"torch", "fp8 limit", "fp8_block", "fp8_block +w"} <= names
    assert all(result["short"] > 0 for result in found["results"])


def test_linear_of_a_model(tmp_path: Path, bench: Run) -> None:
    few = ["--variants", "torch", "fp8_jit", "--hold", "0", *QUICK]
    done = bench("linear", tmp_path, "--model", "deepseek_tiny", "--tokens", "32", *few)
    assert done.returncode == 0, done.stderr
    assert "32 x 384 x 256   attn.q" in done.stdout  # 4 heads of 64 + 32
    assert "32 x 256 x 256   attn.o moe.shared.gate_up" in done.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("linear", ["--shape", "12x3"], "--shape 12x3: want MxNxK"),
        ("linear", ["--table"], "--table: the table of rates is of the cuda backend, and reference serves here"),
        ("linear", ["--model", "deepseek_tny"], "did you mean deepseek_tiny?"),
        ("experts", ["--chosen", "9", "--experts", "8"], "--chosen 9: a token chooses 1 to --experts 8"),
        ("experts", ["--table", "--gradients", "bf16", "--backend", "cuda"], "add --gradients fp32"),
        ("linear", ["--tokens", "many"], "--tokens: invalid int value: 'many'; see linear.py --help"),
        ("step", ["model.num_layers=2"], "no recipe to measure; name one: fp8_delayed"),
        ("linear", ["--repeat", "0"], "--repeat 0: set 1 or more"),
        ("attention", ["--rounds", "0"], "--rounds 0: set 1 or more"),
        ("experts", ["--tokens", "0"], "--tokens 0: set 1 or more"),
        ("data", ["--workers", "x"], "--workers x: want counts with commas between, as 1,8,16"),
        ("data", ["--mb", "0"], "--mb 0: set 1 or more"),
        ("host_costs", ["--shards", "0"], "--shards 0: set 1 or more"),
    ],
)
def test_mistakes_are_one_line(
    name: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("octet: error: ") and message in said and said.count("\n") == 1


def test_rivals_in_one_call(tmp_path: Path, bench: Run) -> None:
    shape = [word for word in SMALL_STEP if word.startswith("model.")] + ["trainer.device=cpu"]
    counts = ["--sequences", "2", "--length", "24", "--warm-up", "1", "--steps", "2", "--rounds", "1"]
    names = ["--ours", "bf16", "--theirs", "delayed", "--json", "out.json"]
    done = bench("rivals/compare", tmp_path, *counts, *names, *shape, "model.num_experts=8")
    assert done.returncode == 0, done.stderr
    assert "megatron-core delayed: left out: it wants megatron-core 0.19.2" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    (result,) = found["results"]
    assert result["who"] == "octet" and found["megatron-core"] == "missing"
    assert result["tokens_per_second"] == pytest.approx(2 * 24 / result["seconds"])
    assert rows(done.stdout)["octet"][:2] == ["octet", "bf16"]


def test_experts(tmp_path: Path, bench: Run) -> None:
    size = ["--tokens", "24", "--hidden", "32", "--width", "16", "--experts", "4", "--chosen", "2"]
    both = ["--gradients", "fp32", "bf16"]
    done = bench("experts", tmp_path, *size, *both, *QUICK, "--hold", "0.001", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert "24 tokens, top-2 of 4" in done.stdout
    assert {"a2", "bf16", "fp8_delayed", "fp8_jit", "fp8_block"} <= set(rows(done.stdout))
    kept = {r["name"]: r.get("kept") for r in json.loads((tmp_path / "out.json").read_text())["results"]}
    # 48 rows: the input of both GEMMs, SwiGLU's input, and a few indices
    assert 48 * 2 * (32 + 16 + 32) <= kept["bf16"] < 1.5 * 48 * 2 * (32 + 16 + 32)
    assert kept["fp8_delayed"] < kept["bf16"] < kept["a2"]
    for name in ("bf16", "fp8_delayed", "fp8_jit", "fp8_block"):
        assert kept[f"{name} dw16"] == kept[name] and f"{name} dw16 " in done.stdout
        assert f"{name} +w" in kept and f"{name} dw16 +w" not in kept


def test_attention(tmp_path: Path, bench: Run) -> None:
    shape = ["--shape", "2x2x24x24x16", "--variants", "core", "math", "cudnn", "te", "documents", "documents_mask"]
    done = bench("attention", tmp_path, *shape, *QUICK, "--hold", "0.001", "--document", "8")
    assert done.returncode == 0, done.stderr
    assert "cudnn: left out: No viable backend" in done.stdout and "te: left out: it needs a GPU" in done.stdout
    lines = done.stdout.splitlines()
    for name in ("core", "math", "documents", "documents_mask"):
        assert [line.split()[1] for line in lines if line.startswith(f"{name} ")] == ["forward", "backward", "both"]


def test_step(tmp_path: Path, bench: Run) -> None:
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"some text of file {i}, and more of it\n" * 40)
    flags = ["--steps", "2", "--hold", "0.01", "--rounds", "1", "--json", "out.json"]
    masked = ["trainer.document_masking=true", "--document", "8"]
    done = bench("step", tmp_path, "fp8_delayed", "fp8_jit", *flags, *masked, *SMALL_STEP)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["name"] for result in found] == ["fp8_delayed", "fp8_jit", "bf16"]
    assert all(r["limit"] > 0 and r["sustained"] > 0 and r["state"] > 0 and r["tokens"] == 48 for r in found)
    assert found[0]["blocks_fp8_share"] > 0.5 and found[2]["blocks_fp8_share"] == 0
    assert "fp8_jit takes" in done.stdout and "of 50,000 tokens/s)" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("bf16 "))
    slow, fast = (float(word.strip("(),").replace(",", "")) for word in (line.split()[2], line.split()[4]))
    speeds = sorted(48 / seconds for seconds in found[2]["rounds"]["short"])
    assert speeds[0] - 1 <= slow <= fast <= speeds[1] + 1, "deciles lie between the steps that were measured"


def test_the_baseline_of_experts_on_a_gpu_is_the_plain_one(run_python: Run) -> None:
    """a2 with the project's kernels, here in Triton's interpreter, against the same layer in plain PyTorch."""
    code = f"""
import argparse, sys
sys.path[:0] = [{str(BENCH)!r}, {str(ROOT / "src")!r}]
import torch, experts, limits
sizes = dict(tokens=40, experts=4, chosen=2, hidden=64, width=48)
problem = experts.Problem(argparse.Namespace(**sizes, backend=None, accumulation=["fp32"]))
w1, w2 = limits.random(4, 96, 64, scale=0.02).requires_grad_(), limits.random(4, 64, 48, scale=0.02).requires_grad_()
found = []
for fast in (False, True):
    x, weight = problem.leaves()
    args = problem.expert_TK, weight, w1, w2
    y = experts._A2.apply(x, *args) if fast else experts.plain_torch(problem, x, weight, w1, w2)
    found.append([y, *torch.autograd.grad(y, (x, weight, w1, w2), problem.dy)])
for a, b in zip(*found):
    assert (a.float() - b.float()).norm() < 0.01 * a.float().norm()
"""
    done = run_python("-c", code, environment={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr


def test_lines_for_the_table_of_rates_are_by_the_recipes_own_scaling(tmp_path: Path, run_python: Run) -> None:
    """As `load_rates` reads them; no time of Transformer Engine under a scaling that it does not have."""
    code = f"""
import sys
sys.path[:0] = [{str(BENCH)!r}, {str(ROOT / "src")!r}]
import linear, yaml
from measure import Timing
names = ["bf16", "fp8_delayed", "fp8_jit", "fp8_block", "te_delayed", "te_current"]
timings = {{name: Timing(name, "graph", 1e-3 * i, 2e-3 * i) for i, name in enumerate(names, 1)}}
print("gpu: mine\\nentries:")
print("\\n".join(linear.entries((64, 32, 16), timings)))
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.yaml").write_text(done.stdout)
    table = load_rates("mine", tmp_path)
    delayed = table.nearest("linear", "delayed/tensor", "fp32", (32, 16, 1), 64, {"cuda"})
    assert delayed is not None and delayed.ms == {"bf16": 2.0, "cuda": 4.0, "transformer_engine": 10.0}
    assert table.nearest("linear", "current/row", "fp32", (32, 16, 1), 64, {"transformer_engine"}) is None
    assert len(table) == 3


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing")
def test_host(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    line = [sys.executable, BENCH / "host.py", "bf16", "fp8_delayed", "--repeat", "2"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert table["operator"] == ["operator", "bf16", "fp8_delayed"]
    assert table["rms_norm"][2::2] == ["(1)", "(2)"], "with a delayed scale a first launch takes the amax, if need be"
    assert all(float(table["rms_norm_backward"][i]) > 0 for i in (1, 3))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fp16"], "fp16: no recipe to measure; name some of bf16, fp8_delayed, fp8_jit, fp8_block"),
        (["--repeat", "0"], "--repeat 0: set 1 or more"),
        pytest.param(
            [], "TRITON_INTERPRET=1: the interpreter compiles and launches nothing; unset it",
            marks=pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing"),
        ),
    ],
)  # fmt: skip
def test_mistakes_of_host_are_one_line(tmp_path: Path, run_python: Run, words: list[str], says: str) -> None:
    done = run_python(BENCH / "host.py", *words, cwd=tmp_path, environment={"TRITON_INTERPRET": "1"})
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1


def test_collectives(tmp_path: Path, run_python: Run) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", BENCH / "allreduce.py"]
    what = ["--sizes", "4K", "256K", "--repeat", "2", "--json", "links.json"]
    done = run_python(*start, *what, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, gloo" in done.stdout and done.stdout.count("all_to_all") == 2
    results = json.loads((tmp_path / "links.json").read_text())["results"]
    assert len(results) == 8
    for one in results:
        share = 1.0 if one["name"] == "all_reduce" else 0.5
        assert one["bytes"] / one["seconds"] == pytest.approx(one["algorithm"])
        assert one["bus"] == pytest.approx(share * one["algorithm"])


def test_collectives_of_one_process_are_refused(tmp_path: Path, bench: Run) -> None:
    done = bench("allreduce", tmp_path)
    assert done.returncode == 2 and "one process sends nothing" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_scaling(tmp_path: Path, bench: Run) -> None:
    (tmp_path / "a.txt").write_text("a few words\n" * 50)
    quick = ["--gpus", "1,2", "--steps", "2", "--rounds", "1", "--json", "scaling.json"]
    done = bench("scaling", tmp_path, *quick, "+recipe=fp8_delayed", "parallel=fsdp", *SMALL_STEP)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, both = json.loads((tmp_path / "scaling.json").read_text())["results"]
    assert (alone["gpus"], alone["layout"], both["gpus"], both["layout"]) == (1, "1", 2, "shard 2")
    assert alone["silent_seconds"] is None and both["silent_seconds"] > 0
    for one in (alone, both):
        assert one["tokens_per_second"] == pytest.approx(2 * 24 / one["seconds"])
    assert both["forecast"] > 0


def test_scaling_reports_why_a_run_was_refused(tmp_path: Path, bench: Run) -> None:
    done = bench("scaling", tmp_path, "--gpus", "1", "parallel=fsdp", "model.heads=3")
    assert done.returncode == 1 and "model.heads" in done.stdout and "no count of GPUs ran" in done.stderr


def test_ways_of_tokens_to_experts_agree(tmp_path: Path, run_python: Run) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", BENCH / "dispatch.py"]
    small = {"tokens": 32, "hidden": 32, "width": 16, "experts": 4, "chosen": 2, "repeat": 1}
    words = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    done = run_python(*start, *words, "--json", "ways.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checks = [line for line in done.stdout.splitlines() if line.startswith("ok")]
    assert len(checks) == 11 and "DIFFERS" not in done.stdout and "these processes share none" in done.stdout
    results = json.loads((tmp_path / "ways.json").read_text())["results"]
    assert [(one["payload"], one["way"]) for one in results] == [
        (payload, way) for payload in ("BF16", "FP8") for way in ("all_to_all", "silent", "slots")
    ]


SMALL_ATTENTION = {"tokens": 16, "hidden": 16, "heads": 2, "latent": 8, "nope": 8, "rope": 4, "value": 8, "repeat": 1}
SMALL_WORDS = [word for name, value in SMALL_ATTENTION.items() for word in (f"--{name}", str(value))]


def test_each_split_of_attention_computes_what_one_rank_does(tmp_path: Path, run_python: Run) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", BENCH / "tensor_attention.py"]
    done = run_python(*start, *SMALL_WORDS, "--json", "split.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "split.json").read_text())["results"]
    assert [(one["name"], one["ranks"]) for one in results] == [
        ("one", 1), *((name, 2) for name in ("tensor", "overlapped", "sequence", "exchanged", "context"))
    ]  # fmt: skip
    assert all(one["differs"] <= 1e-5 for one in results)
    sent = {one["name"]: one["sent"] for one in results}
    x, latents = 16 * 16, 16 * (8 + 4)
    # FP32, half of each message: f sums x and latents, g sums y; a sum is two passes, and so are gather and scatter
    assert sent["tensor"] == sent["overlapped"] == sent["sequence"] == 0.5 * 2 * 4 * (x + latents + x)
    assert sent["exchanged"] == 0.5 * 2 * 4 * (x + latents + 16 * 8)
    assert sent["context"] == 0.5 * 2 * 4 * (16 * 12 + 16 * 16 + 16 * 8 + 16 * 4)


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "one process has nothing to split"), (["--heads", "0"], "--heads 0: set 1 or more")],
)
def test_mistakes_of_splits_are_one_line(tmp_path: Path, bench: Run, words: list[str], says: str) -> None:
    done = bench("tensor_attention", tmp_path, *words)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
