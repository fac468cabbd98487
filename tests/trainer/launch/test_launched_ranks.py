"""Many processes from one command line: real torchrun, on the CPU, two ranks. What a user meets, good and bad."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_lines import events, metrics

ROOT = Path(__file__).parents[3]
QUIET = [sys.executable, str(ROOT / "scripts" / "launch" / "torchrun.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PROGRAM = str(ROOT / "tests" / "trainer" / "launch" / "ranks_program.py")
TRAIN = str(ROOT / "train.py")
Start = Callable[..., Any]
Run = Callable[..., tuple[int, str, str]]
TWO = ["--standalone", "--nproc_per_node=2"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfd")


def end(process: Any, seconds: float = 120) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.fixture
def start(programs: Any) -> Start:
    """start(command, folder, VARIABLE=...): torchrun and its ranks as forks, scripts as they are."""

    def start(command: list[str], where: Path, **more: str) -> Any:
        if command[0] == sys.executable:
            return programs.start(*command[1:], cwd=where, environment=more)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=where, env={**os.environ, **more}, stdout=pipe, stderr=pipe, text=True)

    return start


@pytest.fixture
def run(start: Start) -> Run:
    return lambda command, where, **more: end(start(command, where, **more))


def said(err: str) -> list[str]:
    """The lines of ours."""
    return [line for line in err.splitlines() if line.startswith("octet: ")]


def processes_of(launcher: int) -> list[int]:
    """The processes that a launcher has started, by their rank on its node."""
    tasks = Path(f"/proc/{launcher}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def wait_for(path: Path, process: Any, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or (path.is_file() and not path.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ------------------------------------------------------------------------------ processes that end in all kinds of ways

FAULTS = {
    "none": (0, ""),
    "kill:0": (1, "error: rank 0 (HOST, process N) was killed by SIGKILL (out of memory? see dmesg), in step 3"),
    "bug": (1, "error: rank 1 (HOST, process N) failed in step 3: KeyError: 'x'"),
    "mistake:all": (2, "error: optim.lr=9: too large; lower it"),
    "hang": (1, "error: the other ranks timed out waiting for rank 1 (HOST, process N), in step 3, at "),
    "lag": (1, "error: the other ranks timed out waiting for rank 1 (HOST, process N), in step 3, at "),
    "freeze": (1, "error: rank 1 (HOST, process N) has been unresponsive for"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_of_one_rank_ends_all_and_is_reported_once(fault: str, tmp_path: Path, run: Run):
    began = time.monotonic()
    timeout = ["6", "4"] if fault in ("hang", "lag") else []  # elsewhere a loaded machine may take its time
    code, out, err = run([*QUIET, *TWO, PROGRAM, "runs", "a", fault, *timeout], tmp_path)
    expected, says = FAULTS[fault]
    folder = tmp_path / "runs" / "a"
    assert code == expected and time.monotonic() - began < 60, err
    assert out.count("step 2/6") == 1  # rank 0 has the screen
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]
    failures = events(folder, "failure")
    if not says:
        assert err == "" and failures == []
        assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]
        assert "step 6/6" in (folder / "logs" / "rank1.log").read_text()
        return
    own = [line for line in said(err) if "ended by SIGKILL" not in line]  # of the one that did not listen
    assert len(own) == 1 and len(failures) == 1, err
    blank = re.sub(r"process \d+", "process N", " ".join(own[0].split())).replace(os.uname().nodename, "HOST")
    if fault == "kill:0":  # it cannot say its step: the others know their own, and its last pulse
        blank = blank.replace("in step 2", "in step 3")
    assert blank.startswith(f"octet: {says}"), err
    assert own[0] == f"octet: {failures[0]['message']}" and failures[0]["exit_code"] == code
    waited_in = {"hang": "; they waited in all_gather, at world.py:", "lag": "; they waited in gloo all_reduce, "}
    assert waited_in.get(fault, "") in own[0]
    assert ("Traceback" in err) == (fault == "bug") and err.count("KeyError") in (0, 2)


def test_an_end_on_which_all_ranks_agree_is_one_line(tmp_path: Path, run: Run):
    code, _, err = run([*QUIET, *TWO, PROGRAM, "runs", "a", "stop:all"], tmp_path)
    assert (code, err) == (1, "octet: error: 2 steps in a row skipped\n")


@pytest.mark.parametrize(
    ("fault", "expected", "says"),
    [
        ("absent", 128 + signal.SIGKILL, r"octet: terminated octet: error: rank 1 \(process N\) ended by SIGKILL"),
        ("wrong", 2, r"octet: error: optim.lr=9: too large; lower it"),
    ],
)
def test_no_rank_waits_for_one_that_ends_before_it_comes(
    fault: str, expected: int, says: str, tmp_path: Path, run: Run
):
    code, _, err = run([*QUIET, *TWO, PROGRAM, "runs", "a", fault, "6", "300"], tmp_path)
    began = (tmp_path / "runs").stat().st_mtime
    assert code == expected and time.time() - began < 25, "torchrun waits for 30 s"
    assert re.fullmatch(says, re.sub(r"process \d+", "process N", " ".join(said(err)))), err


def test_a_signal_before_training_also_ends_ranks_that_cannot_handle_it(tmp_path: Path, start: Start):
    process = start([*QUIET, *TWO, PROGRAM, "runs", "a", "waits", "6", "300"], tmp_path)
    for rank in range(2):
        wait_for(tmp_path / "runs" / f"rank{rank}", process)
    time.sleep(1)  # until rank 0 is there
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, _, err = end(process)
    assert time.monotonic() - began < 20, "torchrun waits for 30 s"
    assert (code, err) == (128 + signal.SIGTERM, "octet: terminated\n")


# ---------------------------------------------------------------------------------------------------------- train.py


@pytest.mark.parametrize(
    ("options", "arguments", "says"),
    [
        ([], ["parallel=fsdp", "model.dimm=3"], "error: model.dimm=3: there is no such key"),
        ([], ["+recipe=bf16"], "set parallel.shard=-1, which uses all, or start one process"),
        (["--max_restarts=1"], ["parallel=fsdp"], "error: --max-restarts=1: a run without a name"),
    ],
)
def test_a_mistake_is_reported_once_and_every_process_exits_with_2(
    options: list[str], arguments: list[str], says: str, tmp_path: Path, run: Run
):
    code, out, err = run([*QUIET, *TWO, *options, TRAIN, *arguments], tmp_path)
    # torchrun starts processes again that have ended with an error, whatever it was
    assert (code, out) == (2, "") and len(said(err)) == 1 + len(options), err
    assert says in said(err)[0] and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_torchrun_itself_names_what_was_wrong_too(tmp_path: Path, run: Run):
    code, _, err = run([*TORCHRUN, *TWO, TRAIN, "model.dimm=3"], tmp_path)
    assert code == 1 and len(said(err)) == 1
    assert "exitcode  : 2" in err and "exitcode  : -15" not in err
    assert "traceback : error: model.dimm=3: there is no such key" in err


def test_a_dry_run_prints_once(tmp_path: Path, run: Run):
    code, out, _ = run([*QUIET, *TWO, TRAIN, "parallel=fsdp", "+recipe=fp8_jit", "dry_run=true"], tmp_path)
    assert code == 0 and out.count("precision plan: fp8_jit") == 1
    assert list(tmp_path.iterdir()) == []


def train_with_more_on_rank_1(argument: str, folder: Path) -> str:
    """A program that is train.py, on rank 1 with one argument more."""
    program = folder / "differ.py"
    program.write_text(
        "import os, runpy, sys\n"
        f"sys.argv = [{TRAIN!r}, *sys.argv[1:], *([{argument!r}] if os.environ['RANK'] == '1' else [])]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return str(program)


@pytest.mark.parametrize("argument", ["dry_run=true", "--cfg=job"])
def test_no_rank_waits_for_one_that_was_not_to_train(argument: str, overrides: Any, tmp_path: Path, run: Run):
    program = train_with_more_on_rank_1(argument, tmp_path)
    code, _, err = run([*QUIET, *TWO, program, *overrides("parallel=fsdp")], tmp_path)
    assert (code, said(err)) == (
        1,
        ["octet: error: rank 1 ended before all ranks had connected; start all with one command"],
    )
    assert not (tmp_path / "runs").exists()


def test_ranks_that_differ_in_their_config_are_refused(overrides: Any, tmp_path: Path, run: Run):
    program = train_with_more_on_rank_1("optim.lr=0.5", tmp_path)
    code, _, err = run([*QUIET, *TWO, program, *overrides("parallel=fsdp", "optim.lr=0.25")], tmp_path)
    assert code == 2 and len(said(err)) == 1
    assert said(err)[0].startswith("octet: error: optim.lr=0.5 on rank 1, 0.25 on the others: all ranks of a run ")
    assert not (tmp_path / "runs").exists()


def test_a_run_of_two_is_stopped_saved_killed_and_resumes_by_itself(overrides: Any, tmp_path: Path, start: Start):
    common = overrides("parallel=fsdp", "run.name=a", "run.resume=auto", "checkpoint.every=4", "data.cache_dir=cache")
    common = [word for word in common if not word.startswith("logging.console")]
    folder = tmp_path / "runs" / "a"

    # SIGTERM to torchrun: both stop after the same step, and save
    process = start([*QUIET, *TWO, TRAIN, *common, "trainer.max_steps=1000"], tmp_path)
    wait_for(folder / "metrics.jsonl", process)
    process.send_signal(signal.SIGTERM)
    code, out, err = end(process)
    step = metrics(folder)[-1]["step"]
    assert code == 128 + signal.SIGTERM and out.count("packing the text") == 1
    how = f"resume with run.resume={tmp_path / 'runs' / 'a'}"
    expected = f"octet: stopped by SIGTERM after step {step}, saved; {how}"
    assert said(err) == [expected] and (folder / "checkpoints" / f"step_{step:08d}").is_dir()
    assert [event["kind"] for event in events(folder)].count("signal") == 1
    assert f"{step}/1000  loss" in (folder / "logs" / "rank1.log").read_text()

    # a killed rank: torchrun starts both again, and they resume from the last checkpoint, with the run's settings
    more = ["run.name=a", f"trainer.max_steps={step + 40}"]
    process = start([*QUIET, *TWO, "--max_restarts=1", TRAIN, *more], tmp_path)
    wait_for(folder / "checkpoints" / f"step_{(step // 4 + 2) * 4:08d}", process)
    victim = processes_of(process.pid)[0]
    os.kill(victim, signal.SIGKILL)
    code, out, err = end(process)
    assert code == 0 and len(said(err)) == 1, err
    assert f"rank 0 ({os.uname().nodename}, process {victim}) was killed by SIGKILL" in err
    assert out.count("resumed from step_") == 2
    assert f"settings of runs/a; changed here: trainer.max_steps 1000 -> {step + 40}\n" in out
    trained = [line["step"] for line in metrics(folder, "loss/total")]
    assert trained == list(range(1, step + 41))
    assert [event["rank"] for event in events(folder, "failure")] == [0]


# ------------------------------------------------------------------------------------------------------ scripts/launch

NODES = str(ROOT / "scripts" / "launch" / "two_nodes.sh")


@pytest.mark.parametrize("code_of_it", [0, 127])
def test_a_node_without_a_gpu_asks_how_many_processes(code_of_it: int, tmp_path: Path, run: Run):
    """With and without NVIDIA's programs."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nexit {code_of_it}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    script = ROOT / "scripts" / "launch" / "one_node.sh"
    code, out, err = run([str(script), "run.name=a"], tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (code, out) == (2, "") and err.startswith("octet: error: PROCESSES: there is no GPU here")


def test_a_launch_script_starts_a_process_on_each_visible_gpu(tmp_path: Path, run: Run):
    for name, text in (
        ("nvidia-smi", "for n in 0 1 2 3; do echo GPU $n; echo '  MIG 1g'; done"),
        ("python", 'echo "$3"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "scripts" / "launch" / "two_nodes.sh"
    shutil.copytree(Path(NODES).parent, script.parent)
    place = {"NODES": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for visible, count in (("2,3", 2), ("0", 1), ("0,1,-1,2", 2), ("0,1,2,3,4,5", 4)):
        code, out, err = run([str(script)], tmp_path, **place, CUDA_VISIBLE_DEVICES=visible)
        assert (code, out, err) == (0, f"--nproc_per_node={count}\n", "")
    code, _, err = run([str(script)], tmp_path, **place, CUDA_VISIBLE_DEVICES="")
    assert code == 2 and "there is no GPU here (CUDA_VISIBLE_DEVICES=); set PROCESSES=2" in err


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"PROCESSES": "x"}, "octet: error: PROCESSES=x: not a number from 1 to 999999; give one, or leave it out\n"),
        ({"PROCESSES": "0"}, "octet: error: PROCESSES=0: not a number from 1 to 999999; give one, or leave it out\n"),
        (
            {"RESTARTS": "1" * 20},
            f"octet: error: RESTARTS={'1' * 20}: not a number from 1 to 999999; give one, or leave it out\n",
        ),
        ({"NODES": "0"}, "octet: error: NODES=0: not a number from 1 to 999999; give one, or leave it out\n"),
        (
            {"PROCESSES": "2", "RESTARTS": "0", "HEAD": ":port"},
            "octet: error: HEAD=:port: no host and port; set HEAD=HOST:PORT\n",
        ),
        ({"PROCESSES": "2"}, "octet: error: HEAD: which machine do they meet at? set HEAD=HOST:PORT\n"),
    ],
)
def test_mistakes_of_a_launch_script_are_one_line(tmp_path: Path, place: dict[str, str], says: str, run: Run):
    assert run([NODES], tmp_path, **place) == (2, "", says)


def test_a_launch_script_leaves_a_run_its_layout(tmp_path: Path, run: Run):
    """Where it had several processes; others, and new runs, get FSDP. Also through a link, and with CDPATH, by which cd
    goes elsewhere."""
    script = tmp_path / "scripts" / "launch" / "two_nodes.sh"
    shutil.copytree(Path(NODES).parent, script.parent)
    (tmp_path / "link.sh").symlink_to(script.with_name("one_node.sh"))
    (tmp_path / "python").write_text('#!/bin/sh\nfor word; do case $word in parallel*|-c*) echo "$word";; esac; done\n')
    (tmp_path / "python").chmod(0o755)
    for name, tensor in (("one", 1), ("two", 2)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        layout = f"parallel:\n  replicate: 1\n  shard: 1\n  tensor: {tensor}\n  timeout: 300.0\nrun:\n  x: 2\n"
        (tmp_path / "runs" / name / "config.yaml").write_text(layout)
    place = {"PROCESSES": "2", "NODES": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}", "CDPATH": str(tmp_path)}
    for words, given in (
        (["+recipe=bf16"], "parallel=fsdp\n"),
        (["-cd", "configs", "model=imported"], "-cd\nparallel=fsdp\n"),
        (["--from-run", "runs/one"], "parallel=fsdp\n"),
        ([], "parallel=fsdp\n"),
        (["parallel=hsdp", "run.resume=runs/two"], "parallel=hsdp\n"),
        (["run.resume=runs/two"], ""),
        (["run.resume='runs/two'"], ""),
        (["run.resume=runs/two/checkpoints/step_00000003"], ""),
        (["run.name=two", "run.resume=auto"], ""),
        (["--from-run", "runs/two"], ""),
        (["--from-run=runs/one", "run.name=new"], "parallel=fsdp\n"),
        (["--from-run", "runs/lr=1", "-cd", "configs", "run.name=new"], "-cd\nparallel=fsdp\n"),
        (["run.resume=runs/one"], "parallel=fsdp\n"),
        (["run.name=new", "run.resume=never"], "parallel=fsdp\n"),
    ):
        assert run([str(script.relative_to(tmp_path)), *words], tmp_path, **place) == (0, given, ""), words
    assert run(["./link.sh", "run.name=new"], tmp_path, **place) == (0, "parallel=fsdp\n", "")


def test_two_nodes_meet_and_one_that_is_lost_ends_the_other(overrides: Any, tmp_path: Path, start: Start):
    words = [word for word in overrides("run.name=a", "trainer.max_steps=1000") if "console" not in word]
    place = {"HEAD": f"localhost:{20000 + os.getpid() % 10000}", "PROCESSES": "1"}
    nodes = [start([NODES, *words], tmp_path, **place) for _ in range(2)]
    folder = tmp_path / "runs" / "a"
    wait_for(folder / "metrics.jsonl", nodes[0])
    lost, other = nodes
    (victim,) = processes_of(lost.pid)
    rank = 0 if "RANK=0" in Path(f"/proc/{victim}/environ").read_text().split("\0") else 1
    lost.kill()  # its torchrun, and what runs there
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    code, _, err = end(other)
    assert code == 1 and time.monotonic() - began < 60
    assert len(said(err)) == 1, err
    assert f"rank {rank} (" in err or "lost the job's store" in err  # the store was on one of them
    assert end(lost)[0] == -signal.SIGKILL
    assert len(events(folder, "failure")) == 1


def test_slurm_starts_one_torchrun_on_each_node(overrides: Any, tmp_path: Path, run: Run):
    stubs = {
        "scontrol": "#!/bin/sh\n[ \"$1 $2 $3\" = 'show hostnames here,there' ] && printf 'localhost\\nthere\\n'\n",
        # srun starts its command once on each node; its options come first
        "srun": '#!/bin/bash\n[ "$1" = --kill-on-bad-exit=1 ] || exit 9\nshift\n"$@" & "$@" & wait -n && wait -n\n',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "here,there",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "PROCESSES": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    script = str(ROOT / "scripts" / "launch" / "slurm.sbatch")
    keys = "run.name=a", "trainer.max_steps=2", "profile.steps=[2,2]", "profile.memory=false", "model.vocab_size=9000"
    keys += "trainer.global_batch_size=2", "trainer.microbatch_size=1", "model.num_layers=1", "model.num_mtp_layers=0"
    words = [word for word in overrides(*keys) if "console" not in word]
    code, _, err = run(["bash", script, *words], tmp_path, **slurm)
    folder = tmp_path / "runs" / "a"
    assert code == 0, err
    assert len([line for line in said(err) if "the text yields only" in line]) == 1
    assert [line["step"] for line in metrics(folder)] == [1, 2, 2]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]
    traces = sorted((folder / "profile").iterdir())
    assert [path.name for path in traces] == [f"trace_step2-2_rank{rank}.json.gz" for rank in (0, 1)]
    assert all(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in traces)
