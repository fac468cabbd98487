"""The tokenizer's files of a Hugging Face folder, so that `AutoTokenizer` gives the ids that the model was trained on.

    tokenizer.json             the run's own, byte for byte
    tokenizer_config.json      the class that reads it as it is; the end-of-text token ends a text, and begins one:
    special_tokens_map.json    in training it stands between documents and before the first
    generation_config.json     the same tokens by id: where generation stops

Nothing is put before a text by itself: who wants what a document's beginning has, puts the end-of-text token there.
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
    """Where an export takes its tokenizer from: a tokenizer.json and the token that ends a document in it, or (None) a
    folder that has all FILES already, as an imported model does."""

    path: Path
    end_of_text: str | None = None

    def check(self) -> None:
        """UserError for what cannot be used."""
        self.token_id()

    def token_id(self) -> int | list[int] | None:
        """Id of the token that ends a text; None if an imported folder does not say."""
        if self.end_of_text is None:
            path = self.path / FILES[3]
            return json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        from trainer.data.tokenizer import end_of_text_id, load_tokenizer

        return end_of_text_id(load_tokenizer(self.path), self.end_of_text)

    def write(self, out: Path, max_length: int) -> None:
        """Write FILES into the folder `out`. max_length: tokens that the model is meant for."""
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
    """Copy those of FILES that are there; their names."""
    there = [name for name in FILES if (source / name).is_file()]
    for name in there:
        shutil.copyfile(source / name, target / name)
    return there


def write_json(path: Path, content: object) -> None:
    """JSON as people read it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
