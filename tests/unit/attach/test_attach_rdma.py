"""RDMA devices between namespaces. The kernel is simulated (``rdma_kernel``); the virtual node has the real one."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rdma_kernel import HOST, HOST_FD, POD, POD_FD, RdmaKernel

from railmate import netlink as sockets
from railmate.attach import elsewhere, move, namespaces, rdma, rdmasoft
from railmate.attach.errors import AttachError
from railmate.attach.model import MoveRequest, NetdevSnapshot
from railmate.attach.namespaces import Sides
from railmate.attach.rdmamodel import RdmaDeviceRef, RdmaReturn
from railmate.attach.settings import IpoibSettings
from railmate.attach.steps import apply_all
from railmate.inventory import rdmanetlink

SIDES = Sides(object(), HOST_FD, object(), POD_FD)
ALONE = Sides(object(), HOST_FD)
MLX = RdmaDeviceRef("mlx5_2", "0c42:a103:0016:1c5e")
RXE = RdmaDeviceRef("rxe0", soft="rxe")
GUID = 0x0C42_A103_0016_1C5E


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> RdmaKernel:
    found = RdmaKernel()
    monkeypatch.setattr(sockets.socket, "socket", found.socket)
    monkeypatch.setattr(namespaces, "enter", found.enter)
    found.add("mlx5_0", guid=1)
    found.add("mlx5_2", guid=GUID)
    found.here = POD  # with_namespace calls from there
    return found


def where(kernel: RdmaKernel) -> dict[str, str]:
    return {device.name: device.namespace for device in kernel.devices.values()}


# --- devices of PCI functions
def test_in_exclusive_mode_the_device_moves_and_no_other(kernel: RdmaKernel) -> None:
    rdma.MoveRdmaDevices([MLX]).apply(SIDES)
    assert where(kernel) == {"mlx5_0": HOST, "mlx5_2": POD}
    assert kernel.here == POD, "the thread is back in the pod's namespace"


def test_in_shared_mode_nothing_moves(kernel: RdmaKernel) -> None:
    kernel.exclusive = False
    step = rdma.MoveRdmaDevices([MLX])
    step.apply(SIDES)
    assert rdma.take_back([MLX], SIDES) == [RdmaReturn("mlx5_2")]
    step.undo(SIDES)
    assert kernel.changes == []


def test_without_rdma_in_the_kernel_nothing_is_done_and_nothing_fails(kernel: RdmaKernel) -> None:
    kernel.supported = False
    rdma.MoveRdmaDevices([MLX]).apply(SIDES)
    assert rdma.take_back([MLX], SIDES) == [RdmaReturn("mlx5_2")]
    assert rdmasoft.restore([RXE], "eno1", SIDES) == []
    assert rdmanetlink.netns_mode() is None


def test_moving_again_changes_nothing(kernel: RdmaKernel) -> None:
    rdma.MoveRdmaDevices([MLX]).apply(SIDES)
    step = rdma.MoveRdmaDevices([MLX])
    step.apply(SIDES)
    step.undo(SIDES)
    assert kernel.changes == ["mlx5_2 to pod"], "what an earlier step moved is not this one's to undo"


def test_a_step_that_fails_half_way_is_undone(kernel: RdmaKernel) -> None:
    step = rdma.MoveRdmaDevices([MLX, RdmaDeviceRef("mlx5_9")])
    with pytest.raises(AttachError, match="mlx5_9 is neither on the host nor in this pod"):
        step.apply(SIDES)
    step.undo(SIDES)
    assert where(kernel) == {"mlx5_0": HOST, "mlx5_2": HOST}


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EPERM, "needs CAP_NET_ADMIN"), (errno.EOPNOTSUPP, "its driver, or this kernel")],
)
def test_a_refusal_of_the_kernel_says_what_to_look_at(kernel: RdmaKernel, code: int, words: str) -> None:
    kernel.refusals[rdmanetlink.SET] = code
    with pytest.raises(AttachError, match=words) as caught:
        rdma.MoveRdmaDevices([MLX]).apply(SIDES)
    assert "mlx5_2" in str(caught.value)


def test_the_device_comes_home_also_under_another_name(kernel: RdmaKernel) -> None:
    rdma.MoveRdmaDevices([MLX]).apply(SIDES)
    kernel.named("mlx5_2").name = "mine"
    assert rdma.take_back([MLX], SIDES) == [RdmaReturn("mlx5_2")]
    assert where(kernel) == {"mlx5_0": HOST, "mlx5_2": HOST}


def swapped(kernel: RdmaKernel) -> tuple[RdmaDeviceRef, RdmaDeviceRef]:
    """Two devices in a pod that has given each the other's name."""
    a, b = kernel.add("mlx5_6", guid=6), kernel.add("mlx5_7", guid=7)
    refs = RdmaDeviceRef("mlx5_6", "0000:0000:0000:0006"), RdmaDeviceRef("mlx5_7", "0000:0000:0000:0007")
    rdma.MoveRdmaDevices(refs).apply(SIDES)
    a.name, b.name = b.name, a.name
    return refs


def names(kernel: RdmaKernel) -> list[tuple[int, str, str]]:
    return [(one.guid, one.name, one.namespace) for one in kernel.devices.values() if one.guid in (6, 7)]


def test_devices_that_a_pod_has_given_each_others_names_come_home_under_their_own(kernel: RdmaKernel) -> None:
    refs = swapped(kernel)
    assert rdma.take_back(refs, SIDES) == [RdmaReturn("mlx5_6"), RdmaReturn("mlx5_7")]
    assert names(kernel) == [(6, "mlx5_6", HOST), (7, "mlx5_7", HOST)]


def test_a_claims_release_does_not_take_another_claims_device_that_has_its_name(
    kernel: RdmaKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "with_host", lambda work: work(ALONE))
    first, second = swapped(kernel)
    (said,) = rdma.take_back([first], SIDES)
    assert said.problem is not None, "its name is not free yet, so it is looked after"
    assert names(kernel) == [(6, "railmate2", HOST), (7, "mlx5_6", POD)]
    assert rdma.take_back([second], SIDES) == [RdmaReturn("mlx5_7")]
    kernel.here = HOST
    assert rdma.put_right([first]) == [RdmaReturn("mlx5_6")]
    assert names(kernel) == [(6, "mlx5_6", HOST), (7, "mlx5_7", HOST)]


def test_devices_that_the_kernel_has_given_back_swapped_are_put_right(
    kernel: RdmaKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "with_host", lambda work: work(ALONE))
    refs = swapped(kernel)
    for device in kernel.devices.values():
        device.namespace = HOST
    kernel.here = HOST
    assert rdma.put_right(refs) == [RdmaReturn("mlx5_6"), RdmaReturn("mlx5_7")]
    assert names(kernel) == [(6, "mlx5_6", HOST), (7, "mlx5_7", HOST)]


def test_a_pods_device_that_has_the_name_of_one_is_not_taken_for_it(kernel: RdmaKernel) -> None:
    kernel.add("mine", guid=5, namespace=POD)
    kernel.named("mlx5_2").name, kernel.named("mine").name = "rdmap9", "mlx5_2"
    rdma.MoveRdmaDevices([MLX]).apply(SIDES)
    assert where(kernel)["rdmap9"] == POD


def test_where_guids_tell_nothing_the_name_does(kernel: RdmaKernel) -> None:
    kernel.add("mlx5_8", guid=GUID)
    rdma.MoveRdmaDevices([MLX, RdmaDeviceRef("mlx5_0")]).apply(SIDES)
    assert where(kernel) == {"mlx5_0": POD, "mlx5_2": POD, "mlx5_8": HOST}


def test_a_device_that_is_nowhere_is_told_and_does_not_stop_the_others(kernel: RdmaKernel) -> None:
    rdma.MoveRdmaDevices([MLX]).apply(SIDES)
    lost, home = rdma.take_back([RdmaDeviceRef("mlx5_9"), MLX], SIDES)
    assert lost.problem is not None
    assert "mlx5_9" in lost.problem
    assert home.problem is None


@pytest.mark.parametrize("exclusive", [True, False])
def test_on_the_host_a_device_gets_its_name_again_by_its_guid(
    kernel: RdmaKernel, exclusive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "with_host", lambda work: work(ALONE))
    kernel.exclusive, kernel.here = exclusive, HOST
    kernel.named("mlx5_2").name = "rdmap9"
    assert rdma.put_right([MLX]) == [RdmaReturn("mlx5_2")]
    assert where(kernel) == {"mlx5_0": HOST, "mlx5_2": HOST}


def test_a_device_that_is_not_on_the_host_is_not_right(
    kernel: RdmaKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "with_host", lambda work: work(ALONE))
    kernel.named("mlx5_2").namespace = "elsewhere"
    kernel.here = HOST
    (said,) = rdma.put_right([MLX])
    assert said.problem == "RDMA device mlx5_2 is not on the host"


def test_of_all_namespaces_the_one_that_has_the_device_gives_it_back(
    kernel: RdmaKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others have none of it, and nobody is asked once it is found."""
    entered: list[str] = []

    @contextmanager
    def opened(path: Path) -> Iterator[str]:
        yield path.name

    def with_namespace(fd: str, work: Callable[[Sides], None]) -> None:
        entered.append(fd)
        mine, kernel.named("mlx5_2").namespace = kernel.named("mlx5_2").namespace, HOST
        if mine != HOST:
            kernel.named("mlx5_2").namespace = POD if fd == mine else "elsewhere"
        work(SIDES)
        if kernel.named("mlx5_2").namespace == "elsewhere":
            kernel.named("mlx5_2").namespace = mine

    monkeypatch.setattr(elsewhere, "open_namespace", opened)
    monkeypatch.setattr(elsewhere, "with_namespace", with_namespace)
    monkeypatch.setattr(elsewhere.Elsewhere, "namespaces", lambda self: [Path("/a"), Path("/b"), Path("/c")])
    kernel.named("mlx5_2").namespace = "b"
    assert elsewhere.Elsewhere(tmp_path).fetch_rdma([MLX, RXE]) == [RdmaReturn("mlx5_2")]
    assert where(kernel)["mlx5_2"] == HOST
    assert entered == ["a", "b"]


def test_the_mode_counts_that_the_node_has_now(kernel: RdmaKernel) -> None:
    """An administrator may change it while no pod runs; nothing is remembered of it."""
    kernel.exclusive = False
    rdma.MoveRdmaDevices([MLX]).apply(SIDES)
    kernel.exclusive = True
    rdma.MoveRdmaDevices([MLX]).apply(SIDES)
    assert where(kernel)["mlx5_2"] == POD


def test_after_the_namespaces_end_the_host_alone_is_looked_at(kernel: RdmaKernel) -> None:
    kernel.here = HOST
    kernel.named("mlx5_2").namespace = "ending"
    (found,) = rdma.take_back([MLX], ALONE)
    assert found.problem is not None
    kernel.named("mlx5_2").namespace = HOST
    assert rdma.take_back([MLX], ALONE) == [RdmaReturn("mlx5_2")]


# --- IPoIB
@pytest.mark.parametrize("exclusive", [True, False])
def test_an_ipoib_interface_that_would_end_with_the_move_is_refused_before_anything_moves(
    kernel: RdmaKernel, exclusive: bool
) -> None:
    """The mode may have been changed since the claim was prepared."""
    kernel.exclusive = exclusive
    snapshot = NetdevSnapshot("0000:0c:00.1", "ib0", "", 2044, True, ipoib=IpoibSettings(0xFFFF, "datagram"))
    steps, _ = move.steps_of(MoveRequest(snapshot, "net1", rdma_devices=(MLX,)))
    if not exclusive:
        steps[0].apply(SIDES)
        return
    with pytest.raises(
        AttachError, match=r"netdev ib0 of 0000:0c:00\.1 is an IPoIB interface, which would end"
    ):
        apply_all(steps, SIDES)
    assert kernel.changes == []


# --- soft devices
def soft_vf(kernel: RdmaKernel) -> None:
    kernel.netdevs["vf0"] = HOST
    kernel.add("rxe0", soft="rxe", netdev="vf0")


def to_pod(kernel: RdmaKernel) -> None:
    kernel.move_netdev("vf0", POD)
    kernel.netdevs["net1"] = kernel.netdevs.pop("vf0")


def to_host(kernel: RdmaKernel) -> None:
    kernel.move_netdev("net1", HOST)
    kernel.netdevs["vf0"] = kernel.netdevs.pop("net1")


def test_the_hosts_soft_device_is_ended_before_its_netdev_leaves_and_no_other_is(kernel: RdmaKernel) -> None:
    """Ending by itself takes it some time: it would still be there under its name when the pod's is made."""
    soft_vf(kernel)
    rdmasoft.end([MLX, RXE], "vf0", SIDES)
    assert set(where(kernel)) == {"mlx5_0", "mlx5_2"}
    to_pod(kernel)
    rdmasoft.give([RXE], "net1", SIDES)
    rdmasoft.end([RXE], "vf0", SIDES)
    assert where(kernel)["rxe0"] == POD, "what is in the pod already stays there"


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_soft_device_is_made_anew_over_the_pods_interface(kernel: RdmaKernel, exclusive: bool) -> None:
    kernel.exclusive = exclusive
    soft_vf(kernel)
    to_pod(kernel)
    assert "rxe0" not in where(kernel), "it ended when its netdev left"
    rdmasoft.give([RXE], "net1", SIDES)
    rdmasoft.give([RXE], "net1", SIDES)
    assert kernel.named("rxe0").netdev == "net1"
    assert where(kernel)["rxe0"] == (POD if exclusive else HOST)
    assert len([change for change in kernel.changes if "over" in change]) == 1


@pytest.mark.parametrize("exclusive", [True, False])
def test_the_host_has_its_soft_device_again_when_the_netdev_is_home(
    kernel: RdmaKernel, exclusive: bool
) -> None:
    kernel.exclusive = exclusive
    soft_vf(kernel)
    before = list(kernel.devices.values())
    to_pod(kernel)
    rdmasoft.give([RXE], "net1", SIDES)
    rdmasoft.take_back([RXE], SIDES)
    assert "rxe0" not in where(kernel)
    to_host(kernel)
    assert rdmasoft.restore([RXE], "vf0", SIDES) == []
    assert list(kernel.devices.values()) == before
    assert rdmasoft.restore([RXE], "vf0", SIDES) == [], "and again"


def test_an_attempt_that_was_cut_short_after_making_the_device_is_finished(kernel: RdmaKernel) -> None:
    soft_vf(kernel)
    to_pod(kernel)
    kernel.add("rxe0", soft="rxe", netdev="net1")  # made, and the driver ended before it moved it
    rdmasoft.give([RXE], "net1", SIDES)
    assert where(kernel)["rxe0"] == POD


def test_a_kernel_that_cannot_move_soft_devices_is_told(kernel: RdmaKernel) -> None:
    soft_vf(kernel)
    to_pod(kernel)
    kernel.refusals[rdmanetlink.SET] = errno.EOPNOTSUPP
    with pytest.raises(AttachError, match=r"rxe0 cannot be made over net1 in the pod.*this kernel"):
        rdmasoft.give([RXE], "net1", SIDES)


def test_a_soft_device_whose_name_is_not_free_yet_is_a_problem_to_try_again(kernel: RdmaKernel) -> None:
    kernel.netdevs["vf0"] = HOST
    kernel.add("rxe0", soft="rxe", netdev="net1", namespace="ending")
    (problem,) = rdmasoft.restore([RXE], "vf0", SIDES)
    assert "tried again" in problem


def test_hardware_is_not_made_anew(kernel: RdmaKernel) -> None:
    rdmasoft.give([MLX], "net1", SIDES)
    assert rdmasoft.restore([MLX], "vf0", SIDES) == []
    rdmasoft.take_back([MLX], SIDES)
    rdma.MoveRdmaDevices([RXE]).apply(SIDES)
    assert kernel.changes == []


# --- the mode
@pytest.mark.parametrize(("exclusive", "mode"), [(True, "exclusive"), (False, "shared")])
def test_the_mode_is_the_kernels(kernel: RdmaKernel, exclusive: bool, mode: str) -> None:
    kernel.exclusive = exclusive
    assert rdmanetlink.netns_mode() == mode


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_kernel_that_does_not_know_the_question_shares(kernel: RdmaKernel, code: int) -> None:
    kernel.refusals[0x1406] = code
    assert rdmanetlink.netns_mode() == "shared"


def test_guids_are_written_as_in_sysfs(kernel: RdmaKernel) -> None:
    kernel.here = HOST
    with rdmanetlink.RdmaNetlink() as netlink:
        assert [link.node_guid for link in netlink.links()] == ["0000:0000:0000:0001", MLX.node_guid]
