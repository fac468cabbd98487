"""Which backend serves an op: by config, by machine, by measured rates, and again when a run continues."""

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from precision.backends import availability
from precision.config import BackendChoice, Granularity, Method, Precision, PrecisionConfig, ScalingConfig
from precision.errors import UserError
from precision.formats import BF16, FP32
from precision.hardware import Gpu, detect
from precision.rates import Entry, RateTable
from precision.resolve import Choice, Gemm, Resolver

H200, A100, B200 = Gpu("NVIDIA H200", (9, 0)), Gpu("NVIDIA A100", (8, 0)), Gpu("NVIDIA B200", (10, 0))
GEMM = Gemm("layers.0.attn.o", 2048, 2048, 1, 16384, BF16)


def settings(backend: str = "auto", *, never_slower: bool = False, **scaling: Any) -> PrecisionConfig:
    config = PrecisionConfig(backend=BackendChoice(backend), never_slower=never_slower)
    config.scaling = ScalingConfig(**scaling)
    return config


def rates(**ms: float) -> RateTable:
    return RateTable([Entry("linear", "delayed/tensor", "fp32", (2048, 2048, 1), 16384, ms)])


@pytest.fixture
def te_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "te_missing", lambda: None)


def test_a_cpu_takes_the_reference_without_a_note() -> None:
    resolver = Resolver(settings(), None)
    for precision in Precision:
        assert resolver.choose(GEMM, precision) == Choice(precision, "reference")
    assert not resolver.notes
    assert detect("cpu") is None


@pytest.mark.parametrize(
    ("backend", "gpu", "says"),
    [
        ("cuda", None, "precision.backend=cuda: it needs a Hopper GPU (sm_90) and there is no GPU"),
        ("cuda", A100, "precision.backend=cuda: it needs a Hopper GPU (sm_90); NVIDIA A100 is sm_80"),
        ("cuda", B200, "NVIDIA B200 is sm_100"),
        ("transformer_engine", None, "Transformer Engine needs a GPU and there is none"),
        ("transformer_engine", A100, "needs sm_89 for this scaling; NVIDIA A100 is sm_80"),
    ],
)
def test_a_backend_that_cannot_serve_here_is_refused_with_the_reason(backend: str, gpu: Gpu | None, says: str) -> None:
    with pytest.raises(ValueError, match=r"set precision.backend=auto or reference") as error:
        Resolver(settings(backend), gpu)
    assert says in str(error.value)


@pytest.mark.skipif(availability.te_missing() is None, reason="Transformer Engine is installed")
def test_a_missing_transformer_engine_is_named_with_its_installation() -> None:
    with pytest.raises(ValueError, match=r"Transformer Engine is not installed; pip install 'octet\[te\]'"):
        Resolver(settings("transformer_engine"), H200)


@pytest.mark.usefixtures("te_installed")
@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"granularity": Granularity.block}, "power_of_two=true"),
        ({"margin": 2}, "margin=2"),
    ],
)
def test_scalings_that_transformer_engine_lacks_are_refused_by_name(scaling: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"precision.scaling.{key}"):
        Resolver(settings("transformer_engine", method=Method.current, **scaling), H200)


@pytest.mark.usefixtures("te_installed")
def test_transformer_engine_leaves_to_the_reference_what_does_not_return_bf16() -> None:
    resolver = Resolver(settings("transformer_engine"), H200)
    router = Gemm("layers.0.moe.router", 64, 2048, 1, None, FP32)
    assert resolver.choose(GEMM, Precision.bf16).backend == "transformer_engine"
    head = dataclasses.replace(GEMM, name="lm_head")
    assert resolver.choose(head, Precision.bf16).backend == "reference", "in chunks, which a module cannot be"
    assert resolver.choose(head, Precision.fp8).backend == "transformer_engine"
    assert resolver.choose(router, Precision.bf16).backend == "reference"


def test_hopper_computes_with_cuda_but_for_fp32() -> None:
    for backend in ("auto", "cuda"):
        resolver = Resolver(settings(backend), H200, rates=RateTable([]))
        chosen = {name: resolver.choose(GEMM, Precision[name]).backend for name in ("fp32", "bf16", "fp8")}
        assert chosen == {"fp32": "reference", "bf16": "cuda", "fp8": "cuda"}


def test_transformer_engine_is_not_imported_where_it_was_never_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "te_missing", lambda: pytest.fail("imported"))
    for scaling in ({}, {"method": Method.current, "granularity": Granularity.block}):
        assert Resolver(settings(**scaling), H200).choose(GEMM, Precision.fp8).backend == "cuda"


@pytest.mark.parametrize("groups", [1, 64])
def test_bf16_experts_of_other_widths_than_torch_multiplies_go_to_the_reference(groups: int) -> None:
    even, odd = (Gemm("layers.1.moe.experts.down", 144, width, groups, None, BF16) for width in (104, 100))
    resolver = Resolver(settings(), H200, rates=RateTable([]))
    assert [resolver.choose(gemm, Precision.bf16).backend for gemm in (even, odd)] == ["cuda", "reference"]
    (note,) = resolver.notes
    assert note.startswith("experts are served by reference") and "100 -> 144" in note
    lone = dataclasses.replace(odd, name="layers.0.ffn.down", groups=1)
    assert resolver.choose(lone, Precision.bf16).backend == "cuda"
    with pytest.raises(UserError, match="multiples of 8"):
        Resolver(settings("cuda"), H200, rates=RateTable([])).choose(odd, Precision.bf16)


def test_results_that_kernels_round_before_they_are_fp32_have_one_note() -> None:
    experts, linear = (dataclasses.replace(GEMM, output=FP32, groups=groups) for groups in (8, 1))
    for granularity, gemm, precision, notes in (
        (Granularity.tensor, experts, Precision.fp8, 1),
        (Granularity.tensor, experts, Precision.bf16, 1),
        (Granularity.tensor, linear, Precision.fp8, 0),
        (Granularity.block, linear, Precision.fp8, 1),
        (Granularity.block, linear, Precision.bf16, 0),
    ):
        resolver = Resolver(settings("cuda", method=Method.current, granularity=granularity), H200)
        for _ in range(2):
            assert resolver.choose(gemm, precision).backend == "cuda"
        assert len([note for note in resolver.notes if "round results to BF16" in note]) == notes


def test_fp16_is_plain_pytorch_everywhere() -> None:
    """No kernel has been proved in it."""
    assert Resolver(settings(), H200, rates=RateTable([])).choose(GEMM, Precision.fp16).backend == "reference"
    with pytest.raises(UserError, match=r"precision.backend=cuda: .* is in FP16, for which it has no kernels; set"):
        Resolver(settings("cuda"), H200, rates=RateTable([])).choose(GEMM, Precision.fp16)


@pytest.mark.usefixtures("te_installed")
def test_a_gpu_without_rates_keeps_the_recipe_with_one_note() -> None:
    for gpu, backend in ((H200, "cuda"), (A100, "reference"), (B200, "transformer_engine")):
        resolver = Resolver(settings(), gpu, rates=RateTable([]))
        assert [resolver.choose(GEMM, Precision.fp8) for _ in range(3)] == 3 * [Choice(Precision.fp8, backend)]
        (note,) = resolver.notes
        assert note == (
            f"no measured rates of linear GEMMs with delayed/tensor on {gpu.name}: FP8 rows keep their recipe, "
            f"served by {backend}"
        )


@pytest.mark.usefixtures("te_installed")
@pytest.mark.parametrize(("cuda", "te", "faster"), [(1.0, 2.0, "cuda"), (2.0, 1.0, "transformer_engine")])
def test_auto_takes_the_faster(cuda: float, te: float, faster: str) -> None:
    resolver = Resolver(settings(), H200, rates=rates(bf16=1.5, cuda=cuda, transformer_engine=te))
    assert resolver.choose(GEMM, Precision.fp8) == Choice(Precision.fp8, faster)
    assert not resolver.notes


@pytest.mark.skipif(availability.te_missing() is None, reason="Transformer Engine is installed")
def test_a_backend_that_is_not_installed_is_not_chosen() -> None:
    resolver = Resolver(settings(), H200, rates=rates(bf16=1.5, cuda=2.0, transformer_engine=1.0))
    assert resolver.choose(GEMM, Precision.fp8).backend == "cuda"


def test_never_slower_leaves_a_slow_row_in_bf16_with_the_ratio() -> None:
    for backend in ("auto", "cuda"):
        resolver = Resolver(settings(backend, never_slower=True), H200, rates=rates(bf16=1.86, cuda=2.0))
        assert resolver.choose(GEMM, Precision.fp8) == Choice(Precision.bf16, "cuda", "never_slower: 0.93x")
        fast = Resolver(settings(backend, never_slower=True), H200, rates=rates(bf16=3.0, cuda=2.0))
        assert fast.choose(GEMM, Precision.fp8) == Choice(Precision.fp8, "cuda")


def test_never_slower_notes_once_that_the_measured_shape_is_far_away() -> None:
    table = rates(bf16=3.0, cuda=2.0)  # 2048 x 2048, 16384 rows
    for never_slower, told in ((True, 1), (False, 0)):
        resolver = Resolver(settings(never_slower=never_slower), H200, rates=table)
        resolver.choose(dataclasses.replace(GEMM, rows=65536), Precision.fp8)
        assert not resolver.notes, "four times the rows"
        for name in ("layers.0.attn.q_a", "layers.1.attn.q_a"):
            resolver.choose(Gemm(name, 384, 768, 1, 16384, BF16), Precision.fp8)
        assert len(resolver.notes) == told
    asked = "(384 x 768, 16384 rows) is judged by the measurement of a distant shape (2048 x 2048, 16384 rows)"
    resolver = Resolver(settings(never_slower=True), H200, rates=table)
    resolver.choose(Gemm("layers.0.attn.q_a", 384, 768, 1, 16384, BF16), Precision.fp8)
    assert asked in resolver.notes[0]


def test_never_slower_without_rates_has_a_note_and_is_refused_with_the_reference() -> None:
    resolver = Resolver(settings(never_slower=True), None)
    assert resolver.choose(GEMM, Precision.fp8) == Choice(Precision.fp8, "reference")
    assert resolver.notes[0].endswith("precision.never_slower has no effect on them")
    with pytest.raises(ValueError, match=r"precision.never_slower=true: backend=reference .* set precision.never_slo"):
        Resolver(settings("reference", never_slower=True), H200)


def test_a_resumed_run_keeps_its_backends() -> None:
    config = settings(never_slower=True)
    first = Resolver(config, H200, rates=rates(bf16=1.0, cuda=2.0))
    slow = first.choose(GEMM, Precision.fp8)
    first.choose(Gemm("lm_head", 2048, 2048, 1, None, BF16), Precision.bf16)
    later = Resolver(config, H200, saved=first.state(), rates=rates(bf16=2.0, cuda=1.0))  # measured again since
    assert later.choose(GEMM, Precision.fp8) == slow == Choice(Precision.bf16, "cuda", "never_slower: 0.50x")
    assert not later.notes
    other = Gemm("layers.1.attn.o", 2048, 2048, 1, 16384, BF16)
    assert later.choose(other, Precision.fp8).precision is Precision.fp8  # a row that was not there


def test_a_run_resumed_elsewhere_or_in_another_precision_chooses_again() -> None:
    config = settings(never_slower=True)
    first = Resolver(config, H200, rates=rates(bf16=1.0, cuda=2.0))
    first.choose(GEMM, Precision.fp8)
    moved = Resolver(config, None, saved=first.state())
    assert moved.choose(GEMM, Precision.fp8).backend == "reference"
    assert moved.notes[0] == "backends are chosen again: the run was planned on NVIDIA H200, this is a CPU"
    changed = Resolver(settings(), H200, saved=first.state(), rates=rates(bf16=1.0, cuda=2.0))
    assert changed.choose(GEMM, Precision.fp8) == Choice(Precision.fp8, "cuda")
    raised = Resolver(settings("cuda"), H200, saved=first.state())
    assert raised.choose(GEMM, Precision.fp8) == Choice(Precision.fp8, "cuda")


@pytest.mark.usefixtures("te_installed")
@pytest.mark.parametrize(("backend", "gpu"), [("transformer_engine", H200), ("auto", B200)])
def test_transformer_engine_scales_per_tensor_what_is_per_row(backend: str, gpu: Gpu) -> None:
    rows = settings(backend, method=Method.current, granularity=Granularity.row, power_of_two=True)
    resolver = Resolver(rows, gpu, rates=RateTable([]))
    assert resolver.choose(GEMM, Precision.fp8).backend == "transformer_engine"
    assert "Transformer Engine has no scales per row: it scales per tensor here" in resolver.notes


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        (None, "C compiler, and there is none; install gcc"),
        ("/nowhere/cc", "CC=/nowhere/cc: No such file or directory; set CC to a C compiler"),
        ("headers", "Triton builds kernels with Python's headers ("),
        ("false", "Python's headers (false fails)"),
    ],
)
def test_what_triton_lacks_to_build_kernels(compiler: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is missing")
    gcc = shutil.which("gcc")
    if compiler == "headers":
        if gcc is None:
            pytest.skip("no gcc here")
        monkeypatch.setattr(availability.sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"})
    monkeypatch.setattr(availability.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CC", str(gcc) if compiler == "headers" else compiler)
    assert says in str(availability.build_problem.__wrapped__())


def test_triton_can_build_kernels_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same way as Triton's own: it builds with what is found."""
    build = pytest.importorskip("triton.runtime.build", reason="Triton is missing")
    problem = availability.build_problem.__wrapped__()
    if problem is not None:
        pytest.skip(problem)
    source = "#include <Python.h>\nint main(void) { return 0; }\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "main.c").write_text(source)
        assert Path(build._build("octet", f"{folder}/main.c", folder, [], [], [], [])).is_file()
