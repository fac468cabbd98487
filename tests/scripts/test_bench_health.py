"""The bench of what health costs runs to its end and counts what is on."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
SMALL = [
    *("model.vocab_size=320", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.kv_lora_rank=16", "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16"),
    *("model.intermediate_size=48", "model.moe_intermediate_size=16", "model.num_experts=4", "model.num_mtp_layers=0"),
    *("trainer.global_batch_size=2", "trainer.microbatch_size=2", "trainer.sequence_length=24", "trainer.device=cpu"),
    *("data=text", "data.path=.", "health.shadow_every=200"),
]


def test_what_health_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["health.py", "fp8_block", "--steps", "2", "--json", str(out), *SMALL])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(BENCH)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / "health.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line}
    assert [rows[name][3] for name in ("line", "sampling", "shadow")] == ["10", "10", "200"]
    shares = [float(rows[name][4].rstrip("%")) for name in ("line", "sampling", "shadow")]
    assert "health takes" in said and shares[0] > 0 and shares[2] > 0  # sampling is a difference of two steps
    results = json.loads(out.read_text())["results"]
    assert [r["name"] for r in results] == ["step", "sampled", "line", "shadow"] and len(results[0]["seconds"]) == 2
