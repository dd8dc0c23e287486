"""Logs that last for weeks do not fill up with requests."""

import logging

import httpx
import pytest

from torchtitan_diloco.observe.logs import hush_clients


def test_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200))) as client:
        client.get("http://hub/")
        assert "HTTP Request" in caplog.text
        caplog.clear()
        hush_clients()
        client.get("http://hub/")
    assert caplog.text == ""
