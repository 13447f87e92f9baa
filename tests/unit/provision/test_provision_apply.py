"""What the plan says is done only where the machine is still what was planned for; real NICs: e2e/vnode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from railmate.inventory.model import Inventory
from railmate.provision.apply import apply
from railmate.provision.plan import PfChange, ProvisioningPlan
from railmate_api.provisioning import PfRule, PfSelector

PHYSICAL = "0000:0c:00.0"


@contextmanager
def nobody(physical_function: str) -> Iterator[frozenset[str]]:
    yield frozenset()


def test_a_nic_whose_number_of_vfs_has_changed_since_the_look_is_left_for_the_next(tmp_path: Path) -> None:
    """Its new VFs may be in use."""
    directory = tmp_path / "bus/pci/devices" / PHYSICAL
    directory.mkdir(parents=True)
    (directory / "virtfn0").symlink_to("../0000:0c:00.1")
    (directory / "sriov_numvfs").write_text("1\n")
    change = PfChange(PHYSICAL, 0, PfRule(PfSelector(address=PHYSICAL), 4), resize=True)
    (problem,) = apply(ProvisioningPlan((change,)), Inventory(), nobody, tmp_path)
    assert problem.startswith(f"{PHYSICAL}: it had 0 VFs and has 1 now")
    assert (directory / "sriov_numvfs").read_text() == "1\n"


@pytest.mark.parametrize("taken", [PHYSICAL, "0000:0c:00.1"])
def test_a_nic_that_a_claim_has_got_since_the_look_is_not_re_sized(tmp_path: Path, taken: str) -> None:
    directory = tmp_path / "bus/pci/devices" / PHYSICAL
    directory.mkdir(parents=True)
    (directory / "virtfn0").symlink_to("../0000:0c:00.1")
    (directory / "sriov_numvfs").write_text("1\n")
    change = PfChange(PHYSICAL, 1, PfRule(PfSelector(address=PHYSICAL), 4), resize=True)
    asked = []

    @contextmanager
    def claims(physical_function: str) -> Iterator[frozenset[str]]:
        asked.append(physical_function)
        yield frozenset({taken, "0000:0d:00.1"})

    (problem,) = apply(ProvisioningPlan((change,)), Inventory(), claims, tmp_path)
    assert problem.startswith(f"{PHYSICAL}: a claim has got {taken} meanwhile, so it keeps its 1 VFs")
    assert asked == [PHYSICAL]
    assert (directory / "sriov_numvfs").read_text() == "1\n"
