"""Prepare: what is answered and written, asked once or again, and after a reboot."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from claims_netdevs import HOST, World
from claims_world import (
    VFS,
    claim,
    config,
    inventory,
    ref,
    result,
    sandbox,
    uid,
    view,
)

from railmate.claims.allocation import ClaimError
from railmate.errors import RailmateError


def test_prepare_answers_devices_with_their_cdi_ids(world: World) -> None:
    world.api.put(claim(1, "pair-0"))
    answer = world.state.prepare(ref(1))
    assert [device.device for device in answer.devices] == ["pair-0"]
    assert list(answer.cdi_ids["pair-0"]) == [f"railmate.dev/claim={uid(1)}-pair-0"]
    (device,) = world.spec()["devices"]
    assert device["name"] == f"{uid(1)}-pair-0"
    assert world.gates == []


def test_prepare_is_one_request_to_the_api_and_a_second_call_changes_nothing(world: World) -> None:
    world.prepared(1, "pair-0")
    before = world.ledger.get(uid(1))
    first = world.state.prepare(ref(1))
    assert world.api.gets == 2
    assert world.ledger.get(uid(1)) == before
    assert list(first.cdi_ids["pair-0"]) == [f"railmate.dev/claim={uid(1)}-pair-0"]


def test_second_prepare_writes_the_files_again(world: World) -> None:
    """The CDI directory is a tmpfs, and others may empty it."""
    world.prepared(1, "pair-0")
    spec = world.spec()
    for path in (world.root / "cdi").iterdir():
        path.unlink()
    metadata = list(world.root.rglob("metadata.json"))
    for path in metadata:
        path.unlink()
    world.restart()
    world.state.prepare(ref(1))
    assert world.spec() == spec
    assert all(path.exists() for path in metadata)


def test_second_prepare_while_the_device_is_in_the_pod_leaves_it_there(world: World) -> None:
    """The kubelet asks again after its restart."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.restart()
    world.state.prepare(ref(1), patience=0)
    assert world.netdevs.where[VFS[0]] == ("/run/netns/1", "net1")
    assert world.gates == [f"{uid(1)}.sandbox-1"]
    world.state.check(sandbox(), [uid(1)])


def test_prepare_again_for_the_claims_next_pod(world: World) -> None:
    """A claim that outlives its pod, prepared again after a kubelet restart: the new pod gets the NIC."""
    world.prepared(1, "vf-0", pods=("pod-1",))
    world.api.put(claim(1, "vf-0", pods=("pod-2",)))
    world.state.prepare(ref(1), patience=0)
    second = sandbox("sandbox-2", "pod-2", "/run/netns/2")
    world.state.attach(second)
    world.state.check(second, [uid(1)])


def test_prepare_again_of_a_claim_that_was_replaced_is_refused(world: World) -> None:
    world.prepared(1, "pair-0")
    other = claim(1, "pair-1")
    other["metadata"]["uid"] = uid(7)
    world.api.put(other)
    with pytest.raises(ClaimError, match="replaced"):
        world.state.prepare(ref(1), patience=0)


def test_prepare_again_after_another_allocation_gives_the_new_devices(world: World) -> None:
    world.prepared(1, "pair-0")
    world.api.put(claim(1, "pair-1"))
    answer = world.state.prepare(ref(1), patience=0)
    assert [device.device for device in answer.devices] == ["pair-1"]


def test_bad_claim_leaves_nothing_behind(world: World) -> None:
    world.api.put(claim(1, "pair-0", configs=[config(mtu=1)]))
    with pytest.raises(ClaimError, match="mtu"):
        world.state.prepare(ref(1))
    assert world.clean()


def test_bad_claim_is_refused_at_once(world: World) -> None:
    """Waiting helps only with what passes."""
    world.api.put(claim(1, "pair-9"))
    began = time.monotonic()
    with pytest.raises(ClaimError):
        world.state.prepare(ref(1), patience=30)
    assert time.monotonic() - began < 2


def test_failed_write_of_the_cdi_spec_is_made_good_by_the_next_prepare(world: World) -> None:
    (world.root / "cdi").write_text("in the way")
    world.api.put(claim(1, "pair-0"))
    with pytest.raises((OSError, RailmateError)):
        world.state.prepare(ref(1), patience=0)
    (world.root / "cdi").unlink()
    world.state.prepare(ref(1), patience=0)
    assert world.specs == [f"railmate.dev-claim-{uid(1)}.json"]


def test_full_disk_is_an_error_for_people(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.api.put(claim(1, "pair-0"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RailmateError, match="No space left on device"):
            world.state.prepare(ref(1), patience=0)
    world.state.prepare(ref(1), patience=0)


def test_two_claims_of_a_pod_have_different_interfaces(world: World) -> None:
    world.prepared(1, "vf-0")
    world.prepared(2, "vf-1")
    world.prepared(3, "vf-2", pods=("pod-3",))
    entries = world.ledger.entries()
    assert [entries[uid(n)].nics[0].interface for n in (1, 2, 3)] == ["net1", "net2", "net1"]


def test_netdev_on_its_way_home_is_waited_for(world: World) -> None:
    """Its namespace has just ended: the kernel brings it back in a moment."""
    world.netdevs.where[VFS[0]] = ("/run/netns/old", "net1")
    world.api.put(claim(1, "vf-0"))
    timer = threading.Timer(0.3, lambda: world.netdevs.where.update({VFS[0]: (HOST, "vf0")}))
    timer.start()
    world.state.prepare(ref(1), patience=10)
    timer.join()
    assert world.specs


def test_a_machine_that_changes_meanwhile_leaves_no_prepare_between_two_views_of_it(world: World) -> None:
    names = {
        address: function.netdevs[0].name
        for address, function in inventory().functions.items()
        if function.netdevs
    }

    def looked_for(address: str) -> str:
        world.state.update(view(inventory=replace(inventory(), functions={})))
        return names[address]

    world.state.update(view(netdev_of=looked_for))
    world.prepared(1, "wide")
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert [nic.address for nic in entry.nics if nic.snapshot] == list(VFS[:2])


def test_netdev_that_does_not_come_home_is_an_error(world: World) -> None:
    world.netdevs.where[VFS[0]] = ("/run/netns/old", "net1")
    world.api.put(claim(1, "vf-0"))
    with pytest.raises(ClaimError, match="vf0"):
        world.state.prepare(ref(1), patience=0.1)
    assert world.ledger.entries() == {}


def test_vf_that_was_in_a_pod_when_the_driver_started_is_attached_to_the_next(world: World) -> None:
    """The driver looked at the machine while the netdev was away; the pod after that must get it all the same."""
    found = inventory()
    away = replace(found.functions[VFS[0]], netdevs=())
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    world.restart(node=view(inventory=replace(found, functions={**found.functions, VFS[0]: away})))
    world.state.detach("sandbox-1")
    world.state.unprepare(ref(1))
    world.api.put(claim(2, "vf-0", pods=("pod-2",)))
    second = sandbox("sandbox-2", "pod-2", "/run/netns/2")
    try:
        world.state.prepare(ref(2), patience=0.1)
        world.state.attach(second)
        world.state.check(second, [uid(2)])
    except RailmateError:
        return  # refused, and said so
    assert world.netdevs.where[VFS[0]][0] == "/run/netns/2"


def test_claim_prepared_before_a_reboot_is_prepared_anew(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.where[VFS[0]] = (HOST, "vf0")
    world.ledger.close_gate(uid(1))
    world.restart(boot="boot-2")
    world.state.prepare(ref(1), patience=0)
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert (entry.boot_id, entry.attachment) == ("boot-2", None)
    second = sandbox("sandbox-2", netns="/run/netns/2")
    world.state.attach(second)
    world.state.check(second, [uid(1)])


def test_marker_from_before_a_reboot_opens_nothing(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.where[VFS[0]] = (HOST, "vf0")
    world.restart(boot="boot-2")
    world.state.prepare(ref(1), patience=0)
    assert world.gates == []


def test_gate_and_metadata_are_in_the_spec_once_a_request(world: World) -> None:
    world.prepared(1, result("vf-0", "a"), result("vf-1", "a"), result("pair-1", "b"), template="nics")
    edits = [device["containerEdits"] for device in world.spec(1)["devices"]]
    assert ["hooks" in one for one in edits] == [True, False, True]
    assert ["mounts" in one for one in edits] == [True, False, True]
    (hook,) = edits[0]["hooks"]
    assert hook["hookName"] == "createRuntime"
    assert hook["args"][2] == uid(1)
    (mount,) = edits[0]["mounts"]
    assert mount["containerPath"] == (
        "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/nics/a/railmate.dev-metadata.json"
    )
    text = Path(mount["hostPath"]).read_text()
    objects = [json.loads(line) for line in text.splitlines()]
    assert [one["apiVersion"] for one in objects] == [
        "metadata.resource.k8s.io/v1beta1",
        "metadata.resource.k8s.io/v1alpha1",
    ]
    (request,) = objects[0]["requests"]
    assert request["name"] == "a"
    assert [device["name"] for device in request["devices"]] == ["vf-0", "vf-1"]
    assert request["devices"][0]["networkData"]["interfaceName"] == "net1"
    assert request["devices"][0]["networkData"]["hardwareAddress"] == "02:00:00:00:00:01"


def test_every_answered_cdi_id_is_in_the_spec(world: World) -> None:
    world.api.put(claim(1, result("gpu-0", "g"), result("gpu-1", "g"), result("vf-2", "n")))
    world.restart(
        node=view(vendor_cdi=lambda: {"GPU-0": "nvidia.com/gpu=GPU-0", "GPU-1": "nvidia.com/gpu=GPU-1"})
    )
    answer = world.state.prepare(ref(1), patience=0)
    named = {f"railmate.dev/claim={device['name']}" for device in world.spec(1)["devices"]}
    answered = [cdi_id for ids in answer.cdi_ids.values() for cdi_id in ids]
    assert {cdi_id for cdi_id in answered if cdi_id.startswith("railmate.dev/")} == named
    assert list(answer.cdi_ids["gpu-1"]) == ["nvidia.com/gpu=GPU-1"]
    assert all(device["containerEdits"] for device in world.spec(1)["devices"])
