"""Words of messages."""

import pytest

from precision.errors import counted


@pytest.mark.parametrize(("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1234, "1,234 steps")])
def test_one_is_no_plural(count: int, text: str) -> None:
    assert counted(count, "step") == text
