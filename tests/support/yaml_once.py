"""YAML that OmegaConf reads, parsed once for each text: Hydra reads the files of configs/ for each command line, in
Python, which is a seventh of what a short run takes. Importing this does it."""

import pickle
from typing import Any

import yaml

_read, _known = yaml.load, dict[str, bytes]()


def load(stream: Any, Loader: Any) -> Any:
    """As yaml.load."""
    if Loader.__name__ != "OmegaConfLoader":
        return _read(stream, Loader)
    text = stream.read() if hasattr(stream, "read") else stream
    if text not in _known:
        if text is not stream:
            stream.seek(0)  # an error names the file
        _known[text] = pickle.dumps(_read(stream, Loader))
    return pickle.loads(_known[text])


yaml.load = load
