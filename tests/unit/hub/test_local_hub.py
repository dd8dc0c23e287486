"""The hub that `run` starts: on loopback, where the certificate for the world's address is of no use."""

from pathlib import Path

import pytest

from torchtitan_diloco.cli.local import server
from torchtitan_diloco.cli.local.meeting import meeting_place
from torchtitan_diloco.cli.overrides import split_overrides
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError


def test_it_uses_neither_certificate_nor_tokens(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[syncer]\ncert = "hub.pem"\nkey = "hub.key"\ntokens = "tokens.toml"\n'
        'worker_urls = ["https://a:1"]\nworker_secret = "secret"\n'
    )
    _, overrides = split_overrides(server.hub(tmp_path).command[2:])
    settings = load_config(file, overrides).config.syncer
    assert (settings.cert, settings.key, settings.tokens, settings.worker_urls) == ("", "", "", [])


def test_an_address_that_does_not_answer_is_refused_unless_a_proxy_or_another_one_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(server, "REACH_WAIT_S", 0.1)
    config = RunConfig()
    config.transport.kind, config.transport.urls = "hub", ["http://127.0.0.1:1"]
    place = meeting_place(config)
    assert place is not None
    with pytest.raises(UserError, match=r"transport\.urls: nothing answers"):
        place.check()
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.site:3128")
    place.check()
    monkeypatch.delenv("HTTPS_PROXY")
    config.transport.urls.append("http://127.0.0.1:2")
    place = meeting_place(config)
    assert place is not None
    place.check()


def test_an_address_with_a_password_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[transport]\nkind = "hub"\nurls = ["https://me:secret@hub.example.org"]\n')
    with pytest.raises(UserError, match="without user or password"):
        load_config(file)
