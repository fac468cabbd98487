"""Settings that cannot work end in one line: key, value, fix."""

import copy

import pytest
from composed import config_of, tree_of

from trainer.config.data import MixEntry
from trainer.data import DataConfig, Source, check_data


def load(name: str) -> DataConfig:
    """A file of configs/data, with the keys that a test may change."""
    return copy.deepcopy(config_of([f"data={name}"]).data)


def test_the_default_is_the_embedded_corpus() -> None:
    assert load("stdlib") == DataConfig()
    check_data(load("stdlib"), 4096)


@pytest.mark.parametrize("name", ["stdlib", "text", "files", "hf", "bins"])
def test_every_group_gives_every_key(name: str) -> None:
    assert set(tree_of([f"data={name}"])["data"]) == set(DataConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("changes", "vocab_size", "message"),
    [
        ({"source": Source.text}, 512, r"data\.path=null: .*set data\.path=PATH"),
        ({"source": Source.text, "path": ""}, 512, r"data\.path='': data\.source=text needs a folder of text files"),
        ({"source": Source.text, "path": "/no/where"}, 512, r"data\.path=/no/where: there is no such folder"),
        ({"path": "/tmp"}, 512, r"data\.path=/tmp: .*set data=text"),
        ({"validation_fraction": 0.0}, 512, r"data\.validation_fraction=0: leaves no part of stdlib for evaluation"),
        ({"validation_fraction": 1.0}, 512, r"data\.validation_fraction=1\.0: must lie between 0 and 1"),
        ({"tokenizer": "/"}, 512, r"data\.tokenizer=/: a folder without a tokenizer\.json: give a tokenizer\.json, a "),
        ({"tokenizer": "/no/tokenizer.json"}, 512, r"data\.tokenizer=/no/tokenizer\.json: there is no such file"),
        ({"tokenizer_sample_mb": 0}, 512, r"data\.tokenizer_sample_mb=0: .*at least 1"),
        ({"end_of_text": ""}, 512, r"data\.end_of_text='': .*\"data\.end_of_text='<\|endoftext\|>'\""),
        ({"cache_dir": ""}, 512, r"data\.cache_dir='': prepared data needs a folder"),
        ({"workers": 0}, 512, r"data\.workers=0: .*at least 1, or null"),
        ({"shard_mb": 0}, 512, r"data\.shard_mb=0: .*at least 1"),
        ({"source": Source.files}, 512, r"data\.path=null: data\.source=files needs a folder of files"),
        ({"source": Source.hf}, 512, r"data\.path=null: data\.source=hf needs a dataset"),
        ({"source": Source.hf, "path": "a/b/c"}, 512, r"data\.path=a/b/c: neither a folder nor a name on the hub"),
        (
            {"source": Source.hf, "path": "a/b", "validation_split": "train"},
            512,
            r"data\.validation_split=train: the text that is trained on",
        ),
        (
            {"mix": [MixEntry("a", source=Source.bins, path=__file__)]},
            512,
            r"a file, and data\.mix\[0\]\.source=bins reads .*, or read one file with data\.mix\[0\]\.source=files",
        ),
        (
            {"source": Source.text, "mix": [MixEntry("a", source=Source.stdlib, path="/no/where")]},
            512,
            r"data\.mix\[0\]\.source=stdlib finds its own folder: leave its source out, and set data=text",
        ),
        ({"source": Source.bins, "path": "/no/where"}, 512, r"data\.path=/no/where: there is no such folder"),
        ({"mix": [MixEntry("a")], "path": "/tmp"}, 512, r"data\.path=/tmp: data\.mix names the sources"),
        ({"mix": [MixEntry("a b")]}, 512, r"data\.mix\[0\]\.name=a b: is not a file name"),
        ({"mix": [MixEntry("a"), MixEntry("a")]}, 512, r"data\.mix\[1\]\.name=a: is taken"),
        ({"mix": [MixEntry("a", 1.0), MixEntry("b")]}, 512, r"data\.mix\[1\]\.weight=null: give all sources a weight"),
        ({"mix": [MixEntry("a", 0.0)]}, 512, r"data\.mix\[0\]\.weight=0\.0: must be above 0"),
        ({"mix": [MixEntry("a", source=Source.text)]}, 512, r"data\.mix\[0\]\.path=null: data\.mix\[0\]\.source=text"),
        ({"mix": [MixEntry("a"), MixEntry("b", source=Source.bins)]}, 512, r"data\.mix: bins .* go with bins only"),
        ({"mix": [MixEntry("b", 1.0, Source.bins, "/tmp")]}, 512, r"data\.mix\[0\]\.weight: bins are read whole"),
        ({}, 256, r"model\.vocab_size=256: .*set 257 to 16777216"),
        ({}, 2**24 + 1, r"model\.vocab_size=16777217: .*set 257 to 16777216"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict, vocab_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_data(DataConfig(**changes), vocab_size)
    assert "\n" not in str(error.value)
