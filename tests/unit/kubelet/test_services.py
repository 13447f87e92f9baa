"""The services' answers: every claim, errors a claim at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from railmate.claims.records import ClaimRef, PreparedDevice
from railmate.claims.state import PreparedClaim
from railmate.errors import RailmateError
from railmate.kubelet.services import SUPPORTED_VERSIONS, DraPlugin, Registration, v1, v1beta1
from railmate.kubelet.workers import Workers
from railmate_api.proto import dra_v1_pb2, dra_v1beta1_pb2, pluginregistration_pb2

PREPARED = PreparedClaim(
    (PreparedDevice("main", "node1", "pair-0"), PreparedDevice("main", "node1", "pair-1")),
    {"pair-0": ["railmate.dev/claim=a", "nvidia.com/gpu=0"], "pair-1": []},
)


class Verbs:
    """Answers by the claim's UID."""

    def __init__(self, answers: dict[str, Callable[[], Any]] | None = None) -> None:
        self.answers = answers or {}
        self.asked: list[ClaimRef] = []

    def prepare(self, ref: ClaimRef, *, given_up: threading.Event) -> PreparedClaim:
        self.asked.append(ref)
        answer = self.answers.get(ref.uid)
        return answer() if answer else PREPARED

    def unprepare(self, ref: ClaimRef) -> None:
        self.asked.append(ref)
        answer = self.answers.get(ref.uid)
        if answer:
            answer()


def raising(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> None:
        raise error

    return raise_it


VERSIONS = [(v1, dra_v1_pb2), (v1beta1, dra_v1beta1_pb2)]


def ask(make: Callable[..., DraPlugin], messages: Any, call: str, verbs: Verbs, *uids: str) -> Any:
    claims = [messages.Claim(uid=uid, namespace="team", name=f"name-{uid}") for uid in uids]
    request = getattr(messages, f"{call}Request")(claims=claims)
    with ThreadPoolExecutor(8) as workers:
        plugin = make(verbs, Workers(workers, workers))
        return asyncio.run(getattr(plugin, call)(request, SimpleNamespace(add_done_callback=print)))


@pytest.mark.parametrize(("make", "messages"), VERSIONS)
def test_prepared_devices_are_answered_with_request_pool_and_cdi_ids(make: Any, messages: Any) -> None:
    verbs = Verbs()
    answer = ask(make, messages, "NodePrepareResources", verbs, "a")
    assert verbs.asked == [ClaimRef("a", "team", "name-a")]
    one, other = answer.claims["a"].devices
    assert (list(one.request_names), one.pool_name, one.device_name) == (["main"], "node1", "pair-0")
    assert list(one.cdi_device_ids) == ["railmate.dev/claim=a", "nvidia.com/gpu=0"]
    assert list(other.cdi_device_ids) == []
    assert answer.claims["a"].error == ""


@pytest.mark.parametrize("call", ["NodePrepareResources", "NodeUnprepareResources"])
@pytest.mark.parametrize(("make", "messages"), VERSIONS)
def test_every_claim_is_answered_and_one_error_is_not_anothers(make: Any, messages: Any, call: str) -> None:
    verbs = Verbs(
        {"b": raising(RailmateError("ResourceClaim team/name-b: gone")), "d": raising(KeyError("x"))}
    )
    answer = ask(make, messages, call, verbs, "a", "b", "c", "d")
    assert set(answer.claims) == {"a", "b", "c", "d"}
    assert answer.claims["b"].error == "ResourceClaim team/name-b: gone"
    assert answer.claims["a"].error == answer.claims["c"].error == ""
    assert "team/name-d" in answer.claims["d"].error
    assert "KeyError" in answer.claims["d"].error


@pytest.mark.parametrize("call", ["NodePrepareResources", "NodeUnprepareResources"])
@pytest.mark.parametrize(("make", "messages"), VERSIONS)
def test_empty_request_has_an_empty_answer(make: Any, messages: Any, call: str) -> None:
    assert not ask(make, messages, call, Verbs()).claims


def test_claims_of_a_request_are_prepared_at_the_same_time() -> None:
    """One that waits for a device must not use up the time of the others."""
    together = threading.Barrier(3, timeout=5)

    def meet() -> PreparedClaim:
        together.wait()
        return PREPARED

    answer = ask(v1, dra_v1_pb2, "NodePrepareResources", Verbs(dict.fromkeys("abc", meet)), "a", "b", "c")
    assert [answer.claims[uid].error for uid in "abc"] == ["", "", ""]


def test_claim_that_is_named_twice_is_answered_once() -> None:
    answer = ask(v1, dra_v1_pb2, "NodePrepareResources", Verbs(), "a", "a")
    assert [device.device_name for device in answer.claims["a"].devices] == ["pair-0", "pair-1"]


def test_registration_announces_v1_first() -> None:
    heard: list[bool] = []
    registration = Registration("railmate.dev", "/plugins/dra.sock", heard.append)
    info = asyncio.run(registration.GetInfo(pluginregistration_pb2.InfoRequest(), None))
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", "railmate.dev", "/plugins/dra.sock")
    assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"] == list(SUPPORTED_VERSIONS)


@pytest.mark.parametrize("registered", [True, False])
def test_registrations_outcome_is_heard(registered: bool, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[bool] = []
    status = pluginregistration_pb2.RegistrationStatus(
        plugin_registered=registered, error="" if registered else "why"
    )
    asyncio.run(Registration("railmate.dev", "/s", heard.append).NotifyRegistrationStatus(status, None))
    assert heard == [registered]
    assert registered or "why" in caplog.text
