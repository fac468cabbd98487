"""What the self-test found is found once for each GPU, torch, Triton and source; what was wrong is not used."""

import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_disk import full_disk

from precision import PrecisionConfig, proof
from precision.attention import _kernel_takes
from precision.backends.availability import cuda_problem
from precision.config import BackendChoice, Precision
from precision.formats import BF16
from precision.hardware import Gpu
from precision.proof import Combination, Proof
from precision.rates import RateTable
from precision.resolve import Gemm, Resolver
from precision.selftest import __main__ as selftest
from precision.selftest.checks import CHECKS, Check
from precision.selftest.twins import Mismatch
from trainer.health.casts import has_kernel

H200 = Gpu("NVIDIA H200", (9, 0))
LINEAR, GROUPED = (Gemm(f"g{groups}", 2816, 2048, groups, 16384, BF16) for groups in (1, 64))
ALONE = dataclasses.replace(LINEAR, name="layers.0.moe.experts.down")  # the only expert of a layer
Run = Callable[[Combination], Proof]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(proof, "_latest", None)
    yield
    proof.refused.clear()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Combination]:
    """The self-tests that have run; each finds nothing wrong."""
    seen: list[Combination] = []

    def run(here: Combination) -> Proof:
        time.sleep(0.05)
        seen.append(here)
        return Proof(here, seconds=1.5)

    monkeypatch.setattr(proof, "_run", run)
    return seen


def find(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], unproved: str = "") -> None:
    monkeypatch.setattr(proof, "_run", lambda here: Proof(here, wrong, unproved))


def test_a_combination_is_tested_once(tmp_path: Path, runs: list[Combination], monkeypatch: pytest.MonkeyPatch) -> None:
    assert proof.cached_proof(H200, tmp_path) is None and proof.latest() is None
    said: list[str] = []
    assert all(proof.prove(H200, tmp_path, said.append).is_proved for _ in range(2)) and len(runs) == len(said) == 1
    assert said[0].startswith("checking the kernels, once with torch ") and "NVIDIA H200" in said[0]
    assert proof.cached_proof(H200, tmp_path) == proof.latest() == Proof(runs[0], seconds=1.5)
    proof.prove(Gpu("NVIDIA H100", (9, 0)), tmp_path)
    monkeypatch.setattr(proof, "_triton_version", lambda: "9.9")
    proof.prove(H200, tmp_path)
    monkeypatch.setattr(proof, "_source_digest", lambda: "another")
    proof.prove(H200, tmp_path)
    assert [(run.gpu, run.triton == "9.9", run.source == "another") for run in runs] == [
        ("NVIDIA H200", False, False), ("NVIDIA H100", False, False), ("NVIDIA H200", True, False),
        ("NVIDIA H200", True, True),
    ]  # fmt: skip


def test_ranks_wait_for_the_first(tmp_path: Path, runs: list[Combination]) -> None:
    ranks = [threading.Thread(target=proof.prove, args=(H200, tmp_path)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(runs) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"combination": 3}', '{"seconds": 2}'])
def test_a_damaged_file_is_tested_again(tmp_path: Path, runs: list[Combination], damage: str) -> None:
    proof.prove(H200, tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_text(damage)
    assert proof.prove(H200, tmp_path).is_proved and len(runs) == 2


def test_a_folder_that_cannot_be_written_leaves_the_kernels_unproved(tmp_path: Path, runs: list[Combination]) -> None:
    (tmp_path / "file").write_text("")
    found = proof.prove(H200, tmp_path / "file" / "folder")
    assert not found.is_proved and "the self-test was not run" in found.line and not proof.refused


def test_a_full_disk_keeps_no_result_and_no_wrong_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, {"casts": "they differ"})
    with full_disk(4):
        assert proof.prove(H200, tmp_path).wrong and "casts" in proof.refused
    find(monkeypatch, {})
    assert proof.prove(H200, tmp_path).is_proved  # tested again


def test_a_home_that_may_not_be_searched_is_not_used(
    tmp_path: Path, runs: list[Combination], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, stat, access = tmp_path / "home", os.stat, os.access
    home.mkdir()

    def closed_stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if home in Path(os.fsdecode(path)).parents:
            raise PermissionError(13, "Permission denied")
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", closed_stat)
    monkeypatch.setattr(os, "access", lambda path, mode: home != Path(path) and access(path, mode))  # root may
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert proof.prove(H200).is_proved and proof.cached_proof(H200) == proof.latest() and len(runs) == 1
    assert list((tmp_path / f"octet-{os.getuid()}" / "proofs").glob("*.json"))


def test_wrong_casts_refuse_the_backend_and_name_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_triton_version", lambda: "9.9")
    find(monkeypatch, {proof.CASTS: "cast: 3 of 5 numbers differ"})
    found = proof.prove(H200, tmp_path)
    problem = cuda_problem(H200)
    assert problem is not None and "\n" not in problem + found.line
    for part in ("cast: 3 of 5 numbers differ", "Triton 9.9", f"torch {found.combination.torch}", "NVIDIA H200"):
        assert part in problem and part in found.line
    with pytest.raises(ValueError, match=r"precision\.backend=cuda: its kernels for casts are wrong here"):
        Resolver(PrecisionConfig(backend=BackendChoice.cuda), H200)
    assert Resolver(PrecisionConfig(backend=BackendChoice.auto), H200).kernels == "reference"
    assert json.loads(json.dumps(found.record))["proved"] is False
    find(monkeypatch, {})
    monkeypatch.setattr(proof, "_source_digest", lambda: "corrected")
    proof.prove(H200, tmp_path)
    assert cuda_problem(H200) is None


@pytest.mark.parametrize(
    ("op", "wrong", "right"),
    [(proof.GEMMS, LINEAR, GROUPED), *((proof.EXPERTS, experts, LINEAR) for experts in (GROUPED, ALONE))],
)
def test_wrong_products_are_refused_for_their_op_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, wrong: Gemm, right: Gemm
) -> None:
    monkeypatch.setattr(proof, "_triton_version", lambda: "9.9")
    find(monkeypatch, {op: "product: relative error 3.0e-01"})
    proof.prove(H200, tmp_path)
    auto, cuda = (
        Resolver(PrecisionConfig(backend=choice), H200, rates=RateTable([]))
        for choice in (BackendChoice.auto, BackendChoice.cuda)
    )
    for precision in (Precision.fp8, Precision.bf16):
        assert auto.choose(wrong, precision).backend == "reference"
        for resolver in (auto, cuda):
            assert resolver.choose(right, precision).backend == resolver.kernels == "cuda"
        with pytest.raises(ValueError, match=f"precision.backend=cuda: its kernels for {op} are wrong") as error:
            cuda.choose(wrong, precision)
        assert "Triton 9.9" in str(error.value) and "\n" not in str(error.value)
    (note,) = (note for note in auto.notes if "served by reference" in note)
    assert note.startswith(f"{op} are served by reference") and "Triton 9.9" in note and "\n" not in note
    saved = auto.state()
    assert Resolver(PrecisionConfig(), H200, saved=saved).choose(wrong, Precision.fp8).backend == "reference"
    proof.refused.clear()
    assert Resolver(PrecisionConfig(), H200, saved=saved).choose(wrong, Precision.fp8).backend == "cuda"


def test_kernels_found_wrong_since_the_run_began_are_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Resolver(PrecisionConfig(), H200)
    assert first.choose(GROUPED, Precision.fp8).backend == "cuda"
    find(monkeypatch, {proof.EXPERTS: "product: relative error 3.0e-01"})
    proof.prove(H200, tmp_path)
    again = Resolver(PrecisionConfig(), H200, saved=first.state())
    assert again.choose(GROUPED, Precision.fp8).backend == "reference" and len(again.notes) >= 1


def test_ops_that_are_no_gemms_take_their_plain_twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, {proof.ATTENTION: "result of attention: relative error 1"})
    proof.prove(H200, tmp_path)
    assert cuda_problem(H200) is None
    assert not _kernel_takes(torch.device("cuda"), torch.bfloat16, 192, 128)


def test_kernels_that_were_not_proved_are_tested_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(monkeypatch, {proof.LOSS: "loss: 3 of 5 numbers differ"}, "the self-test stopped early")
    assert proof.LOSS in proof.prove(H200, tmp_path).wrong
    find(monkeypatch, {})
    assert proof.prove(H200, tmp_path).is_proved and not proof.refused


BEGUN, FINE = '{"op": "experts", "check": "routes"}\n', '{"op": "experts", "check": "routes", "failure": null}\n'
WRONG, FULL = FINE.replace("null", '"it differs"'), FINE.replace('"failure": null', '"unproved": "no memory"')


@pytest.mark.parametrize(
    ("text", "code", "wrong", "unproved"),
    [
        (BEGUN + FINE, 0, {}, ""),
        (BEGUN + WRONG + BEGUN + FINE, 0, {"experts": "it differs"}, ""),
        (BEGUN + FINE + BEGUN, -11, {"experts": "routes ended the process: signal 11"}, "the self-test stopped early"),
        (BEGUN + WRONG, 3, {"experts": "it differs"}, "the self-test stopped early: exit code 3: last words"),
        (BEGUN + WRONG + BEGUN + FULL, 3, {"experts": "it differs"}, "routes stopped the self-test: no memory"),
        ("", 1, {}, "the self-test stopped early: exit code 1: last words"),
    ],
)
def test_reports_of_processes_that_live_and_die(text: str, code: int, wrong: dict[str, str], unproved: str) -> None:
    assert selftest.read_report(text, code, "last\nwords") == (wrong, unproved)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_dies_or_hangs_leaves_the_other_checks_to_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fine(device: torch.device) -> None: ...

    def dies(device: torch.device) -> None:
        os._exit(7)

    def hangs(device: torch.device) -> None:
        time.sleep(60)

    def differs(device: torch.device) -> None:
        raise Mismatch("it differs")

    checks = [Check(op, run, ()) for op, run in (("a", hangs), ("b", dies), ("c", fine), ("d", differs), ("e", fine))]
    monkeypatch.setattr(selftest, "CHECKS", checks)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sys, "argv", ["selftest", "--processes=3", "--patience=3", "--verbose"])
    assert selftest.main() == 0
    *lines, result = map(json.loads, capsys.readouterr().out.splitlines())
    wrong = {"a": "hangs ended the process: signal 9", "b": "dies ended the process: exit code 7", "d": "it differs"}
    assert result == {"wrong": wrong, "unproved": "the self-test stopped early"}
    assert sorted(line["op"] for line in lines if "seconds" in line) == ["c", "d", "e"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_checks_that_no_process_is_left_to_run_count_as_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(device: torch.device) -> None:
        raise RuntimeError("type fp8e4nv not supported in this architecture")

    def fine(device: torch.device) -> None: ...

    checks = [Check(op, check, (), is_for=lambda _: True) for op, check in (("a", raises), ("b", fine))]
    monkeypatch.setattr(selftest, "CHECKS", [*checks, Check("c", fine, ())])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(sys, "argv", ["selftest"])
    assert selftest.main() == 0
    wrong = json.loads(capsys.readouterr().out)["wrong"]
    assert list(wrong) == ["a", "b"], "c needs another GPU"
    assert wrong["b"].startswith("fine was not run: the self-test stopped early")


@pytest.mark.parametrize(
    ("capability", "shared", "ops"),
    [
        ((8, 0), 163, set()),
        ((8, 9), 99, {proof.STATISTICS}),
        ((9, 0), 227, {check.op for check in CHECKS}),
        ((10, 0), 227, {proof.STATISTICS, proof.ATTENTION}),
    ],
)
def test_checks_are_of_the_kernels_that_runs_launch_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shared: int, ops: set[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    properties = SimpleNamespace(shared_memory_per_block_optin=shared * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = {check.op for check in CHECKS if check.is_for(torch.device("cuda"))}
    assert found == {proof.OPTIMIZER, proof.MUON, proof.PEERS, proof.LOSS, proof.ROUTER, *ops}
    assert has_kernel.__wrapped__(torch.device("cuda")) is (proof.STATISTICS in found)


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), False),
        (RuntimeError("PassManager::run failed"), True),
    ],
)
def test_a_gpu_that_is_full_or_taken_proves_nothing_wrong(
    error: Exception, wrong: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(device: torch.device) -> None:
        raise error

    assert not selftest.run(Check(proof.EXPERTS, fails, ()), torch.device("cpu"))
    found, unproved = selftest.read_report(capsys.readouterr().out, 3, "")
    assert set(found) == ({proof.EXPERTS} if wrong else set()) and (str(error) in unproved) is not wrong


def test_where_no_process_can_use_a_gpu_nothing_is_proved_and_nothing_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "PROCESSES", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytest.importorskip("triton", reason="Triton is missing")
    found = proof.prove(H200, tmp_path)
    assert found.unproved.startswith("the self-test stopped early: exit code 1") and not proof.refused
    assert not list(tmp_path.glob("*.json"))
