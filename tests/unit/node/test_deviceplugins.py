"""GPUs that a device plugin on the same node hands out: seen, said once, and never forgotten for want of an answer."""

from __future__ import annotations

from typing import Any

import pytest

import railmate.node.deviceplugins as module
from railmate.inventory.model import GpuVendor
from railmate.kube.errors import ApiError
from railmate.node.deviceplugins import DevicePlugins, handed_out


def node(**allocatable: str) -> dict[str, Any]:
    return {"status": {"allocatable": {"cpu": "8", **allocatable}}}


class Api:
    def __init__(self, *answers: dict[str, Any] | ApiError) -> None:
        self.answers, self.asked = list(answers), 0

    def get_node(self, name: str) -> dict[str, Any]:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("allocatable", "found"),
    [
        ({"nvidia.com/gpu": "8"}, {GpuVendor.NVIDIA: "nvidia.com/gpu"}),
        ({"nvidia.com/gpu": "0"}, {}),
        ({"nvidia.com/gpu.shared": "16"}, {GpuVendor.NVIDIA: "nvidia.com/gpu.shared"}),
        ({"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "7"}, {GpuVendor.NVIDIA: "nvidia.com/mig-1g.5gb"}),
        ({"nvidia.com/hostdev": "8"}, {}),  # NICs
        ({"amd.com/gpu": "4", "nvidia.com/gpu": "2"}, {
            GpuVendor.AMD: "amd.com/gpu", GpuVendor.NVIDIA: "nvidia.com/gpu",
        }),
        ({"amd.com/nic": "8", "amd.com/vnic": "64"}, {}),
        ({"amd.com/cpx_nps4": "64"}, {GpuVendor.AMD: "amd.com/cpx_nps4"}),
        ({"amd.com/gpu_vf": "8"}, {GpuVendor.AMD: "amd.com/gpu_vf"}),
        ({"gpu.intel.com/i915": "2"}, {GpuVendor.INTEL: "gpu.intel.com/i915"}),
        ({}, {}),
    ],
)  # fmt: skip
def test_vendor_is_known_by_its_plugins_resource(
    allocatable: dict[str, str], found: dict[GpuVendor, str]
) -> None:
    assert handed_out(node(**allocatable)) == found


def test_node_that_the_kubelet_has_not_spoken_of_hands_out_nothing() -> None:
    assert handed_out({}) == handed_out({"status": {}}) == {}


def test_plugin_is_said_once_and_again_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GOOD_FOR", -1.0)
    monkeypatch.setattr(module, "_GONE_FOR", -1.0)
    said: list[str] = []
    there, gone = node(**{"nvidia.com/gpu": "8"}), node()
    plugins = DevicePlugins(Api(there, there, gone, there), "node1", said.append)
    assert [bool(plugins.handed_out()) for _ in range(4)] == [True, True, False, True]
    assert len(said) == 2
    assert said[0].startswith(
        "GPUs of nvidia are not offered: a device plugin on this node hands out nvidia.com/gpu"
    )


def test_plugin_is_gone_after_two_looks_minutes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the kubelet's restart allocatable is 0 until the plugin registers, and its pods keep their GPUs."""
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    there, zero = node(**{"nvidia.com/gpu": "8"}), node(**{"nvidia.com/gpu": "0"})
    plugins = DevicePlugins(Api(there, zero, zero, there, zero, zero, zero), "node1", print)
    found = []
    for seconds in (0, 60, 60, 60, 300, 120, 100):
        now += seconds
        found.append(bool(plugins.handed_out()))
    assert found == [True, True, True, True, True, True, False]


def test_without_an_answer_the_last_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GOOD_FOR", -1.0)
    plugins = DevicePlugins(Api(node(**{"amd.com/gpu": "4"}), ApiError("away")), "node1", print)
    assert plugins.handed_out() == plugins.handed_out() == {GpuVendor.AMD: "amd.com/gpu"}


def test_answer_is_good_for_a_while_and_a_failure_is_not() -> None:
    """Every event of the kernel causes a look at the machine; not each may cause a request."""
    api = Api(ApiError("away"), node(), node())
    plugins = DevicePlugins(api, "node1", print)
    for _ in range(4):
        plugins.handed_out()
    assert api.asked == 2
