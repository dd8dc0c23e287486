"""The bundled text and tokenizer are what their notes say, and can be rebuilt."""

import gzip
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from torchtitan_diloco import assets
from torchtitan_diloco.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def text() -> str:
    return gzip.decompress(assets.resolve("bundled:kjv").read_bytes()).decode("ascii")


@pytest.fixture(scope="module")
def build_assets():
    spec = importlib.util.spec_from_file_location("build_assets", ROOT / "scripts" / "build_assets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_holds_all_chapters_and_verses(text: str) -> None:
    documents = text.rstrip("\n").split("\n\n")
    assert len(documents) == 1189
    assert sum(len(document.split("\n")) - 1 for document in documents) == 31_102
    assert documents[0].startswith("Genesis 1\nIn the beginning God created the heaven and the earth.\n")
    assert documents[-1].endswith("\nThe grace of our Lord Jesus Christ be with you all. Amen.")


def test_the_tokenizer_is_rebuilt_from_the_text_exactly(text: str, build_assets) -> None:
    shipped = json.loads((assets.resolve("bundled:bpe2048") / "tokenizer.json").read_text())
    rebuilt = json.loads(build_assets.train_tokenizer(text).to_str())
    assert len(shipped["model"]["vocab"]) == 2048
    assert rebuilt["model"]["vocab"] == shipped["model"]["vocab"]
    assert rebuilt["model"]["merges"] == shipped["model"]["merges"]


@pytest.mark.skipif(shutil.which("bible") is None, reason="needs the Debian package bible-kjv")
def test_the_text_is_rebuilt_from_the_debian_package_exactly(text: str, build_assets) -> None:
    assert build_assets.build_text(build_assets.read_verses()) == text


def test_torchtitan_loads_the_tokenizer_and_any_text_survives_it() -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(assets.resolve("bundled:bpe2048")))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.get_vocab_size()) == (0, 1, 2048)
    sample = "And it came to pass \u2014 \u65e5\u672c\u8a9e, \U0001f600!\n\t  tabs"
    ids = tokenizer.encode(sample, add_bos=True, add_eos=True)
    assert ids[0] == 0 and ids[-1] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == sample


def test_licence_notes_lie_beside_the_assets() -> None:
    for note in ("kjv/LICENSE.md", "bpe2048/LICENSE.md"):
        assert "public domain" in (Path(assets.__file__).parent / note).read_text()


def test_only_bundled_names_are_looked_up_in_the_package() -> None:
    assert assets.resolve("data/kjv") == Path("data/kjv")
    with pytest.raises(UserError, match="bundled:bpe2048, bundled:kjv"):
        assets.resolve("bundled:other")
