"""What has its name is on the disk: a power cut after a rename leaves no file that is empty or cut off.

A rename may reach the disk before the bytes of what it renames. So each file is synced at its full size before it gets
its name, the folder of new names too, and the folder above after the rename.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint import Checkpointer
from trainer.files import new_folder, replace_file


class Disk:
    """What a power cut would leave: by inode, the size that a file had, or the names that a folder had, when synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[int, Any] = {}
        self.renamed: list[str] = []
        self.unsafe: list[str] = []
        sync, rename = os.fsync, os.rename

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            status = os.fstat(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").resolve()
            self.synced[status.st_ino] = sorted(os.listdir(path)) if path.is_dir() else status.st_size

        def checked(source: Any, target: Any) -> None:
            self.renamed.append(Path(target).name)
            self.unsafe += [str(path.relative_to(Path(source).parent)) for path in self.unsynced(Path(source))]
            rename(source, target)

        for module, name, function in ((os, "fsync", fsync), (os, "rename", checked), (os, "replace", checked)):
            monkeypatch.setattr(module, name, function)

    def unsynced(self, path: Path) -> list[Path]:
        """The file, or the folder and what is in it, without what would survive."""
        found = [path, *path.iterdir()] if path.is_dir() else [path]
        now = [sorted(os.listdir(each)) if each.is_dir() else each.stat().st_size for each in found]
        return [each for each, what in zip(found, now, strict=True) if self.synced.get(each.stat().st_ino) != what]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("files are known by Linux's /proc")
    return Disk(monkeypatch)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    checkpointer: Checkpointer, folder: Path, disk: Disk
) -> None:
    checkpointer.save(3, {"t": torch.ones(1000), "n": 1}, {"tokens": 5})
    checkpointer.wait()
    assert disk.renamed == ["step_00000003"] and disk.unsafe == []
    assert disk.synced[folder.stat().st_ino] == ["step_00000003"], "the new name"


def test_a_file_that_is_replaced_is_on_the_disk_before_it_has_its_name(tmp_path: Path, disk: Disk) -> None:
    for data in (b"old", [b"new ", b"pieces"]):
        replace_file(tmp_path / "config.yaml", data)
        assert disk.synced[tmp_path.stat().st_ino] == ["config.yaml"]
    assert disk.renamed == ["config.yaml"] * 2 and disk.unsafe == []
    assert (tmp_path / "config.yaml").read_bytes() == b"new pieces"


def test_a_folder_that_is_made_whole_keeps_its_names(tmp_path: Path, disk: Disk) -> None:
    with new_folder(tmp_path / "out") as partial:
        replace_file(partial / "a", b"a")
    assert disk.renamed[-1] == "out" and disk.unsafe == []
    assert disk.synced[tmp_path.stat().st_ino] == ["out"]
