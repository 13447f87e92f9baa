"""The ledger: whole or absent, readable one version back and forth, never a reason to stop."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_world import BOOT, VFS, claim, ref, uid, view
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from railmate.attach.model import AttachedNetdev, NetdevSnapshot
from railmate.claims.ledger import Ledger, boot_id
from railmate.claims.plan import make_plan
from railmate.claims.records import Attachment, ClaimRef, Entry, PreparedDevice, PreparedNic
from railmate.errors import RailmateError


def entry(number: int = 1) -> Entry:
    plan = make_plan(claim(number, "pair-0"), ref(number), view(), ())
    snapshot = NetdevSnapshot(VFS[0], "vf0", "02:00:00:00:00:01", 1500, True, VFS[0])
    devices = tuple(
        PreparedDevice(
            **{
                **{name: getattr(device, name) for name in PreparedDevice.__dataclass_fields__},
                "nics": tuple(PreparedNic(nic.address, nic.interface, snapshot) for nic in device.nics),
            }
        )
        for device in plan.devices
    )
    netdev = AttachedNetdev(VFS[0], "net1", 7, "02:00:00:00:00:01", 1500)
    attachment = Attachment("sandbox-1", "pod-1", "team/pod-1", "/run/netns/1", True, (netdev,))
    return Entry(ref(number), plan.pods, devices, BOOT, "pair", attachment)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def file_of(ledger: Ledger, number: int = 1) -> Path:
    (path,) = ledger.plugin_dir.rglob(f"{uid(number)}.json")
    return path


def test_what_was_put_is_read_back(ledger: Ledger) -> None:
    ledger.put(entry())
    assert ledger.get(uid(1)) == entry()
    assert Ledger(ledger.plugin_dir).entries() == {uid(1): entry()}


def test_dropped_entry_is_gone_and_dropping_twice_is_fine(ledger: Ledger) -> None:
    ledger.put(entry())
    ledger.drop(uid(1))
    ledger.drop(uid(1))
    assert ledger.get(uid(1)) is None
    assert ledger.entries() == {}


def test_unknown_claim_is_none(ledger: Ledger) -> None:
    assert ledger.get(uid(9)) is None


@pytest.mark.parametrize("bad", ["", "../x", "a/b", "a.b", "*"])
def test_uid_that_is_a_path_is_refused(ledger: Ledger, bad: str) -> None:
    with pytest.raises(RailmateError, match="UID"):
        ledger.get(bad)


def test_fields_of_a_later_version_are_ignored_at_every_level(ledger: Ledger) -> None:
    ledger.put(entry())
    path = file_of(ledger)

    def with_more(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_more(item) for key, item in value.items()} | {"fromTheFuture": [1]}
        return [with_more(item) for item in value] if isinstance(value, list) else value

    value = with_more(json.loads(path.read_text()))
    for device in value["devices"]:  # attributes are free-form
        device["attributes"].pop("fromTheFuture")
        for attribute in device["attributes"].values():
            attribute.pop("fromTheFuture")
    path.write_text(json.dumps(value))
    assert ledger.get(uid(1)) == entry()


def test_fields_that_an_older_version_did_not_write_have_defaults(ledger: Ledger) -> None:
    ledger.put(entry())
    path = file_of(ledger)
    value = json.loads(path.read_text())
    for name in ("pod_claim_name", "attachment"):
        del value[name]
    for device in value["devices"]:
        for name in ("nodes", "vendor_cdi_ids", "attributes", "gpus"):
            del device[name]
    path.write_text(json.dumps(value))
    got = ledger.get(uid(1))
    assert got is not None
    assert got.attachment is None
    assert got.nics == entry().nics


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "5",
        '"x"',
        "{}",
        '{"version": 1}',
        '{"version": "1"}',
        "\x00" * 512,
    ],
)
def test_file_that_is_no_entry_is_set_aside_and_rebuilt(
    ledger: Ledger, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.put(entry(1))
    ledger.put(entry(2))
    path = file_of(ledger)
    path.write_text(text)
    assert ledger.entries() == {uid(1): entry(1), uid(2): entry(2)}
    assert path.with_suffix(".bad").read_text() == text
    assert str(path) in caplog.text
    assert ledger.get(uid(1)) == entry(1)


def test_file_that_cannot_be_rebuilt_is_set_aside_and_the_rest_goes_on(ledger: Ledger) -> None:
    told: list[str] = []
    ledger = Ledger(ledger.plugin_dir, told.append)
    ledger.put(entry(1))
    ledger.put(entry(2))
    path = file_of(ledger)
    path.write_text("{")
    path.with_suffix(".prepared").write_text("{")
    assert set(ledger.entries()) == {uid(2)}
    assert not path.exists()
    assert path.with_suffix(".bad").exists()
    (message,) = told
    assert uid(1) in message
    assert "delete the pod" in message


def test_file_of_a_newer_version_is_left_for_who_wrote_it(ledger: Ledger) -> None:
    ledger.put(entry(1))
    ledger.put(entry(2))
    path = file_of(ledger)
    path.write_text('{"version": 99}')
    assert set(ledger.entries()) == {uid(2)}
    with pytest.raises(RailmateError, match="newer railmate"):
        ledger.get(uid(1))
    assert path.read_text() == '{"version": 99}'


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damaged_file_stops_the_ledger(ledger: Ledger, data: st.DataObject) -> None:
    """Cut anywhere, with bytes flipped, or with any value replaced by any other JSON."""
    ledger.put(entry(), durable=False)
    path = file_of(ledger)
    raw = path.read_bytes()
    how = data.draw(st.sampled_from(["cut", "flip", "replace"]))
    if how == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    elif how == "flip":
        at = data.draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :]
    else:
        value = json.loads(raw)
        holder, keys = value, [data.draw(st.sampled_from(sorted(value)))]
        while isinstance(holder[keys[-1]], dict | list) and holder[keys[-1]] and data.draw(st.booleans()):
            holder = holder[keys[-1]]
            keys.append(
                data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
            )
        any_json = st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=3
        )
        holder[keys[-1]] = data.draw(any_json)
        raw = json.dumps(value).encode()
    path.write_bytes(raw)
    for found in ledger.entries().values():
        assert found.hardware is not None
        json.dumps(found.to_json())
    for bad in path.parent.glob("*.bad"):
        bad.unlink()


def test_entry_under_another_claims_file_name_is_not_believed(ledger: Ledger) -> None:
    ledger.put(entry(1))
    file_of(ledger).rename(file_of(ledger).with_name(f"{uid(2)}.json"))
    assert uid(1) not in ledger.entries() or ledger.get(uid(1)) is not None


def test_file_that_cannot_be_read_for_the_moment_is_not_thrown_away(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of descriptors or memory: the entry is good, and so is the pod that relies on it."""
    ledger.put(entry())

    def fail(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        try:
            ledger.entries()
        except Exception:  # saying so is fine
            pass
    assert ledger.entries() == {uid(1): entry()}


def test_full_disk_leaves_the_old_entry_and_nothing_else(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.put(entry().with_attachment(None))
    before = sorted(path.name for path in ledger.plugin_dir.rglob("*"))

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RailmateError, match="space"):
            ledger.put(entry())
    assert ledger.get(uid(1)) == entry().with_attachment(None)
    assert sorted(path.name for path in ledger.plugin_dir.rglob("*")) == before


def test_files_left_by_a_killed_writer_are_not_entries(ledger: Ledger) -> None:
    ledger.put(entry())
    (file_of(ledger).parent / f".{uid(3)}-abcdef").write_text("{")
    assert set(ledger.entries()) == {uid(1)}


def test_durable_entries_are_forced_to_disk_and_others_are_not(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    ledger.put(entry(), durable=False)
    assert synced == []
    ledger.put(entry())
    assert len(synced) == 2  # the file and its directory


def test_ledger_is_for_root_only(ledger: Ledger) -> None:
    ledger.put(entry())
    assert file_of(ledger).stat().st_mode & 0o077 == 0


# --- the gate's markers
def test_gate_opens_for_one_claim_and_sandbox(ledger: Ledger) -> None:
    ledger.open_gate(uid(1), "sandbox-1")
    ledger.open_gate(uid(2), "sandbox-1")
    ledger.close_gate(uid(1))
    assert [path.name for path in ledger.attached_dir.iterdir()] == [f"{uid(2)}.sandbox-1"]


def test_closing_takes_all_sandboxes_of_the_claim(ledger: Ledger) -> None:
    for name in ("sandbox-1", "sandbox-2"):
        ledger.open_gate(uid(1), name)
    ledger.close_gate(uid(1))
    ledger.close_gate(uid(1))
    assert list(ledger.attached_dir.iterdir()) == []


# --- the lock
def test_lock_is_reentrant_within_a_thread(ledger: Ledger) -> None:
    with ledger.locked(), ledger.locked():
        ledger.put(entry())
    with ledger.locked():
        assert ledger.entries()


def test_lock_keeps_other_threads_out(ledger: Ledger) -> None:
    inside, entered = threading.Event(), threading.Event()

    def other() -> None:
        inside.set()
        with ledger.locked():
            entered.set()

    with ledger.locked(), ledger.locked():
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
        assert not entered.wait(0.1)
    assert entered.wait(5)
    thread.join()


def test_lock_keeps_other_processes_out_and_ends_with_its_holder(ledger: Ledger) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom railmate.claims.ledger import Ledger\n"
        "with Ledger(Path(sys.argv[1])).locked():\n print('held', flush=True)\n sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(ledger.plugin_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        entered = threading.Event()

        def take() -> None:
            with ledger.locked():
                entered.set()

        thread = threading.Thread(target=take)
        thread.start()
        assert not entered.wait(0.2)
        holder.kill()  # as the kernel ends a driver: no clean-up of its own
        assert entered.wait(5)
        thread.join()
    finally:
        holder.kill()
        holder.communicate()


def test_lock_is_free_again_after_an_error(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError), ledger.locked():
        raise RuntimeError
    with Ledger(ledger.plugin_dir).locked():
        pass


def test_boot_id_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("abc\n")
    assert boot_id(tmp_path) == "abc"
    assert boot_id() == boot_id()


def test_claim_reads_as_users_write_it() -> None:
    assert str(ClaimRef("u", "team", "pair")) == "ResourceClaim team/pair"


def test_entries_are_found_by_what_is_in_their_record(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.put(entry(1))
    ledger.put(replace(entry(2), pods=("pod-2",), attachment=None))
    assert ledger.entries(mentioning="pod-1").keys() == {uid(1)}
    assert ledger.entries(mentioning="sandbox-1").keys() == {uid(1)}
    assert ledger.entries(mentioning=ref(1).namespace).keys() == {uid(1), uid(2)}
    assert ledger.entries(mentioning="pod-3") == {}
