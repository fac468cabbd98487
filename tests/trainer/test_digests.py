"""Files that decide what is trained are believed as they were written, or as an edit was accepted."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precision.errors import UserError
from trainer.digests import accept, accept_stamped, read_signed, write_signed

FIX = "remove it"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recovery.json"
    write_signed(path, {"rewinds": [{"lr_factor": 0.5, "windows": [[3, 7]]}]})
    return path


def test_signed_files_are_read_back(file: Path) -> None:
    assert read_signed(file, ("rewinds",), FIX) == {"rewinds": [{"lr_factor": 0.5, "windows": [[3, 7]]}]}


def test_any_flipped_bit_is_reported_or_changes_nothing(file: Path) -> None:
    whole, good = file.read_bytes(), read_signed(file, ("rewinds",), FIX)
    for bit in range(0, 8 * len(whole), 3):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            found, said = read_signed(file, ("rewinds",), FIX), ""
        except ValueError as refused:
            found, said = good, str(refused)
        assert found == good and (not said or (str(file) in said and FIX in said)), bit


def test_an_edit_is_refused_until_it_is_accepted(
    file: Path, monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., Any]
) -> None:
    content: dict[str, Any] = json.loads(file.read_text())
    content["rewinds"][0]["lr_factor"] = 0.25
    file.write_text(json.dumps(content))
    monkeypatch.chdir(file.parent)
    with pytest.raises(ValueError, match=r"was altered .*accept_edit\.py") as refused:
        read_signed(file, ("rewinds",), FIX)
    _, *advised = shlex.split(str(refused.value).split("`")[1])
    said = run_python(*advised)
    assert said.returncode == 0, said.stderr
    assert read_signed(file, ("rewinds",), FIX)["rewinds"][0]["lr_factor"] == 0.25


@pytest.mark.parametrize(
    ("text", "why"), [("lr: 1\noptim: [", "not YAML, line 2"), ("lr", "no section of keys"), ("", "no section of keys")]
)
def test_a_config_that_is_no_yaml_is_not_accepted(tmp_path: Path, text: str, why: str) -> None:
    """A resume took the checkpoint's settings instead, in spite of the edit."""
    (path := tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"config\.yaml: cannot be read \({why}\); correct it"):
        accept_stamped(path)
    assert path.read_text() == text


def test_a_file_of_before_is_read_with_a_warning_and_can_be_signed(file: Path) -> None:
    file.write_text(json.dumps({"rewinds": []}))
    with pytest.warns(UserWarning, match="from before files had digests"):
        assert read_signed(file, ("rewinds",), FIX) == {"rewinds": []}
    accept(file)
    assert read_signed(file, ("rewinds",), FIX) == {"rewinds": []}
