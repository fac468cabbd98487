"""Differences between two configs are reported by key."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from composed import config_of

from trainer.config_diff import HIDDEN, changes, configs_before, flat, printable, printable_override, without_secrets
from trainer.launch.agreement import agree


def test_nested_mappings_become_keys_joined_by_dots() -> None:
    tree = {"a": {"b": 1, "c": {"d": [2, {"e": 3}]}}, "f": None}
    assert flat(tree) == {"a.b": 1, "a.c.d": [2, {"e": 3}], "f": None}


def test_keys_that_differ_are_reported_with_both_values() -> None:
    before = "optim: {lr: 0.1, clip: null, schedule: linear}\nrun: {resume: never}\nold: 1\n"
    now = "optim: {lr: 0.2, clip: 1.0, schedule: cosine}\nrun: {resume: auto}\nnew: 2\n"
    want = 'optim.lr 0.1 -> 0.2, optim.clip null -> 1.0, optim.schedule "linear" -> "cosine"'
    assert changes(before, now) == want
    assert changes(before, now, most=1) == "optim.lr 0.1 -> 0.2, and 2 more"
    assert changes(before, now, but=["run", "optim"]) == ""
    assert changes(now, now) == ""
    assert changes("debug: {value: .nan, steps: 1}", "debug: {value: .nan, steps: 1.0}") == ""
    before, now = "trainer: {phases: []}", "trainer: {phases: [{until: 9, lr: null}, {until: null}]}"
    assert changes(before, now) == 'trainer.phases [] -> [{"until": 9}, {}]', "keys that are not set are left out"


@pytest.mark.parametrize(
    "text", ["optim: {lr", b"\xff", "a: &a [1]\nb: [*a, *a]\n", "[" * 5000, "a: !!python/name:os.x", "", "[]"]
)
def test_a_config_that_cannot_be_read_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(yaml.YAMLError):
        changes(text, "optim: {lr: 1}\n")


def test_configs_that_a_run_has_gone_on_from_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    names = ["config.before_step_00000200", "config.before_step_00000200-2", "config.before_step_100000000", "config"]
    for name in names:
        (tmp_path / f"{name}.yaml").touch()
    assert {step: path.stem for step, path in configs_before(tmp_path).items()} == {200: names[0], 100000000: names[2]}


@pytest.mark.parametrize("key", ["health.alerts.webhook", "health.alerts.command", "hub.token", "wandb.api_key"])
def test_secrets_have_no_value_to_print(key: str) -> None:
    assert printable(key, "PRIVATE") == HIDDEN and printable(key, None) is None
    section, _, name = key.rpartition(".")
    assert without_secrets({section: {name: "PRIVATE"}}) == {section: {name: HIDDEN}}


@pytest.mark.parametrize(
    "section",
    [
        "{webhook: %s, every: 5}",
        "{webhook: \"%s\", command: '%s'}",
        "{alerts: {command: %s}}",
        '{"webhook": %s',
        "{ Hf_Token : %s}",
    ],
)
def test_secrets_in_a_section_are_not_shown(section: str) -> None:
    shown = printable_override(f"+health.alerts={section.replace('%s', 'https://PRIVATE')}")
    assert "PRIVATE" not in shown and HIDDEN in shown and shown.startswith("+health.alerts={")
    assert printable_override("debug.inject={step: 3, num_experts_per_token: 2}").endswith(
        "{step: 3, num_experts_per_token: 2}"
    )


@pytest.mark.parametrize("key", ["data.tokenizer", "model.num_experts_per_token", "tokens", "data.tokenizer_sample_mb"])
def test_settings_that_are_no_secrets_are_printed(key: str) -> None:
    assert printable(key, "plain") == "plain"


def test_ranks_that_differ_in_a_secret_do_not_print_it() -> None:
    config = config_of([])
    alerts = replace(config.health.alerts, webhook="https://example.org/PRIVATE1")
    ours = replace(config, health=replace(config.health, alerts=alerts))
    key = "health.alerts.webhook"

    class TwoRanks:
        """The other rank has another webhook."""

        is_distributed = True

        def gather(self, what: Any) -> list[Any]:
            other = "another" if isinstance(what, str) else {**what, key: "https://example.org/PRIVATE2"}
            return [what, other]

    with pytest.raises(ValueError, match=key) as refused:
        agree(TwoRanks(), ours, "plan")  # pyright: ignore[reportArgumentType]
    assert "PRIVATE" not in str(refused.value)
