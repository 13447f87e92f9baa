"""The slices are kept by the instance that registered last, as long as that lives."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from own_process import in_a_process_of_its_own

from railmate.node import instances as module
from railmate.node.agent import Agent
from railmate.node.instances import Instances


def files(plugin_dir: Path) -> list[str]:
    return [file.name for file in (plugin_dir / "instances").iterdir()]


def test_an_instance_is_outdone_by_one_that_registers_after_it_until_that_is_killed(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.registered()
    assert not elder.outdone(), "nobody is beside it"
    with in_a_process_of_its_own(younger.registered):
        assert elder.outdone()
        assert len(files(tmp_path)) == 2
    assert not elder.outdone()
    assert len(files(tmp_path)) == 1, "what the killed one left is removed"


def test_it_is_not_outdone_by_one_that_registered_before_it(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    with in_a_process_of_its_own(elder.registered):
        younger.registered()
        assert not younger.outdone()
        assert len(files(tmp_path)) == 2, "the other's file stays while it lives"


def test_until_it_is_registered_it_leaves_the_slices_to_who_is(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    assert not younger.outdone(), "alone it publishes before the kubelet asks it"
    elder.registered()
    assert younger.outdone()


def test_whom_the_kubelet_registers_again_it_asks(tmp_path: Path) -> None:
    """After a restart of the kubelet, in any order."""
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    for one in (elder, younger, elder):
        one.registered()
    assert not elder.outdone()
    assert younger.outdone()
    assert len(files(tmp_path)) == 2


def test_one_that_ends_leaves_the_slices_to_the_other_before_its_process_ends(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.registered()
    younger.registered()
    assert elder.outdone()
    with in_a_process_of_its_own(lambda: None):  # which has the lock's descriptor, too
        younger.leave()
        younger.registered()  # as a call that was under way does
        assert not elder.outdone()
        assert len(files(tmp_path)) == 1


def test_one_that_does_not_see_to_the_slices_any_more_keeps_them_no_longer(tmp_path: Path) -> None:
    """A process that hangs holds its lock and answers nobody."""
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.registered()
    younger.registered()
    assert elder.outdone()
    long_ago = time.time() - module._SILENT - 1
    for name in files(tmp_path):
        os.utime(tmp_path / "instances" / name, (long_ago, long_ago))
    assert not elder.outdone()
    younger.kept()
    assert elder.outdone()


def test_one_that_is_refused_leaves_the_slices_to_the_other_until_it_is_registered_again(
    tmp_path: Path,
) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.registered()
    younger.registered()
    younger.withdraw()
    younger.kept()  # that alone does not change it
    assert not elder.outdone()
    assert younger.outdone()
    younger.registered()
    assert elder.outdone()


def test_while_it_is_registered_again_nobody_takes_it_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk may be full just then."""
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.registered()
    younger.registered()

    def full(self: Path, target: Path) -> Path:
        assert elder.outdone(), "its former file stays until there is the new one"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    younger.registered()
    assert "No space left on device" in caplog.text
    assert elder.outdone()
    assert len(files(tmp_path)) == 2


def test_what_instances_left_is_removed_when_another_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        with in_a_process_of_its_own(Instances(tmp_path).registered):
            pass
    (tmp_path / "instances/starting-1-1").touch()
    first = Instances(tmp_path)
    first.registered()
    first.leave()
    assert "starting-1-1" in files(tmp_path), "it may only just be made"
    monkeypatch.setattr(module, "_STARTED", 0)
    last = Instances(tmp_path)
    last.registered()
    assert len(files(tmp_path)) == 1


def test_strange_files_outdo_nobody(tmp_path: Path) -> None:
    (tmp_path / "instances").mkdir()
    (tmp_path / "instances/notes.txt").write_text("not ours")
    one = Instances(tmp_path)
    one.registered()
    assert not one.outdone()
    assert "notes.txt" in files(tmp_path)


def test_where_no_file_can_be_made_that_is_told_and_the_instance_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "instances").write_text("in the way")
    one = Instances(tmp_path)
    one.registered()
    assert "may write its own devices" in caplog.text
    assert not one.outdone()
    one.kept()
    one.leave()


def test_a_file_that_could_not_be_made_is_made_when_the_slices_are_seen_to(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    (tmp_path / "instances").write_text("in the way")
    younger.registered()
    (tmp_path / "instances").unlink()
    younger.kept()
    assert elder.outdone()


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    """As much of one as has to do with this."""
    found: Any = Agent.__new__(Agent)
    found._instances = Instances(tmp_path)
    found._offers = SimpleNamespace(repeat=lambda: found.repeated.append(True))
    found._controller = SimpleNamespace(left_to_another=False)
    found._nri = SimpleNamespace(connected=True)
    found._reports = SimpleNamespace(node_event=lambda reason, message: None)
    found._registered = found._published = False
    found.repeated = []
    return found


def test_the_agent_offers_its_devices_again_when_the_kubelet_has_registered_it(
    agent: Any, tmp_path: Path
) -> None:
    other = Instances(tmp_path)
    agent._on_registered(True)
    assert agent.repeated == [True]
    assert other.outdone()
    agent._on_registered(False)
    assert agent.repeated == [True]
    assert not other.outdone()


def test_the_agent_tells_that_it_sees_to_the_slices_and_that_they_were_refused(
    agent: Any, tmp_path: Path
) -> None:
    other = Instances(tmp_path)
    agent._on_registered(True)
    (name,) = files(tmp_path)
    os.utime(tmp_path / "instances" / name, (0, 0))
    assert not other.outdone()
    agent._on_published()
    assert other.outdone()
    agent._on_refused("too many attributes")
    assert not other.outdone()


def test_an_agent_whose_slices_are_anothers_is_ready_once_the_kubelet_has_registered_it(agent: Any) -> None:
    """After a reboot in the middle of an update the kubelet may have asked the elder last: that one is ended only when
    this one is ready."""
    agent._controller.left_to_another = True
    assert len(asyncio.run(agent._missing())) == 2
    agent._on_registered(True)
    assert asyncio.run(agent._missing()) == []
    agent._controller.left_to_another = False
    assert asyncio.run(agent._missing()) == ["the ResourceSlices are not published"]
