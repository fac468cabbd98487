"""scripts/prepare_data.py prepares what the command line names, and says in one line what is wrong with it."""

import errno
import io
import os
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from trainer.data import DataConfig, prepare
from trainer.data.progress_bars import bars

SCRIPT = Path(__file__).parents[3] / "scripts" / "prepare_data.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_it_prepares_a_folder_of_text(own_corpus: Path, tmp_path: Path, run_python: Run) -> None:
    result = run_python(
        SCRIPT, "data=text", f"data.path={own_corpus}", "data.glob=**/*.py", "model.vocab_size=300", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "prepared in" in result.stdout
    assert "tokenizer: 300 entries" in result.stdout
    (folder,) = [path for path in (tmp_path / ".cache" / "data").iterdir() if path.is_dir()]
    assert (folder / "train.bin").is_file()


def test_a_mistake_ends_in_one_line_and_writes_nothing(tmp_path: Path, run_python: Run) -> None:
    result = run_python(SCRIPT, "data=text", "data.path=nowhere", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == ("octet: error: data.path=nowhere: there is no such folder or file: give an existing one\n")
    assert not list(tmp_path.iterdir())


def test_prepared_text_is_not_prepared_again(tmp_path: Path, run_python: Run) -> None:
    result = run_python(SCRIPT, "data=bins", "data.path=x", "--out", "y", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("octet: error: --out=y: data.source=bins is prepared already; leave --out out")


def test_a_folder_that_no_run_could_name_is_refused_before_anything_is_written(tmp_path: Path, run_python: Run) -> None:
    result = run_python(SCRIPT, "--out", os.fsdecode(b"data\xff"), cwd=tmp_path)
    assert result.returncode == 2
    message = "--out=data\\udcff: not UTF-8, as data.path of a run has to be; choose another folder"
    assert result.stderr == f"octet: error: {message}\n"
    assert not list(tmp_path.iterdir())


def test_a_lost_output_does_not_end_the_preparation(own_corpus: Path, make_config: Callable[..., DataConfig]) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with redirect_stdout(Full()) as output, bars() as show:
        assert prepare(make_config(own_corpus), 512, show).built
    assert output.getvalue() == "training the tokenizer\npacking the text\n"
