"""The ServiceAccount's token is renewed while the driver runs: every call has one that the server takes."""

from __future__ import annotations

from pathlib import Path

import kubernetes.config.incluster_config as incluster
import pytest
from kubernetes.client.configuration import Configuration

from railmate.kube.token import MountedToken, configure_in_pod


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def sent(configuration: Configuration) -> str | None:
    return configuration.get_api_key_with_prefix("BearerToken")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first")
    return path


def mounted(token: Path, clock: Clock) -> Configuration:
    one = Configuration()
    one.api_key["BearerToken"] = "bearer first"
    one.refresh_api_key_hook = MountedToken(token, clock)
    return one


def test_a_renewed_token_is_used_within_a_minute(token: Path) -> None:
    clock = Clock()
    one = mounted(token, clock)
    token.write_text("second")
    assert sent(one) == "bearer first"
    clock.now += 61
    assert sent(one) == "bearer second"
    token.write_text("third")
    clock.now += 30
    assert sent(one) == "bearer second"
    clock.now += 31
    assert sent(one) == "bearer third"


@pytest.mark.parametrize("text", [None, ""])
def test_a_file_that_cannot_be_read_fails_no_call_and_is_read_again_at_the_next(
    token: Path, text: str | None
) -> None:
    clock = Clock()
    one = mounted(token, clock)
    token.unlink()
    if text is not None:
        token.write_text(text)
    clock.now += 61
    assert sent(one) == "bearer first"
    token.write_text("second")
    assert sent(one) == "bearer second"


def test_a_clock_that_is_set_back_keeps_no_expired_token(
    token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole client, as it connects in a pod: the time of day does not matter."""
    (tmp_path / "ca.crt").write_text("a certificate")
    monkeypatch.setattr(incluster, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    clock = Clock()
    monkeypatch.setattr("railmate.kube.token.time.monotonic", clock)
    one = Configuration()
    configure_in_pod(one)
    assert sent(one) == "bearer first"
    token.write_text("second")
    clock.now += 61  # and the time of day stands still
    assert sent(one) == "bearer second"
