"""The tokenizer's files of a Hugging Face folder, so that `AutoTokenizer` gives the ids that the model was trained on.

    tokenizer.json             the run's own, byte for byte
    tokenizer_config.json      the class that reads it as it is; the end-of-text token ends a text, and begins one:
    special_tokens_map.json    in training it stands between documents and before the first
    generation_config.json     the same tokens by id: where generation stops

No token is put before a text automatically: to start a document, put the end-of-text token there.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.data import TOKENIZER

SETTINGS, SPECIAL, GENERATION = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
FILES = TOKENIZER, SETTINGS, SPECIAL, GENERATION
TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"


@dataclass(frozen=True)
class TokenizerSource:
    """Source of an export's tokenizer: a tokenizer.json and its token that ends a document, or (None) the folder of an
    imported model with those of FILES that it came with."""

    path: Path
    end_of_text: str | None = None

    @property
    def has_tokenizer(self) -> bool:
        return self.end_of_text is not None or (self.path / TOKENIZER).is_file()

    def token_ids(self) -> dict[str, Any]:
        """Return the ids of the tokens that begin, end and pad a text, as in config.json (there may be several that end
        it); without those that an imported folder does not record."""
        if self.end_of_text is None:
            path = self.path / GENERATION
            recorded = json.loads(path.read_text()) if path.is_file() else {}
            return {key: recorded[key] for key in TOKEN_IDS if key in recorded}
        from trainer.data.tokenizer import end_of_text_id, load_tokenizer

        end = end_of_text_id(load_tokenizer(self.path), self.end_of_text)
        return {"bos_token_id": end, "eos_token_id": end}

    def write(self, out: Path, max_length: int) -> None:
        """Write FILES into the folder `out`. max_length: tokens that the model supports."""
        if self.end_of_text is None:
            copy_files(self.path, out)
            return
        shutil.copyfile(self.path, out / TOKENIZER)
        special = {"bos_token": self.end_of_text, "eos_token": self.end_of_text}
        how = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        ids = self.token_ids()
        write_json(out / SETTINGS, {**how, **special, "model_max_length": max_length})
        write_json(out / SPECIAL, special)
        write_json(out / GENERATION, {**ids, "pad_token_id": ids["eos_token_id"]})


def copy_files(source: Path, target: Path) -> list[str]:
    """Copy the FILES that exist and return their names."""
    there = [name for name in FILES if (source / name).is_file()]
    for name in there:
        shutil.copyfile(source / name, target / name)
    return there


def write_json(path: Path, content: object) -> None:
    """Write JSON with indentation."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
