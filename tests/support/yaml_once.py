"""YAML that OmegaConf and yaml.safe_load read, parsed once for each text: Hydra reads the files of configs/ for each
command line, and Octet train.yaml twice, in Python, which is a seventh of what a short run takes. Importing this does
it."""

import pickle
from typing import Any

import yaml

_read, _known = yaml.load, dict[tuple[str, str], bytes]()


def load(stream: Any, Loader: Any) -> Any:
    """As yaml.load."""
    if Loader.__name__ not in ("OmegaConfLoader", "SafeLoader"):
        return _read(stream, Loader)
    text = stream.read() if hasattr(stream, "read") else stream
    if (key := (Loader.__name__, text)) not in _known:
        if text is not stream:
            stream.seek(0)  # an error names the file
        _known[key] = pickle.dumps(_read(stream, Loader))
    return pickle.loads(_known[key])


yaml.load = load
