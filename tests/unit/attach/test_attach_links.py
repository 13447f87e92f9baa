"""Which of several interfaces is the wanted device, and steps that are undone."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from railmate.attach.errors import AttachError
from railmate.attach.links import Link, attempt, find
from railmate.attach.steps import apply_all

VF = "0000:c1:00.2"
MAC = "02:00:00:00:00:01"
OTHER_MAC = "02:00:00:00:00:99"


def link(index: int, name: str, mac: str = MAC, parent: str | None = None) -> Link:
    return Link(index, name, mac, 1500, False, parent)


def test_hardware_is_known_by_its_pci_address_whatever_a_container_changed() -> None:
    vf = link(7, "renamed", mac=OTHER_MAC, parent=VF)
    decoy = link(3, "net1", mac=MAC, parent=None)
    assert find([decoy, vf], parent=VF, mac=MAC, index=3, name="net1") is vf


def test_another_function_is_never_taken_for_it() -> None:
    assert find([link(7, "net1", parent="0000:c1:00.3")], parent=VF, mac=MAC, index=7, name="net1") is None


def test_of_several_interfaces_of_one_function_mac_then_index_then_name_choose() -> None:
    ports = [link(4, "a", "m4", VF), link(5, "b", "m5", VF), link(6, "c", "m6", VF)]
    assert find(ports, parent=VF, mac="m6", index=5, name="a") is ports[2]
    assert find(ports, parent=VF, mac="gone", index=5, name="a") is ports[1]
    assert find(ports, parent=VF, mac="gone", index=99, name="a") is ports[0]


def test_without_hardware_the_mac_then_the_index_then_the_name_decide() -> None:
    links = [link(2, "eth0", OTHER_MAC), link(5, "net1", "m5"), link(6, "x", "m6")]
    assert find(links, parent=None, mac="m6", index=5, name="eth0") is links[2]
    assert find(links, parent=None, mac="gone", index=5, name="x") is links[1]
    assert find(links, parent=None, mac="gone", name="x") is links[2]
    assert find(links, parent=None, mac="gone") is None


def test_a_device_without_known_hardware_is_no_real_one_with_the_same_mac() -> None:
    assert find([link(2, "eth0", MAC, parent="virtio2")], parent=None, mac=MAC, name="eth0") is None


class Note:
    def __init__(self, log: list[str], name: str, *, fails: str = "", undo_fails: str = "") -> None:
        self.log, self.name, self.fails, self.undo_fails = log, name, fails, undo_fails

    def apply(self, sides: Any) -> None:
        self.log.append(f"+{self.name}")
        if self.fails:
            raise AttachError(self.fails)

    def undo(self, sides: Any) -> None:
        self.log.append(f"-{self.name}")
        if self.undo_fails:
            raise AttachError(self.undo_fails)


def test_steps_are_undone_in_reverse_the_failed_one_first() -> None:
    log: list[str] = []
    steps = [Note(log, "a"), Note(log, "b"), Note(log, "c", fails="c is broken"), Note(log, "d")]
    with pytest.raises(AttachError, match=r"^c is broken$"):
        apply_all(steps, None)  # type: ignore[arg-type]
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]


def test_an_undo_that_fails_is_told_and_does_not_stop_the_others() -> None:
    log: list[str] = []
    steps = [Note(log, "a"), Note(log, "b", undo_fails="b stays"), Note(log, "c", fails="c is broken")]
    with pytest.raises(AttachError, match=r"^c is broken; then b stays$"):
        apply_all(steps, None)  # type: ignore[arg-type]
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]


def test_an_error_of_the_kernel_keeps_its_number() -> None:
    """For who waits until a NIC is ready."""
    with pytest.raises(AttachError, match="VF 0 cannot be named") as failed, attempt("VF 0 cannot be named"):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    assert failed.value.code == errno.EAGAIN
    assert AttachError("of another cause").code == 0
