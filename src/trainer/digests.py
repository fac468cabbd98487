"""JSON files with a digest of their content: what decides the training is used only if unchanged.

    {"rewinds": [...], "digest": "<SHA-256 of all the rest, as JSON with sorted keys>"}

| content | place | covered by |
| --- | --- | --- |
| weights, state, config, backends, tokenizer's hash | `checkpoints/step_N/` | its `manifest.json` |
| what rewinds leave out, and their learning rate | `recovery.json` | its own digest |
| which backend serves which GEMM | `backends.json` | its own digest |
| the settings that a run resumes with, where its command line is silent | `config.yaml` | a digest in its first line |
| shards, their order, their sidecars | `prepared.json` of prepared data | its own digest, and one for each sidecar |
| tokens, the tokenizer | `train-*.bin`, `tokenizer.json` | SHA-256 in the sidecars |
| which tokens need not be read for that | `verified.json` of prepared data | its own digest; without, all are read |

`scripts/accept_edit.py` accepts a file that was edited on purpose. A file without a digest, from an older version, is
read with a warning. It must have nothing that looks like a digest: an altered `digest` key does not pass for an old
file.
"""

import hashlib
import json
import shlex
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from precision.errors import UserError
from trainer.files import replace_file, script

DIGEST = "digest"
_LENGTH = 64
_FIRST_LINE = f"# {DIGEST}: "


def accepting(path: Path) -> str:
    """Return the command that accepts an edit of a file."""
    return f"python {script('scripts/accept_edit.py')} {shlex.quote(str(path))}"


def digest_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 (hexadecimal) of a JSON object, independent of formatting and key order."""
    rest = {key: value for key, value in content.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def signed(content: dict[str, Any]) -> str:
    """Return the text of a JSON object with its digest."""
    plain = json.loads(json.dumps(content))  # as it will be read
    return json.dumps({**plain, DIGEST: digest_of(plain)}, indent=1) + "\n"


def write_signed(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object with its digest to the disk, completely or not at all. Raises OSError naming the file."""
    replace_file(path, signed(content).encode())


def read_signed(path: Path, keys: Collection[str], fix: str) -> dict[str, Any]:
    """Return the JSON object in `path`, without its digest. keys: required, others are allowed; fix: what to do if it
    is damaged.

    Raises UserError, naming the file, if it cannot be read, lacks a key or does not match its digest.
    """
    content = _read(path, fix)
    if missing := sorted(set(keys) - set(content)):
        raise UserError(f"{path}: was altered (it has no key {missing[0]}); {fix}")
    if DIGEST not in content:
        if any(isinstance(value, str) and len(value) == _LENGTH for value in content.values()):
            raise UserError(f"{path}: was altered (its digest is under another key); {fix}")
        warnings.warn(f"{path}: is from before files had digests; `{accepting(path)}` adds one", stacklevel=2)
        return content
    if content[DIGEST] != digest_of(content):
        raise _altered(path, fix)
    return {key: value for key, value in content.items() if key != DIGEST}


def stamped(text: str) -> str:
    """Return a YAML text with its digest in a comment before it, which a truncated file still has."""
    return f"{_FIRST_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def read_stamped(path: Path, fix: str) -> str:
    """Return the text in `path` without its digest. Files from before there were digests begin without a comment.

    Raises UserError, naming the file, if it cannot be read or does not match its digest.
    """
    first, _, rest = (text := _text(path, "was altered (it is not text)", fix)).partition("\n")
    if first.startswith("#") and text != stamped(rest):
        raise _altered(path, fix)
    return rest if first.startswith("#") else text


def accept_stamped(path: Path) -> None:
    """Write the digest of a YAML file as it is now. Raises UserError if it is not one."""
    import yaml

    first, _, rest = (text := _text(path, "cannot be read (not text)", "correct it")).partition("\n")
    try:
        is_section = isinstance(yaml.safe_load(text), dict)
    except yaml.YAMLError as error:
        place = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) is not None else ""
        raise UserError(f"{path}: cannot be read (not YAML{place}); correct it") from None
    if not is_section:
        raise UserError(f"{path}: cannot be read (no section of keys); correct it")
    replace_file(path, stamped(rest if first.startswith(_FIRST_LINE) else text).encode())


def accept(path: Path, **changed: Any) -> None:
    """Sign a file as it is now, with some of its keys `changed`. Raises UserError if it is not a JSON object."""
    content = {**_read(path, "correct it"), **changed}
    write_signed(path, {key: value for key, value in content.items() if key != DIGEST})


def _altered(path: Path, fix: str) -> UserError:
    accept = f"accept an edit with `{accepting(path)}`"
    return UserError(f"{path}: was altered (it does not match its digest); {fix}, or {accept}")


def _text(path: Path, no_text: str, fix: str) -> str:
    try:
        return path.read_bytes().decode()
    except ValueError:
        raise UserError(f"{path}: {no_text}; {fix}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {fix}") from None


def _read(path: Path, fix: str) -> dict[str, Any]:
    text = _text(path, "cannot be read (not JSON)", fix)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: cannot be read (not JSON); {fix}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: cannot be read (not a JSON object); {fix}")
    return content
