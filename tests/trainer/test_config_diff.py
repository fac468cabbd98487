"""What differs between two configs is told by key."""

from pathlib import Path

from trainer.config_diff import changes, configs_before, flat


def test_nested_mappings_become_keys_joined_by_dots() -> None:
    tree = {"a": {"b": 1, "c": {"d": [2, {"e": 3}]}}, "f": None}
    assert flat(tree) == {"a.b": 1, "a.c.d": [2, {"e": 3}], "f": None}


def test_keys_that_both_have_and_that_differ_are_told_with_both_values() -> None:
    before = "optim: {lr: 0.1, clip: null, schedule: linear}\nrun: {resume: never}\nold: 1\n"
    now = "optim: {lr: 0.2, clip: 1.0, schedule: cosine}\nrun: {resume: auto}\nnew: 2\n"
    want = 'optim.lr 0.1 -> 0.2, optim.clip null -> 1.0, optim.schedule "linear" -> "cosine"'
    assert changes(before, now) == want
    assert changes(before, now, most=1) == "optim.lr 0.1 -> 0.2, and 2 more"
    assert changes(before, now, but=["run", "optim"]) == ""
    assert changes(now, now) == "" == changes("optim: {lr", now)


def test_configs_that_a_run_has_gone_on_from_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    names = ["config.before_step_00000200", "config.before_step_00000200-2", "config.before_step_100000000", "config"]
    for name in names:
        (tmp_path / f"{name}.yaml").touch()
    assert {step: path.stem for step, path in configs_before(tmp_path).items()} == {200: names[0], 100000000: names[2]}
