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

TOKENIZER = "tokenizer.json"
FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


@dataclass(frozen=True)
class TokenizerSource:
    """Source of an export's tokenizer: a tokenizer.json and its token that ends a document, or (None) a folder that
    already has all FILES, such as an imported model."""

    path: Path
    end_of_text: str | None = None

    def check(self) -> None:
        """Raise UserError for an unusable tokenizer."""
        self.token_id()

    def token_id(self) -> int | list[int] | None:
        """Return the id of the token that ends a text, or None if an imported folder does not record it."""
        if self.end_of_text is None:
            path = self.path / FILES[3]
            return json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        from trainer.data.tokenizer import end_of_text_id, load_tokenizer

        return end_of_text_id(load_tokenizer(self.path), self.end_of_text)

    def write(self, out: Path, max_length: int) -> None:
        """Write FILES into the folder `out`. max_length: tokens that the model supports."""
        if self.end_of_text is None:
            copy_files(self.path, out)
            return
        shutil.copyfile(self.path, out / TOKENIZER)
        special = {"bos_token": self.end_of_text, "eos_token": self.end_of_text}
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
        }
        end = self.token_id()
        write_json(out / FILES[1], settings)
        write_json(out / FILES[2], special)
        write_json(out / FILES[3], {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end})


def copy_files(source: Path, target: Path) -> list[str]:
    """Copy the FILES that exist and return their names."""
    there = [name for name in FILES if (source / name).is_file()]
    for name in there:
        shutil.copyfile(source / name, target / name)
    return there


def write_json(path: Path, content: object) -> None:
    """Write JSON with indentation."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
