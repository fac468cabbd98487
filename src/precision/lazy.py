"""Lazy package imports: a name is imported at its first use, so that a config is checked before torch is imported.

`__init__.pyi` beside a package's `__init__.py` lists its names, for type checkers and for `attach` alike (PEP 562).
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of a package, from the `from MODULE import NAME as NAME` lines of its stub."""
    stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi")
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    home = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(home), get
