"""Which files are documents, and which side of the split each is on."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.data import source_configs
from trainer.data import DataConfig
from trainer.data import corpus as corpus_module
from trainer.data.corpus import Corpus, Document, choose_held_out, read_pieces, scan, unreadable_reason


def listed(data: DataConfig) -> Corpus:
    return scan(*source_configs(data))


def paths(data: DataConfig) -> list[str]:
    return [document.path for document in listed(data).documents]


def test_embedded_corpus_is_the_standard_library_without_packages_and_tests() -> None:
    found = paths(DataConfig())
    assert {"argparse.py", "email/message.py", "json/decoder.py"} <= set(found)
    folders = {folder for path in found for folder in path.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def test_documents_are_sorted_matching_nonempty_files(make_config: Callable[..., DataConfig], tmp_path: Path) -> None:
    for name in ("b.txt", "a/x.txt", "a/deep/y.txt", "a.md", ".hidden.txt", ".git/z.txt", "test/t.txt"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text("some text")
    (tmp_path / "d" / "empty.txt").touch()
    (tmp_path / "d" / "dangling.txt").symlink_to("nowhere.txt")
    data = make_config(tmp_path / "d", glob="**/*.txt", exclude=["te*"])
    assert paths(data) == ["a/deep/y.txt", "a/x.txt", "b.txt"]
    assert paths(replace(data, glob="*.txt")) == ["b.txt"]
    assert paths(replace(data, glob="a/*")) == ["a/x.txt"]
    assert paths(replace(data, glob="a/**")) == ["a/deep/y.txt", "a/x.txt"]
    assert paths(replace(data, exclude=[], glob="**/t.txt")) == ["test/t.txt"]


def test_no_match_names_the_glob_and_the_folder(make_config: Callable[..., DataConfig], own_corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.glob=\*\.md: no file with text matches below .*corpus"):
        listed(make_config(own_corpus, glob="*.md"))


def test_fingerprint_follows_names_sizes_and_times(make_config: Callable[..., DataConfig], own_corpus: Path) -> None:
    data = make_config(own_corpus)
    seen = [listed(data).fingerprint]
    assert listed(data).fingerprint == seen[0]
    victim = min(own_corpus.glob("*.py"))
    times = victim.stat().st_mtime_ns
    os.utime(victim, ns=(times, times + 1))
    seen.append(listed(data).fingerprint)
    victim.write_bytes(victim.read_bytes() + b"#")
    os.utime(victim, ns=(times, times + 1))
    seen.append(listed(data).fingerprint)
    victim.rename(victim.with_name("renamed.py"))
    seen.append(listed(data).fingerprint)
    assert len(set(seen)) == 4


names = st.sets(st.text("abcdef/._", min_size=1, max_size=8), min_size=2, max_size=60)


@given(names, st.floats(0.01, 0.6))
def test_a_choice_does_not_depend_on_other_files(names: set[str], fraction: float) -> None:
    documents = [Document(name, 1, 0) for name in sorted(names)]
    first = min(documents, key=lambda document: document.position)
    assert choose_held_out(documents, fraction) == [d for d in documents if d.position < fraction or d is first]


def test_split_is_the_same_on_every_machine() -> None:
    positions = [round(Document(name, 1, 0).position, 6) for name in ("argparse.py", "json/decoder.py", "é.py")]
    assert positions == [0.786127, 0.231174, 0.379076]


@given(st.text(alphabet="añ∑\n\r\t x\ufeff", max_size=60), st.integers(1, 7), st.integers(1, 9))
def test_pieces_join_to_the_text_without_its_byte_order_mark(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece: int, most: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "PIECE_BYTES", piece)
        patch.setattr(corpus_module, "LONGEST_LINE", most)
        pieces = list(read_pieces(path, 0, len(text.encode())))
    assert "".join(pieces) == text.removeprefix("\ufeff")
    for each in pieces[:-1]:  # a character that is cut, or the mark, shifts an end by some bytes
        assert each.endswith("\n") or piece + most - 6 <= len(each.encode()) <= piece + most + 3


def test_only_utf8_counts_as_text(tmp_path: Path) -> None:
    cut_off = "cut off within a character"
    for number, (content, wrong) in enumerate(
        [
            (b"plain", None),
            ("ünïcode".encode(), None),
            ("é a".encode("latin-1"), ("not UTF-8 text", "byte 0 in line 1")),
            (b"a\n\xe2\x88", (cut_off, "byte 2 in line 2")),
            (
                ("a" * 999 + "\n").encode() * 1048 + b"a" * 574 + b"\xe2\x88a",
                ("not UTF-8 text", f"byte {2**20 - 2} in line 1049"),
            ),
        ]
    ):
        path = tmp_path / str(number)
        path.write_bytes(content)
        assert unreadable_reason(path) == wrong
    assert unreadable_reason(tmp_path) == ("cannot be read: Is a directory", "")


def test_a_folder_in_which_nothing_can_be_read_is_named(
    make_config: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(top: Path, onerror: Callable[[OSError], None], **_: bool):
        onerror(PermissionError(13, "Permission denied", str(top)))
        yield from ()

    monkeypatch.setattr(corpus_module.os, "walk", walk)
    with pytest.raises(
        ValueError, match=r"data\.path=/.*: no text can be read; \.: a folder that cannot be listed: Perm"
    ):
        listed(make_config(tmp_path))


def test_folders_behind_links_are_read_once(make_config: Callable[..., DataConfig], tmp_path: Path) -> None:
    root, big = tmp_path / "root", tmp_path / "big"
    for name in ("root/own/a.txt", "root/.store/b.txt", "root/own/later/e.txt", "big/wiki/c.txt", "big/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    for name, to in {"again": root / "own", "hidden": root / ".store", "linked": big, "wiki": big / "wiki"}.items():
        (root / name).symlink_to(to)
    (root / "own" / "earlier").symlink_to(root / "own" / "later")
    (big / "back").symlink_to(root)  # loops
    (big / "up").symlink_to(tmp_path)
    expected = ["hidden/b.txt", "linked/d.txt", "linked/wiki/c.txt", "own/a.txt", "own/later/e.txt"]
    assert paths(make_config(root, glob="**/*.txt")) == expected


def test_links_to_nothing_are_missing_and_part_of_the_fingerprint(
    make_config: Callable[..., DataConfig], tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.py").write_text("some text")
    whole = listed(make_config(tmp_path / "d"))
    assert whole.missing == ()
    (tmp_path / "d" / "b.py").symlink_to("nowhere")
    (tmp_path / "d" / "other.txt").symlink_to("nowhere")  # not asked for
    broken = listed(make_config(tmp_path / "d"))
    assert broken.missing == (("b.py", "a dangling link: No such file or directory"),)
    assert broken.documents == whole.documents and broken.fingerprint != whole.fingerprint
