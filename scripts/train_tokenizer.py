"""Train a byte-level BPE on any source of text.

    python scripts/train_tokenizer.py data=files data.path=FOLDER --out tokenizer.json --vocab-size 32768
    python train.py data=files data.path=FOLDER data.tokenizer=tokenizer.json model.vocab_size=32768

It is trained on data.tokenizer_sample_mb megabytes of the text that is not held out. Without a tokenizer, train.py and
prepare_data.py train one themselves; a separate one can be used for several corpora.
"""

import os
import sys
from pathlib import Path

from precision.errors import UserError
from trainer.files import replace_file
from trainer.launch.command_line import Parser, guarded
from trainer.launch.composition import compose


def run() -> None:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vocab-size", type=int)
    own, sys.argv[1:] = parser.parse_known_args()
    if own.help:
        print(str(__doc__).strip())
        return
    if own.out is None:
        raise UserError("--out: missing; name the file to write, such as --out tokenizer.json")
    is_other = own.out.exists() and not own.out.is_file()  # a folder, or a device, which the file would replace
    if is_other or not os.access(own.out.absolute().parent, os.W_OK | os.X_OK):
        raise UserError(f"--out={own.out}: cannot be a file there; name one in a folder that can be written")
    from trainer.config import load
    from trainer.config.data import LARGEST_VOCABULARY, SMALLEST_VOCABULARY, DataConfig
    from trainer.config.paths import as_typed
    from trainer.data import new_tokenizer
    from trainer.data.progress_bars import bars

    if own.vocab_size is not None and not SMALLEST_VOCABULARY <= own.vocab_size <= LARGEST_VOCABULARY:
        why = "entries of a byte-level tokenizer, of which 256 are the bytes and one ends a text"
        raise UserError(f"--vocab-size={own.vocab_size}: {why}; set {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}")
    jobs = compose(Path(__file__).resolve().parents[1] / "configs")
    if len(jobs) > 1:
        raise UserError(f"--out={own.out}: one file for {len(jobs)} configs; train one at a time")
    config = load(jobs[0].tree)
    if config.data.tokenizer is not None:
        raise UserError(f"data.tokenizer={config.data.tokenizer}: a new one is trained; set data.tokenizer=null")
    wanted = own.vocab_size or config.model.vocab_size
    with bars() as show:
        tokenizer = new_tokenizer(config.data, wanted, show)
    replace_file(own.out, tokenizer.to_str(pretty=True).encode())
    entries = tokenizer.get_vocab_size()
    fewer = f" of {wanted:,}: the text has no more pairs to merge" if entries < wanted else ""
    words = [as_typed("data.tokenizer", str(own.out)), f"model.vocab_size={entries}"]
    if config.data.end_of_text != DataConfig.end_of_text:
        words.append(as_typed("data.end_of_text", config.data.end_of_text))
    print(f"{own.out}: {entries:,} entries{fewer}; use it with {' '.join(words)}")


if __name__ == "__main__":
    sys.exit(guarded(run))
