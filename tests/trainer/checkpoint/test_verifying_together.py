"""Ranks verify a checkpoint together: each reads its share of the files, and all agree on the result.

Two ranks run this file as a program, over gloo.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from precision.errors import UserError
from trainer.checkpoint import Verify, manifest, newest_checkpoint, verify_on_all_ranks
from trainer.checkpoint.manifest import STATE, write_file, write_manifest
from trainer.launch.liveness.rank_group import RankGroup
from trainer.launch.world import World, init

NAMES = [f"rank{rank:05d}.safetensors" for rank in range(4)]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks watch each other through /proc")


def save(folder: Path, step: int) -> Path:
    """What stands for a checkpoint: files of other sizes, and the step."""
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    texts = {**{name: name * (index + 1) for index, name in enumerate(NAMES)}, STATE: json.dumps({"step": step})}
    write_manifest(path, {name: write_file(path / name, text) for name, text in texts.items()})
    return path


def damage(path: Path, name: str) -> None:
    content = bytearray((path / name).read_bytes())
    content[3] ^= 1
    (path / name).write_bytes(content)


def scene(world: World, out: Path) -> dict[str, Any]:
    """The newest whole checkpoint of three, of which the newest are damaged, in a file of each rank."""
    folder, events, read = out.parent / "checkpoints", [], []
    if world.is_first:
        for step in (1, 2, 3, 4):
            save(folder, step)
        damage(folder / "step_00000004", NAMES[-1])
        damage(folder / "step_00000003", NAMES[-2])
        (folder / "step_00000002").rename(folder / "step_00000005")
    world.barrier()
    plain = manifest._sha256
    manifest._sha256 = lambda path: (read.append(f"{path.parent.name}/{path.name}"), plain(path))[1]
    found = verify_on_all_ranks(
        world,
        lambda check: newest_checkpoint(
            folder, lambda kind, step, message, **_: events.append((step, message)), check=check
        ),
        "scene",
    )
    os.chdir(folder if world.is_first else out.parent)
    unseen = verify_on_all_ranks(world, lambda check: refusal(check, Path("step_00000001")), "unseen")
    return {"found": world.gather(str(found)), "read": world.gather(read), "events": events, "unseen": unseen}


def refusal(check: Verify, path: Path) -> tuple[str, str]:
    with pytest.raises(UserError) as error:
        check(path)
    return error.type.__name__, str(error.value)


def test_each_rank_reads_its_share_and_all_pass_over_what_one_finds_damaged(
    ask_ranks: Callable[..., dict[int, Any]],
) -> None:
    said = ask_ranks(__file__, [2])[2]
    assert [Path(found).name for found in said["found"]] == ["step_00000001"] * 2
    ours, theirs = map(set, said["read"])
    assert not ours & theirs
    assert {name for name in ours | theirs if "00000001" in name} == {f"step_00000001/{n}" for n in [*NAMES, STATE]}
    assert [step for step, _ in said["events"]] == [5, 4, 3]
    whys = ["holds step 2 under the name of step 5", f"4/{NAMES[-1]} was altered", f"3/{NAMES[-2]} was altered"]
    assert all(why in message for why, (_, message) in zip(whys, said["events"], strict=True))
    kind, message = said["unseen"]  # by one of them: it is not damaged
    assert kind == "UserError" and message.startswith("step_00000001: rank 1 does not see this checkpoint (/")


def main() -> None:
    rank_group = RankGroup()
    rank_group.join(os.environ)
    world = init(torch.device("cpu"), rank_group, 60)
    said = scene(world, Path(sys.argv[1]))
    if world.is_first:
        Path(sys.argv[1]).write_text(json.dumps(said))
    rank_group.leave()


if __name__ == "__main__":
    main()
