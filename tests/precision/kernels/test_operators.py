"""Our operators as torch.compile sees them."""

import pytest
import torch

pytest.importorskip("precision.backends.cuda", reason="Triton is missing")  # registers them


def test_no_operator_changes_two_rows_of_a_buffer() -> None:
    """Of the arena, or of the kurtosis sums: see `kernels.ffn_ops.ffn_backward`."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("octet::")]
    assert "octet::ffn_backward" in {schema.name for schema in schemas}
    for schema in schemas:
        changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert len([name for name in changed if name != "kurtosis"]) <= 1, (schema.name, changed)
