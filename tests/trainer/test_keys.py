"""What differs between two configs is told by key."""

from trainer.keys import changes, flat


def test_nested_mappings_become_keys_joined_by_dots() -> None:
    tree = {"a": {"b": 1, "c": {"d": [2, {"e": 3}]}}, "f": None}
    assert flat(tree) == {"a.b": 1, "a.c.d": [2, {"e": 3}], "f": None}


def test_keys_that_both_have_and_that_differ_are_told_with_both_values() -> None:
    before = "optim: {lr: 0.1, clip: null, schedule: linear}\nrun: {resume: never}\nold: 1\n"
    now = "optim: {lr: 0.2, clip: 1.0, schedule: cosine}\nrun: {resume: auto}\nnew: 2\n"
    want = 'optim.lr 0.1 -> 0.2, optim.clip null -> 1.0, optim.schedule "linear" -> "cosine"'
    assert changes(before, now) == want
    assert changes(before, now, most=1) == "optim.lr 0.1 -> 0.2, and 2 more"
    assert changes(now, now) == "" == changes("optim: {lr", now)
