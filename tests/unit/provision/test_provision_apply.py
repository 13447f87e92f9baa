"""What the plan says is done only where the machine is still what was planned for, and what was begun is ended; real
NICs: e2e/vnode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from railmate.attach.sriov import stable_guid, stable_mac
from railmate.inventory.model import Inventory
from railmate.provision import naming
from railmate.provision.apply import Outcome, apply
from railmate.provision.plan import PfChange
from railmate.provision.unfinished import Unfinished
from railmate_api.provisioning import PfRule, PfSelector
from unit.provision.fake_pf import PF, FakePf, nobody, vf_address


class Nic:
    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.fake, self.root = FakePf(root / "sys"), root
        self.fake.patch(patch)
        self.fake.setup()
        self.unfinished = Unfinished(root / "provisioning", "this boot")
        self.held: frozenset[str] = frozenset()

    def change(
        self,
        vfs: int,
        *,
        resize: bool = True,
        finish: bool = False,
        mtu: int | None = None,
        eswitch: str | None = None,
        busy: dict[str, str] | None = None,
    ) -> Outcome:
        rule = PfRule(PfSelector(address=PF), vfs, mtu, eswitch)
        change = PfChange(PF, self.fake.vfs(), rule, resize, finish, busy=busy or {})
        return apply(change, self.fake.inventory(), self._claims, self.fake.root, self.unfinished)

    @contextmanager
    def _claims(self, physical_function: str) -> Iterator[frozenset[str]]:
        assert physical_function == PF
        yield self.held

    def are_made(self, vfs: int) -> bool:
        return self.fake.vfs() == vfs and all(
            (self.fake.name(n), self.fake.driver(n)) == (stable_mac("b8:59:9f:00:00:01", n), "vfdriver")
            for n in range(vfs)
        )


@pytest.fixture
def nic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nic:
    monkeypatch.setattr(naming, "_PAUSE", 0.0)
    return Nic(tmp_path, monkeypatch)


def test_vfs_have_names_and_drivers_and_nothing_is_left_to_be_finished(nic: Nic) -> None:
    assert nic.change(3) == Outcome()
    assert nic.are_made(3)
    assert nic.fake.read("sriov_drivers_autoprobe") == "1"
    assert nic.unfinished.addresses() == frozenset()
    assert list((nic.root / "provisioning").iterdir()) == []


# --- the machine is another one than planned for
def test_a_nic_whose_number_of_vfs_has_changed_since_the_look_is_left_for_the_next(nic: Nic) -> None:
    """Its new VFs may be in use."""
    nic.fake.setup(1)
    change = PfChange(PF, 0, PfRule(PfSelector(address=PF), 4), resize=True)
    outcome = apply(change, Inventory(), nobody, nic.fake.root, nic.unfinished)
    assert outcome.problems[0].startswith(f"{PF}: it had 0 VFs and has 1 now")
    assert (outcome.made, outcome.again) == (False, True)
    assert nic.fake.vfs() == 1


@pytest.mark.parametrize("taken", [PF, vf_address(0)])
def test_a_nic_that_a_claim_has_got_since_the_look_is_not_re_sized(nic: Nic, taken: str) -> None:
    nic.fake.setup(1)
    nic.held = frozenset({taken, "0000:0d:00.1"})
    outcome = nic.change(4)
    assert outcome.problems[0].startswith(
        f"{PF}: a claim has got {taken} meanwhile, so it keeps its 1 VFs. It is looked at anew"
    )
    assert (outcome.made, outcome.again) == (False, True)
    assert nic.fake.vfs() == 1


# --- names
def test_a_nic_that_is_not_ready_yet_is_waited_for(nic: Nic) -> None:
    """i40e and ice say so of VFs that were just made."""
    nic.fake.not_ready = 5
    assert nic.change(3) == Outcome()
    assert nic.are_made(3)


@pytest.mark.parametrize("way", ["never", "not in time"])
def test_vfs_that_take_no_names_get_drivers_and_people_are_told(
    nic: Nic, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    nic.fake.never_named, nic.fake.not_ready = way == "never", 1000
    monkeypatch.setattr(naming, "_PATIENCE", 0.0)
    outcome = nic.change(3)
    assert outcome.made
    (told,) = outcome.problems
    assert "VF 0 of ens1 does not take the MAC" in told
    assert "and 2 more of its VFs" in told
    assert [nic.fake.driver(n) for n in range(3)] == ["vfdriver"] * 3
    assert nic.unfinished.addresses() == frozenset()


@pytest.mark.parametrize(("infiniband", "said"), [(True, "load the module ib_ipoib"), (False, "MACs")])
def test_a_nic_without_netdev_gives_its_vfs_no_names_and_people_are_told(
    nic: Nic, infiniband: bool, said: str
) -> None:
    nic.fake.netdev, nic.fake.infiniband = None, infiniband
    nic.fake.setup()
    outcome = nic.change(2)
    assert outcome.made
    (told,) = outcome.problems
    assert said in told
    assert [nic.fake.driver(n) for n in range(2)] == ["vfdriver"] * 2


def test_vfs_of_infiniband_are_named_by_guids(nic: Nic) -> None:
    nic.fake.infiniband = True
    assert nic.change(2) == Outcome()
    assert [nic.fake.name(n) for n in range(2)] == [
        stable_guid("b8:59:9f:03:00:00:00:01", n) for n in range(2)
    ]


# --- drivers
def test_vfs_for_which_there_is_no_driver_yet_are_finished_later(nic: Nic) -> None:
    nic.fake.no_driver = {vf_address(1)}
    outcome = nic.change(3)
    assert (outcome.made, outcome.again) == (False, True)
    assert f"{vf_address(1)} found no driver" in outcome.problems[0]
    assert nic.unfinished.addresses() == {PF}
    nic.fake.no_driver = set()
    assert nic.change(3, resize=False, finish=True) == Outcome()
    assert nic.are_made(3)
    assert nic.unfinished.addresses() == frozenset()


def test_a_vf_that_a_claim_has_without_driver_for_a_moment_is_not_finished(nic: Nic) -> None:
    """On its way to vfio-pci."""
    nic.fake.no_driver = {vf_address(0), vf_address(1)}
    nic.change(2)
    nic.fake.no_driver, nic.held = set(), frozenset({vf_address(0)})
    assert nic.change(2, resize=False, finish=True) == Outcome()
    assert [nic.fake.driver(n) for n in range(2)] == [None, "vfdriver"]


def test_who_has_switched_the_looking_for_drivers_off_keeps_it_off_and_is_told(nic: Nic) -> None:
    nic.fake.setup(autoprobe="0")
    outcome = nic.change(2)
    assert "somebody has set sriov_drivers_autoprobe to 0" in outcome.problems[0]
    assert nic.fake.driver(0) is None
    assert nic.fake.read("sriov_drivers_autoprobe") == "0"
    assert nic.unfinished.addresses() == frozenset()


def test_what_was_begun_before_the_node_was_started_anew_is_forgotten(nic: Nic) -> None:
    Unfinished(nic.root / "provisioning", "an earlier boot").begin(PF, False)
    assert nic.unfinished.addresses() == frozenset()
    assert nic.change(2) == Outcome()
    assert nic.are_made(2)


def test_a_record_that_is_damaged_counts_as_begun(nic: Nic) -> None:
    (nic.root / "provisioning").mkdir()
    (nic.root / "provisioning" / f"{PF}.json").write_text("{")
    assert nic.unfinished.addresses() == {PF}
    assert nic.change(2) == Outcome()
    assert nic.are_made(2)


# --- the embedded switch
def test_legacy_is_what_a_nic_without_embedded_switch_has(nic: Nic) -> None:
    nic.fake.setup(2, mode=None)
    assert nic.change(3, eswitch="legacy") == Outcome()
    assert nic.are_made(3)


@pytest.mark.parametrize("vfs", [0, 2])
def test_switchdev_on_a_nic_without_embedded_switch_is_refused_before_anything_is_touched(
    nic: Nic, vfs: int
) -> None:
    nic.fake.setup(vfs, mode=None)
    before = nic.fake.state()
    outcome = nic.change(3, eswitch="switchdev", mtu=9000)
    assert (outcome.made, outcome.again) == (False, False)
    assert "leave eswitch out of its rule" in outcome.problems[0]
    assert nic.fake.state() == before


def test_vfs_are_there_again_after_their_nic_has_refused_a_mode(nic: Nic) -> None:
    nic.fake.setup(2)
    nic.fake.mode_refused = True
    outcome = nic.change(3, eswitch="switchdev")
    assert (outcome.made, outcome.again) == (False, False), "each attempt would take them away"
    assert "cannot be set to switchdev: refused; it has its 2 VFs again" in outcome.problems[0]
    assert nic.are_made(2)
    assert nic.unfinished.addresses() == frozenset()


def test_a_mode_is_changed_while_there_are_no_vfs(nic: Nic) -> None:
    nic.fake.setup(2)
    assert nic.change(3, eswitch="switchdev") == Outcome()
    assert nic.fake.state()["mode"] == "switchdev"
    assert nic.are_made(3)


# --- MTU
@pytest.mark.parametrize("use", ["as planned", "by a claim since"])
def test_the_mtu_stays_while_a_vf_is_in_use(nic: Nic, use: str) -> None:
    """igb resets the whole NIC for another one."""
    nic.fake.setup(2)
    if use == "by a claim since":
        nic.held = frozenset({vf_address(1)})
    busy = {vf_address(1): "its netdev has an IP address"} if use == "as planned" else {}
    outcome = nic.change(2, resize=False, mtu=9000, busy=busy)
    assert nic.fake.read("mtu") == "1500"
    assert outcome.made
    (told,) = outcome.problems
    assert "keeps its MTU 1500, and so do its VFs, until all of them are free" in told
    assert f"{vf_address(1)} is in use" in told


def test_the_mtu_is_changed_while_all_vfs_are_free(nic: Nic) -> None:
    nic.fake.setup(2)
    assert nic.change(2, resize=False, mtu=9000) == Outcome()
    assert nic.fake.read("mtu") == "9000"
