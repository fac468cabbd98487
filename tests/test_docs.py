"""README and docs are true: every command in them runs, every file they name exists, the README stays short."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONSTRAINTS = sorted(file.name for file in ROOT.glob("constraints*.txt"))
Run = Callable[..., subprocess.CompletedProcess[str]]
PAGES = [
    "README.md",
    "docs/precision.md",
    "docs/benchmarks.md",
    "docs/parallelism.md",
    "docs/tensor_parallel.md",
    "docs/recovery.md",
    "docs/health.md",
    "docs/export.md",
    "docs/data.md",
    "docs/scale.md",
    "docs/fully_fp8.md",
    "docs/optimizers.md",
    "docs/lab.md",
    "docs/schedules.md",
]
SMALL = {
    "eval.sample": "0",
    "model.hidden_size": "64", "model.num_layers": "2", "model.num_heads": "2", "model.kv_lora_rank": "32",
    "model.intermediate_size": "96", "model.moe_intermediate_size": "32", "model.num_experts": "4",
    "trainer.max_steps": "3", "trainer.global_batch_size": "4", "trainer.microbatch_size": "4",
    "trainer.sequence_length": "32", "eval.every": "0", "eval.at_end": "4", "checkpoint.every": "0",
    "trainer.device": "cpu",
}  # fmt: skip
# many short files: the one that is held out, and evaluated whole, is short
TEXT = ["data=text", "data.path=configs", "data.glob='**/*.yaml'", "model.vocab_size=512"]
BENCH = {"--model": "deepseek_tiny", "--tokens": "32", "--rounds": "1", "--repeat": "1", "--hold": "0"}
BENCHES = {
    "linear.py": {**BENCH, "--shape": "32x32x32"},
    "experts.py": {**BENCH, "--hidden": "32", "--width": "16", "--experts": "4", "--chosen": "2"},
    "attention.py": {**BENCH, "--shape": "1x2x16x24x16"},
}
SPLIT = {
    "allreduce.py": ["--sizes", "64K"],
    "dispatch.py": [
        *("--tokens", "32", "--hidden", "32", "--width", "16", "--experts", "4", "--chosen", "2", "--repeat", "1"),
    ],
    "tensor_attention.py": [
        *("--tokens", "16", "--hidden", "16", "--heads", "2", "--latent", "8", "--nope", "8"),
        *("--rope", "4", "--value", "8", "--repeat", "1"),
    ],
}


def commands(page: str) -> list[str]:
    """The lines of a page's code blocks that start a program, without their comments."""
    text = re.sub(r" \\\n +", " ", (ROOT / page).read_text())  # a command on several lines
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    programs = ("python ", "make ", "torchrun ", "scripts/launch/")
    return [line.split("  #")[0].strip() for line in lines if line.startswith(programs)]


def benched(words: list[str]) -> list[str]:
    """A command of docs/benchmarks.md with its sizes cut: they are a GPU's."""
    if words[0].endswith("compare_runs.py"):  # of runs that commands before it have made
        return words
    if words[0].endswith("bench/scaling.py"):
        few = {"--gpus": "1" if "1" in words[:3] else "2", "--rounds": "1", "--steps": "2"}
        words = [few.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        words += [part for option in few.keys() - set(words) for part in (option, few[option])]
        words = [word.replace("=symmetric", "=slots") for word in words]  # which needs NVLink
    if words[0].endswith("rivals/compare.py"):
        sizes = [f"{key}={value}" for key, value in SMALL.items() if key.startswith("model.") or "device" in key]
        counts = ["--sequences", "2", "--length", "24", "--warm-up", "1", "--steps", "1", "--rounds", "1"]
        return [words[0], *counts, "--ours", "bf16", *sizes, "model.num_experts=8", "model.vocab_size=512"]
    if words[0].endswith("bench/data.py"):
        return [words[0], "--mb", "1", "--vocab-size", "300", "--workers", "1"]
    if words[0].endswith("bench/host.py"):  # refused beside Triton's interpreter; tests/scripts/test_bench.py runs it
        return [words[0], "--help"]
    words = [word for word in words if word != "--table"]  # of rates of the cuda backend
    if words[0].endswith("bench/linear.py"):  # FP8 products of torch itself take a CPU seconds
        words = [word for word in words if word != "limit"]
    sizes = BENCHES.get(Path(words[0]).name)
    if sizes is not None:
        cut = [sizes.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        given = {word for word in words if word.startswith("--")}
        needed = {"--rounds", "--repeat", "--hold", *(sizes.keys() - BENCH.keys())}
        if words[0].endswith("experts.py"):
            needed.add("--tokens")
        if "--model" in given:
            needed.discard("--shape")
        return [*cut, *(part for option in sorted(needed - given) for part in (option, sizes[option]))]
    own = {"model", "data", "data.path", "data.glob", "model.vocab_size", *SMALL}
    kept = [word for word in words if word.partition("=")[0] not in own]
    return smaller([*kept, *TEXT])


def smaller(words: list[str]) -> list[str]:
    """The command for a small model and few steps, unless it says otherwise itself or does not train."""
    if words[0].endswith("bench/step.py"):
        words = [*words, "--steps", "2", "--hold", "0"]
    if words[0].endswith("bench/health.py"):
        words = [*words, "--steps", "2"]
    if words[0].endswith("sample.py") and "--tokens" not in words:
        words = [*words, "--tokens", "8"]
    given = {word.split("=")[0] for word in words}
    of_a_run = words[0].endswith(("replay_step.py", "dashboard.py", "evaluate.py", "sample.py", "export_hf.py"))
    of_a_run |= "run.resume=auto" in words and "--standalone" not in words  # which has its model, its batch, its text
    if of_a_run:
        words = [re.sub(r"^trainer\.max_steps=\d{3,}$", "trainer.max_steps=6", word) for word in words]
    if of_a_run or "dry_run=true" in words or any(word.startswith("model=") for word in words):
        return words
    extra = [f"{key}={value}" for key, value in SMALL.items() if key not in given]
    if words[0].startswith("scripts/") and "train" not in words[0]:
        extra = [word for word in extra if word.startswith(("model.", "trainer."))]
    return [*words, *extra]


def on_text(words: list[str]) -> list[str]:
    """The command, `smaller`, on a little text, and on a CPU."""
    if "--device" in words:
        words = [word for word in words if word not in ("--device", "cuda") and not word.startswith("model")]
    given = any(word.startswith(("data=", "model=", "run.resume=")) for word in words)
    trains = "train.py" in words or words[0].endswith("bench/step.py")
    return smaller([*words, *TEXT] if trains and not given else words)


def simulated(words: list[str]) -> list[str]:
    """A command of docs/scale.md, of small sizes."""
    return on_text(words) if words[0] == "train.py" else [*words, "--shards", "20", "--ranks", "8"]


def exported(words: list[str]) -> list[str]:
    """A command of docs/export.md, on a little text, in widths that FP8 can be exported in."""
    if words[0] != "train.py" or "model=imported" in words:
        return smaller(words) if words[0].endswith("sample.py") else words
    return on_text(
        [*words, *(f"model.{key}=128" for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"))]
    )


def brief(words: list[str]) -> list[str]:
    """A command of docs/fully_fp8.md: its runs have a model of their own, and a shape that is small."""
    if "bench" in words[0]:
        return [words[0], "--length", "16", "--seeds", "1"]
    if words[0] != "train.py" or "dry_run=true" in words:
        return words
    few = {"trainer.max_steps": "2", "trainer.sequence_length": "16", "eval.batches": "1", "model.vocab_size": "512"}
    few |= {"trainer.global_batch_size": "4", "trainer.microbatch_size": "4", "model.num_layers": "2"}
    if "model=fog_mla_100m" in words:
        few |= {"model.num_dense_layers": "2", "model.hidden_size": "128", "model.intermediate_size": "128"}
    kept = [word for word in words if word.partition("=")[0] not in few]
    return [*kept, *TEXT[:3], *(f"{key}={value}" for key, value in few.items()), "logging.every=1"]


def planned(words: list[str]) -> list[str]:
    """A command of docs/parallelism.md: what is searched is searched for a small model, on the first two machines."""
    kept = any(word.startswith(("parallel.pipeline", "parallel.expert")) for word in words)  # a small model has no room
    if not words[0].endswith("plan_parallelism.py") or kept:
        return on_text(words)
    several = "--gpus", "--node-link", "--network"
    words = [
        ",".join(word.split(",")[:2]) if before in several else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    return ["model=deepseek_tiny" if word.startswith("model=") else word for word in words]


def in_lab(words: list[str]) -> list[str]:
    """A command of docs/lab.md: its long runs are cut to two steps, and all are of a small model."""
    if words[0] != "train.py" or "dry_run=true" in words:
        return words
    own = {"model", "trainer.global_batch_size", "trainer.microbatch_size", "trainer.sequence_length"}
    kept = [word for word in words if word.partition("=")[0] not in own]
    few = {"trainer.max_steps=60": "trainer.max_steps=2", "eval.at_end=64": "eval.at_end=4"}
    kept = [few.get(word, word) for word in kept]
    return on_text([*kept, "health.every=0", "health.dashboard=false"])


@pytest.fixture
def checkout(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as a user has it, with a place of its own for what commands write; prepared data is shared."""
    cache = tmp_path_factory.getbasetemp().parent / "cache_of_commands"
    cache.mkdir(exist_ok=True)
    (tmp_path / ".cache").symlink_to(cache)
    for name in ("train.py", "configs", "scripts", "docs", "src", "Makefile", "pyproject.toml", *CONSTRAINTS):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def once_each(page: str) -> list[str]:
    """The page's commands but for those that measure or print again what others do, of this page or one before it: on a
    CPU a bench script measures the same whatever its options."""
    met, kept = set(), []
    for other in PAGES[: PAGES.index(page) + 1]:
        for line in commands(other):
            bench = next((word for word in line.split() if "/bench/" in word), None)
            same = bench or (line if re.search("dry_run=true|torchrun |audit_precision", line) else f"{other}: {line}")
            if other == page and same not in met:
                kept.append(line)
            met.add(same)
    return kept


@pytest.mark.parametrize(
    ("page", "choose"),
    [(page, once_each) for page in PAGES] + [pytest.param(PAGES[2], commands, marks=pytest.mark.exhaustive)],
)
def test_commands_run(page: str, choose: Callable[[str], list[str]], checkout: Path, run_python: Run) -> None:
    same = []
    assert len(commands(page)) >= 2
    for command in choose(page):
        program, *words = shlex.split(command)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "OMP_NUM_THREADS": "1", "PROCESSES": "2"}
        if program == "python":
            cuts = {"docs/benchmarks.md": benched, "docs/export.md": exported, "docs/fully_fp8.md": brief}
            cuts |= {"docs/parallelism.md": planned, "docs/lab.md": in_lab, "docs/scale.md": simulated}
            if (line := cuts.get(page, on_text)(words)) in same:  # once it is cut
                continue
            same.append(line)
            done = run_python(*line, cwd=checkout, environment=environment)
        elif program == "torchrun":  # two processes, whatever the page says
            two = ["--standalone", "--nproc_per_node=2"]
            what = [word for word in words if not word.startswith("--nproc")]
            cut = SPLIT.get(Path(what[0]).name)
            what = [what[0], *cut] if cut else on_text([*what, "trainer.microbatch_size=2"])
            line = ["-m", "torch.distributed.run", *two, *what]
            done = run_python(*line, cwd=checkout, environment=environment)
        else:
            # make: what its targets do is what this test is part of; that they exist is all that is left to check
            line = [program, *smaller([*words, *TEXT, "trainer.microbatch_size=2"])]
            line = ["make", "-n", *words] if program == "make" else line
            more = {**os.environ, **environment}
            done = subprocess.run(line, cwd=checkout, env=more, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("page", [*PAGES, "configs/train.yaml"])
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"\b(?:src|configs|docs|scripts|tests)/[\w/.-]*\w", text)
    missing = [name for name in named if not (ROOT / name).exists() and "NAME" not in name]
    assert missing == []


def test_every_import_follows_the_arrows_of_the_diagram() -> None:
    arrows: dict[str, set[str]] = {}
    for line in (ROOT / "docs/architecture.md").read_text().splitlines():
        if " --> " in line:
            begin, ends = line.split(" --> ")
            arrows.setdefault(re.sub(r"\[.*", "", begin).strip(), set()).update(ends.split(" & "))

    def below(part: str) -> set[str]:
        return {part}.union(*(below(other) for other in arrows.get(part, ())))

    package = ROOT / "src/trainer"
    folders = {folder.name for folder in package.iterdir() if (folder / "__init__.py").exists()}
    against = set()
    for path in package.rglob("*.py"):
        part = path.relative_to(package).parts[0].replace("trainer.py", "loop").replace("build.py", "loop")
        named = re.findall(r"^ *from trainer\.(\w+)", path.read_text(), re.MULTILINE)
        others = {"loop" if name in ("trainer", "build") else name for name in named} & {*folders, "loop"}
        against |= {(part, other) for other in others if part in {*folders, "loop"} and other not in below(part)}
    assert against == set()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_readme_names_every_group_of_configs() -> None:
    (line,) = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("    configs/"))
    groups = {folder.name for folder in (ROOT / "configs").iterdir() if folder.is_dir()}
    assert groups == set(re.findall(r"\w+", line.partition(": ")[2]))


def test_make_runs_in_a_folder_with_a_space_in_its_name(tmp_path: Path) -> None:
    (folder := tmp_path / "a b").mkdir()
    for name in ("Makefile", "pyproject.toml", *CONSTRAINTS):
        (folder / name).write_text((ROOT / name).read_text())
    path = {"PATH": os.environ["PATH"]}  # not what the make that runs the tests hands on
    targets = "train", "suite", "test-elsewhere", "soak"
    command = ["make", "-n", "-o", ".venv/.installed", "-o", ".venv/.installed-test", *targets]  # as if .venv were made
    done = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True, check=True)
    first = [next(word for word in shlex.split(line) if "=" not in word) for line in done.stdout.splitlines()]
    assert len(first) >= len(targets) and all(word.startswith(".venv/bin/") for word in first), done.stdout
