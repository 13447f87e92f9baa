"""What is said of attached devices is what a real API server takes, under the driver's own rights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from component.conftest import CLAIMS, Cluster, request, wait_until
from railmate.attach.model import NetdevSnapshot
from railmate.attach.rdmamodel import Gid, RdmaDeviceRef, SeenNic
from railmate.claims.records import Attachment, ClaimRef, Entry, PreparedDevice, PreparedNic, Seen
from railmate.node.conditions import device_status
from railmate.node.reports import Reports
from railmate.publish.model import Offer

DRIVER, ADDRESS = "railmate.dev", "0000:0c:00.1"
SEEN = SeenNic(
    ADDRESS, "net1", ("10.9.0.1/24", "fd00::9/64"), "mlx5_2", "Ethernet", "ACTIVE",
    Gid(3, "0000:0000:0000:0000:0000:ffff:0a09:0001", "RoCE v2", "net1"), mac="02:00:00:00:00:aa",
)  # fmt: skip


def test_the_api_server_takes_all_of_it(cluster: Cluster, offers: Callable[..., Offer]) -> None:
    node = cluster.node("claim-status")
    cluster.publish(node, offers())
    claim = cluster.claim("claim-status", request("main", "gpu-rdma-pair.railmate.dev"))
    pod = cluster.pod("claim-status", node, claim)
    assert cluster.verdict(pod) == ""
    (device,) = cluster.allocated(claim)
    uid = cluster.plane.request("GET", f"{CLAIMS}/{claim}")["metadata"]["uid"]
    snapshot = NetdevSnapshot(ADDRESS, "vf0", "02:00:00:00:00:01", 1500, True)
    prepared = PreparedDevice(
        "main", node, device, ("0000:07:00.0",),
        (PreparedNic(ADDRESS, "net1", snapshot, rdma=(RdmaDeviceRef("mlx5_2"),)),),
        attributes={"railmate.dev/distance": {"string": "PXB"}},
    )  # fmt: skip
    entry = Entry(
        ClaimRef(uid, "default", claim), ("pod-1",), (prepared,), "boot", None,
        Attachment("s1", "pod-1", "default/claim-status", "/run/netns/1", True), Seen("s1", (SEEN,)),
    )  # fmt: skip
    reports = Reports(cluster.driver_client(node), DRIVER, node)
    thread = threading.Thread(target=reports.run, daemon=True)
    thread.start()
    try:
        reports.attached(entry)
        found: list[dict[str, Any]] = []

        def told() -> bool:
            found[:] = cluster.plane.request("GET", f"{CLAIMS}/{claim}")["status"].get("devices") or []
            return bool(found)

        wait_until(told, "the claim's status names the device")
    finally:
        reports.stop()
        thread.join(10)
    (status,) = found
    for condition in status["conditions"]:
        assert condition.pop("lastTransitionTime")
    assert status == device_status(DRIVER, entry, prepared)
    assert {one["type"]: one["status"] for one in status["conditions"]} == {
        "Ready": "True", "NetworkReady": "True", "RDMAReady": "True",
    }  # fmt: skip
    cluster.delete_pod(pod)
