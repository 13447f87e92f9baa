"""Where the sockets are, and that their names fit into a socket's address."""

from __future__ import annotations

from pathlib import Path

import pytest

from railmate.errors import UsageError
from railmate.kubelet.sockets import Sockets, sockets

KUBELET = Path("/var/lib/kubelet")
POD = "00000000-0000-4000-8000-000000000001"
_FITS = 107


def longest(found: Sockets) -> int:
    return max(len(str(found.registration).encode()), len(str(found.service).encode()))


def test_paths_are_the_kubelets() -> None:
    found = sockets(KUBELET, "railmate.dev", POD)
    assert found.registration == KUBELET / "plugins_registry" / f"railmate.dev-{POD}-reg.sock"
    assert found.service == KUBELET / "plugins/railmate.dev" / f"dra-{POD}.sock"


def test_without_a_pod_the_plain_names_are_used() -> None:
    found = sockets(KUBELET, "railmate.dev", "")
    assert found.registration.name == "railmate.dev-reg.sock"
    assert found.service.name == "dra.sock"


def test_instances_of_a_rolling_update_do_not_share_a_socket() -> None:
    for driver in ("railmate.dev", "a-rather-long-name.railmate.example.com"):
        one, other = (sockets(KUBELET, driver, POD[:-1] + end) for end in "12")
        assert {one.registration, one.service}.isdisjoint({other.registration, other.service})


def test_service_socket_is_not_below_the_registry() -> None:
    """The kubelet takes every socket there for a registration socket."""
    found = sockets(KUBELET, "railmate.dev", POD)
    assert KUBELET / "plugins_registry" not in found.service.parents


@pytest.mark.parametrize("length", range(1, 64, 4))
def test_names_fit_for_every_driver_name(length: int) -> None:
    found = sockets(KUBELET, "d" * length, POD)
    assert longest(found) <= _FITS


def test_kubelet_directory_without_room_is_refused_in_words() -> None:
    deep = Path("/var/lib") / ("k" * 90)
    with pytest.raises(UsageError, match="kubelet-dir"):
        sockets(deep, "railmate.dev", POD)
