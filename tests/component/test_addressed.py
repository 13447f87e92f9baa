"""On which netdevs the node has IP addresses, asked of the real kernel."""

from __future__ import annotations

import os

import pytest

from component.netdev_lab import run, veths
from railmate.inventory.addressed import addressed_functions, addressed_names
from railmate.inventory.model import Inventory, Netdev, Nic, PciFunction

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes netdevs: needs root")


def test_a_netdev_with_an_address_counts_and_so_does_what_it_stands_on() -> None:
    with veths("ra") as make:
        plain, v4, v6, below = (make(number) for number in range(4))
        upper = f"{below}m"
        run("ip", "link", "add", upper, "link", below, "type", "macvlan")  # goes with it
        for name in (plain, v4, v6, below, upper):  # up, so that the kernel gives each a link-local address
            run("ip", "link", "set", name, "up")
        run("ip", "address", "add", "192.0.2.1/32", "dev", v4)
        run("ip", "address", "add", "2001:db8::1/64", "dev", v6)
        run("ip", "address", "add", "198.51.100.1/24", "dev", upper)
        names = addressed_names()
        assert {v4, v6, upper, below} <= names
        assert plain not in names


def test_functions_are_known_by_their_netdevs_alone() -> None:
    """An address of a physical function says nothing of its VFs."""
    pf, vf = "0000:0c:00.0", "0000:0c:00.1"
    functions = [
        PciFunction(pf, ("pci0000:00", pf), 0x020000, 0x15B3, 0x101B, netdevs=(Netdev("ens1"),)),
        PciFunction(
            vf,
            ("pci0000:00", vf),
            0x020000,
            0x15B3,
            0x101C,
            physical_function=pf,
            netdevs=(Netdev("ens1v0"),),
        ),
    ]
    inventory = Inventory({one.address: one for one in functions}, nics=tuple(Nic(one) for one in functions))
    assert addressed_functions(inventory, {"ens1"}) == {pf}
    assert addressed_functions(inventory, {"ens1v0"}) == {vf}
