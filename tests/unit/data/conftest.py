"""A toy tokenizer whose ids can be checked by eye, and corpora made with it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.helpers.documents import BOS, EOS, numbered_documents, word


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tokenizer folder: words w2 ... w99 split at white space; ids 0 and 1 are BOS and EOS."""

    def make(kind: str = "plain", words: int = 98) -> Path:
        folder = tmp_path_factory.mktemp(f"tokenizer-{kind}")
        vocab = {"<bos>": BOS, "<eos>": EOS} | {word(i): i for i in range(2, words + 2)}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=word(2)))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(["<bos>", "<eos>"])
        settings: dict[str, object] = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}
        if kind == "no bos":
            settings["bos_token"] = None
        elif kind == "one token for both":
            settings["bos_token"] = "<eos>"
        elif kind == "adds both itself":
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
            )
        elif kind == "pads and truncates":
            tokenizer.enable_padding(pad_id=BOS, pad_token="<bos>")
        elif kind == "no eos":
            settings["eos_token"] = None
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return make


@pytest.fixture(scope="session")
def tokenizer_dir(make_tokenizer: Callable[..., Path]) -> Path:
    """The plain one."""
    return make_tokenizer()


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """300 toy documents as text."""
    file = tmp_path / "input.txt"
    file.write_text("\n\n".join(numbered_documents(300)) + "\n")
    return file


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is remembered which files were read whole."""
    folder = tmp_path_factory.mktemp("cache") / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
