"""The table of measured rates: what it says about shapes that were and were not measured, and how it is written."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from precision.rates import Entry, RateTable, load_rates, record
from precision.rates.table import FOLDER

SMALL = Entry("linear", "current/row", "fp32", (1024, 2048, 1), 4096, {"bf16": 1.0, "cuda": 0.9})
LARGE = Entry("linear", "current/row", "fp32", (8192, 2048, 1), 16384, {"bf16": 5.0, "cuda": 3.0})
EXPERTS = Entry("grouped", "current/row", "fast", (2816, 2048, 64), 98304, {"bf16": 6.0, "cuda": 4.0})
TABLE = RateTable([SMALL, LARGE, EXPERTS])


def test_the_nearest_measured_shape_of_the_same_kind_and_scaling_answers() -> None:
    def nearest(n: int, rows: int | None, kind: str = "linear", scaling: str = "current/row") -> Entry | None:
        return TABLE.nearest(kind, scaling, "fp32", (n, 2048, 64 if kind == "grouped" else 1), rows, ("cuda",))

    assert nearest(1024, 4096) is SMALL
    assert nearest(2048, 4096) is SMALL
    assert nearest(4096, 16384) is LARGE
    assert nearest(4096, None) is LARGE  # log distance: a factor 2 against a factor 4
    assert nearest(2816, 1024, kind="grouped") is EXPERTS
    assert nearest(1024, 4096, scaling="delayed/tensor") is None
    assert TABLE.nearest("linear", "current/row", "fp32", (1024, 2048, 1), 4096, ("transformer_engine",)) is None


def test_an_entry_of_the_same_accumulation_comes_first() -> None:
    fast = Entry("linear", "current/row", "fast", (1024, 2048, 1), 4096, {"bf16": 1.0, "cuda": 0.8})
    table, at = RateTable([fast, LARGE]), ((1024, 2048, 1), 4096, ("cuda",))
    assert table.nearest("linear", "current/row", "fast", *at) is fast
    assert table.nearest("linear", "current/row", "fp32", *at) is LARGE
    assert RateTable([fast]).nearest("linear", "current/row", "fp32", *at) is fast


def test_a_recorded_measurement_is_read_back(tmp_path: Path) -> None:
    lines = [record("linear", "delayed/tensor", "fast", (8192, 2048, 1), 16384, {"cuda": 1.23456, "bf16": 2.0})]
    times = {"bf16": 10.0, "transformer_engine": 20.5}
    lines += [record("grouped", "current/block", "fp32", (2816, 2048, 64), 98304, times)]
    assert lines[0] == (
        "  - {kind: linear, scaling: delayed/tensor, accumulation: fast, shape: [8192, 2048, 1], rows: 16384, "
        "ms: {bf16: 2.0, cuda: 1.235}}"
    )
    head = "gpu: NVIDIA X\ncommand: python bench.py\ncommit: abc\nentries:\n"
    (tmp_path / "x.yaml").write_text(head + "\n".join(lines) + "\n")
    table = load_rates("NVIDIA X", tmp_path)
    assert len(table) == 2 and table.runs == {"bf16", "cuda", "transformer_engine"}
    assert len(load_rates("NVIDIA Y", tmp_path)) == 0


def test_entries_that_are_no_measurements_are_refused(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"kind": "conv"}, {"scaling": "row"}, {"rows": 0}, {"accumulation": "bf16"}]
    for change in [*changes, {"ms": {"cuda": 0.0}}, {"ms": {"tea": 1.0}}]:
        arguments: dict[str, Any] = {
            "kind": "linear",
            "scaling": "current/row",
            "accumulation": "fp32",
            "shape": (16, 16, 1),
            "rows": 1,
            "ms": {"cuda": 1.0},
        }
        with pytest.raises(ValueError, match=next(iter(change))):
            record(**(arguments | change))
    (tmp_path / "x.yaml").write_text("gpu: NVIDIA X\nentries:\n  - {kind: linear}\n")
    with pytest.raises(ValueError, match=r"x.yaml: .*correct the entry"):
        load_rates("NVIDIA X", tmp_path)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_tables_of_the_repository_are_whole(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert set(content) == {"gpu", "measured", "entries"}
    assert path.stem == content["gpu"].lower().replace(" ", "_")
    assert len(load_rates(content["gpu"])) == len(content["entries"])
    measured = {one["kind"] for one in content["measured"] if one["command"] and one["commit"]}
    assert measured == {entry["kind"] for entry in content["entries"]}  # no figure without its command


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_the_recipes_put_in_fp8_is_faster_there(path: Path) -> None:
    """Or the table is older than the kernels: never_slower would take their place from them. Of Moonlight and V3 only
    attn.kv_b is slower, in rows and blocks; of the models of 65,536 rows small linears are."""
    slow = [
        entry for entry in yaml.safe_load(path.read_text())["entries"] if entry["ms"]["cuda"] >= entry["ms"]["bf16"]
    ]
    large = [(entry["scaling"], entry["shape"]) for entry in slow if entry["rows"] != 65_536]
    small = [entry for entry in slow if entry["rows"] == 65_536]
    if path.stem == "nvidia_h200":
        assert large[:-1] == [("current/block", [4096, 512, 1])]  # attn.kv_b, which fp8_block leaves in BF16
    rest = [(scaling, shape) for scaling, shape in large if scaling == "delayed/tensor" or shape[1] != 512]
    assert rest == [("delayed/tensor", [128, 128, 1])]  # attention at 128/128
    largest = {"delayed/tensor": 768, "current/row": 1024, "current/block": 1024}
    assert all(e["kind"] == "linear" and min(e["shape"][:2]) <= largest[e["scaling"]] for e in small)
