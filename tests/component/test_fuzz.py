"""Nonsense from the kubelet, the API server and the disk: a clear error, nothing lost, the process lives on.

Each hypothesis example is a seed and makes a handful of inputs, so that twenty thousand fit into a minute; the seed
of a failure is shown and repeats it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import note
from hypothesis import strategies as st

import railmate.claims.attachments as attachments
import railmate.claims.preparation as preparation
import railmate.claims.presence as presence
import railmate.claims.strays as strays
from component.fuzz_inputs import ODD, damaged, fuzz, mutated, whole_config
from railmate.attach.model import (
    AttachedNetdev,
    MoveRequest,
    NetdevReturn,
    NetdevSnapshot,
    ReturnRequest,
    ReturnState,
)
from railmate.cdi.vendor import VendorSpecs
from railmate.claims.ledger import Ledger
from railmate.claims.reconcile import Reconciler
from railmate.claims.records import ClaimRef, NewerRecordError
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.state import ClaimState
from railmate.errors import RailmateError
from railmate.kube.errors import ApiError
from railmate.kubelet.server import KubeletServer, probe
from railmate.kubelet.sockets import sockets
from railmate_api.config import KINDS, ConfigError, decode, merge
from railmate_api.proto import dra_v1_pb2, dra_v1beta1_pb2
from unit.claims.claims_world import (
    BOOT,
    DRIVER,
    GPUS,
    VFS,
    FakeClaims,
    claim,
    config,
    ref,
    sandbox,
    share,
    uid,
    view,
)

#: Inputs by subject; the last test looks whether there were enough.
inputs: Counter[str] = Counter()
#: Environment variable: the seed of the gRPC requests, to repeat those of an earlier run.
_SEED = "RAILMATE_FUZZ_SEED"
_EACH = 20  # inputs an example
#: What each subject has at least; in all, twenty thousand.
_WANTED = {"ledger": 3_200, "strays": 1_500, "CDI": 2_000, "claims": 6_000, "configs": 10_000, "gRPC": 4_000}


class Api(FakeClaims):
    def get_claim(self, namespace: str, name: str) -> dict[str, Any]:
        if name not in self.claims:
            raise ApiError(f'resourceclaims "{name}" not found', 404, "NotFound")
        return super().get_claim(namespace, name)


class Node:
    """The parts of a driver that claims go through, on a directory; the kernel says yes to everything."""

    def __init__(self, root: Path) -> None:
        self.root, self.api = root, Api()
        self.plugin, self.cdi = root / "plugins" / DRIVER, root / "cdi"
        self.cdi.mkdir()
        self.ledger = Ledger(self.plugin)
        files = RuntimeFiles(DRIVER, self.plugin, self.cdi, self.plugin / "gate")
        self.state = ClaimState(self.api, view(), self.ledger, files, BOOT)
        self.reconciler = Reconciler(self.api, self.ledger, files, self.state.moves, self.state.unprepare)

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file() and path.suffix != ".lock"
        }


def _snapshot(name: str, address: str, *wanted: object) -> NetdevSnapshot:
    return NetdevSnapshot(address, name, "02:00:00:00:00:01", 1500, True, address)


def _attach_all(requests: Sequence[MoveRequest], netns: Path, *alone: object) -> list[AttachedNetdev]:
    return [AttachedNetdev(r.snapshot.pci_address, r.name, 7, r.snapshot.mac, 1500) for r in requests]


def _return_all(
    requests: Sequence[ReturnRequest], netns: Path | None, *, wait: float = 1.0
) -> list[NetdevReturn]:
    for request in requests:  # netlink would refuse other types with an error of its own
        wanted = request.snapshot
        assert isinstance(wanted.name, str)
        assert isinstance(wanted.mac, str)
        assert isinstance(wanted.mtu, int)
    home = ReturnState.ALREADY_HOME
    return [NetdevReturn(r.snapshot.pci_address, home, r.snapshot.name) for r in requests]


class Tracebacks(logging.Handler):
    """Errors that nobody foresaw: they reach the log with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append(logging.Formatter().formatException(record.exc_info))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(preparation, "snapshot", _snapshot)
    monkeypatch.setattr(preparation, "with_port", lambda nic, netdev: nic)
    monkeypatch.setattr(attachments, "attach_all", _attach_all)
    for module in (attachments, strays):
        monkeypatch.setattr(module, "return_all", _return_all)
    monkeypatch.setattr(attachments, "return_rdma", lambda devices, netns: [])
    monkeypatch.setattr(presence, "absent", lambda expected, netns: [False] * len(expected))
    monkeypatch.setattr("railmate.claims.reconcile.is_namespace", lambda path: True)
    monkeypatch.setattr(attachments, "is_namespace", lambda path: True, raising=False)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # thousands of them, and no power cut in here
    handler, root = Tracebacks(), logging.getLogger("railmate")
    root.addHandler(handler)
    try:
        yield Node(tmp_path)
    finally:
        root.removeHandler(handler)
    assert not handler.seen, f"{len(handler.seen)} unforeseen errors, the first: {handler.seen[0]}"


def clearly(verb: Callable[[], Any]) -> Any:
    """The verb's result, None when it refuses in a sentence. Anything else is a bug."""
    said = "in more than a word"
    try:
        return verb()
    except RailmateError as error:
        said = str(error)
    assert len(said) > 20
    return None


# --- the disk
@fuzz(160)
def test_no_file_in_the_ledger_stops_the_driver_or_costs_another_claim(node: Node, seed: int) -> None:
    chance = random.Random(seed)
    path, good = node.plugin / "claims" / f"{uid(1)}.json", node.plugin / "claims" / f"{uid(2)}.json"
    if not good.exists():
        node.api.put(
            claim(1, "wide"), claim(2, "gpu-1", "vf-3", pods=("pod-2",)), claim(3, "vf-2", pods=("pod-3",))
        )
        node.state.prepare(ref(2), patience=0)
        node.state.attach(sandbox("sandbox-2", "pod-2", "/run/netns/2"))
    node.state.prepare(ref(1), patience=0)
    node.state.attach(sandbox())
    whole, other = path.read_bytes(), good.read_bytes()
    for _ in range(_EACH):
        if chance.random() < 0.5:
            data = damaged(whole, chance)
        else:
            data = json.dumps(mutated(json.loads(whole), chance)).encode()
        note(f"ledger file: {data[:2000]!r}")
        inputs["ledger"] += 1
        path.write_bytes(data)
        copy_of = path.with_suffix(".prepared")
        if chance.random() < 0.5 and copy_of.exists():
            copy_of.write_bytes(damaged(whole, chance))
        assert uid(2) in node.ledger.entries()
        assert {GPUS[1], VFS[3]} <= node.state.holdings.now().addresses
    node.reconciler.run()
    clearly(lambda: node.state.synchronize([sandbox(), sandbox("sandbox-2", "pod-2", "/run/netns/2")]))
    clearly(lambda: node.state.prepare(ref(3), patience=0))
    node.state.unprepare(ref(3))
    clearly(lambda: node.state.unprepare(ref(1)))
    if path.exists():  # only what says it is of a newer version is left, for who wrote it
        with pytest.raises(NewerRecordError):
            node.ledger.get(uid(1))
        path.unlink()
    assert good.read_bytes() == other
    for bad in (node.plugin / "claims").glob("*.bad"):
        bad.unlink()


@fuzz(75)
def test_no_file_among_the_strays_stops_the_driver(node: Node, seed: int) -> None:
    chance = random.Random(seed)
    whole = _snapshot("vf0", "0000:0c:00.1").to_dict()
    for number in range(_EACH):
        data = damaged(json.dumps(whole).encode(), chance) if chance.random() < 0.5 else None
        text = data if data is not None else json.dumps(mutated(whole, chance)).encode()
        note(f"stray: {text[:500]!r}")
        inputs["strays"] += 1
        (node.plugin / "strays" / f"0000:0c:00.{number}.json").write_bytes(text)
    node.ledger.put_stray(_snapshot("vf1", "0000:0c:01.1"))
    node.reconciler.run()
    assert not any(one.pci_address == "0000:0c:01.1" for one in node.ledger.strays()), "the whole one is home"
    for path in (node.plugin / "strays").iterdir():
        path.unlink()


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60)


@fuzz(100)
def test_no_file_in_the_cdi_directory_stops_the_driver_or_costs_anything(node: Node, seed: int) -> None:
    chance = random.Random(seed)
    if not node.api.claims:
        node.api.put(claim(1, "wide"))
        node.state.prepare(ref(1), patience=0)
        node.state.attach(sandbox())
    before = node.files()
    vendor = {
        "cdiVersion": "0.6.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "GPU-0"}, {"name": "GPU-1"}],
    }
    made = []
    for _ in range(_EACH):
        name = chance.choice(
            [
                "nvidia.json",
                "nvidia.yaml",
                "amd.yml",
                ".hidden",
                "x",
                f"{DRIVER}-claim-{chance.choice(ODD)}.json",
            ]
        )
        path = node.cdi / name.encode()[:200].decode(errors="ignore").replace("/", "_").replace("\0", "_")
        text = json.dumps(mutated(vendor, chance)).encode()
        data = text if chance.random() < 0.5 else damaged(text, chance)
        note(f"{path.name}: {data[:500]!r}")
        inputs["CDI"] += 1
        path.write_bytes(data)
        made.append(path)
        for name, cdi_id in VendorSpecs([node.cdi]).devices().items():
            assert isinstance(name, str)
            assert cdi_id.endswith(f"={name}")
    node.reconciler.run()
    after = node.files()
    assert {path: after.get(path) for path in before} == before
    for path in made:
        path.unlink(missing_ok=True)


# --- the API server
@fuzz(300)
def test_no_claim_stops_the_driver(node: Node, seed: int) -> None:
    chance = random.Random(seed)
    configs = [config("FromClass"), config(interfaceName="rail", requests=["main"])]
    if chance.random() < 0.5:
        # the NICs are Ethernet: with the fields of InfiniBand all are refused
        without = chance.choice([(), ("guid", "pkey", "ipoib")])
        configs[0]["opaque"]["parameters"] = whole_config(without=without)
    whole = claim(1, "wide", "vf-2", share(1), configs=configs, template="devices")
    whole["status"]["allocation"]["devices"]["results"][1]["request"] = "other/sub"
    for _ in range(_EACH):
        node.api.claims = {"claim-1": mutated(whole, chance)}
        note(f"claim: {json.dumps(node.api.claims)}")
        inputs["claims"] += 1
        prepared = clearly(lambda: node.state.prepare(ref(1), patience=0))
        assert prepared is None or uid(1) in node.ledger.entries()
    node.reconciler.run()
    node.state.unprepare(ref(1))
    assert node.files() == {}


@fuzz(500)
def test_no_config_stops_the_driver(seed: int) -> None:
    chance = random.Random(seed)
    whole = whole_config(chance.choice(list(KINDS)))
    decode(whole)
    for _ in range(_EACH):
        value = mutated(whole, chance)
        note(f"config: {value!r}")
        inputs["configs"] += 1
        try:
            found = decode(value)
        except ConfigError:
            continue
        for field in ("addresses", "routes", "rules", "neighbours"):
            assert isinstance(getattr(found, field), tuple | None)
        assert found.mtu is None or 68 <= found.mtu <= 65535
        name = found.interface_name
        assert name is None or (isinstance(name, str) and 0 < len(name) < 16 and "/" not in name)
        assert merge([found, found], type(found)) == found


# --- the kubelet
_CALLS = [
    f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/Node{verb}Resources"
    for version in ("v1", "v1beta1")
    for verb in ("Prepare", "Unprepare")
]


ANSWERS = (dra_v1_pb2.NodePrepareResourcesResponse, dra_v1_pb2.NodeUnprepareResourcesResponse)


def _request(chance: random.Random) -> bytes:
    texts = [text for text in ODD if isinstance(text, str)] + ["team", "claim-1", "claim-2", uid(1), uid(3)]
    messages = chance.choice([dra_v1_pb2, dra_v1beta1_pb2])
    claims = [
        messages.Claim(**{name: chance.choice(texts) for name in ("uid", "namespace", "name")})
        for _ in range(chance.randint(0, 4))
    ]
    data: bytes = messages.NodePrepareResourcesRequest(claims=claims).SerializeToString()
    return data if chance.random() < 0.6 else damaged(data, chance)[:5000]


def test_no_request_stops_the_service(node: Node) -> None:
    """Raw bytes on the real socket. What is no message at all is gRPC's to refuse; everything else has an answer for
    each claim, and each error is a sentence."""
    node.api.put(claim(1, "pair-0"), claim(2, "pair-1", pods=("pod-2",)))
    directory = tempfile.TemporaryDirectory(prefix="rm")  # a socket's path must be short
    paths = sockets(Path(directory.name), DRIVER, "pod-uid")
    node.state.prepare(ref(2), patience=0)
    kept = (node.plugin / "claims" / f"{uid(2)}.json").read_bytes()

    class Verbs:
        """Without the waiting, and the kept claim is not given back."""

        def prepare(self, one: ClaimRef, **_: object) -> Any:
            return node.state.prepare(one, patience=0)

        def unprepare(self, one: ClaimRef) -> None:
            if one.uid != uid(2):
                node.state.unprepare(one)

    async def ask(channel: grpc.aio.Channel, chance: random.Random) -> None:
        path, data = chance.choice(_CALLS), _request(chance)
        inputs["gRPC"] += 1
        try:
            asked = dra_v1_pb2.NodePrepareResourcesRequest.FromString(data)
        except DecodeError:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(path)(data, timeout=20)
            return
        answer = await channel.unary_unary(path)(data, timeout=20)
        told = ANSWERS["Unprepare" in path].FromString(answer)
        assert {one.uid for one in asked.claims} == set(told.claims)
        for one in told.claims.values():
            assert "unexpected" not in one.error, (data, one.error)
            assert one.error == "" or len(one.error) > 20

    seed = int(os.environ.get(_SEED, 0)) or random.SystemRandom().randrange(1, 2**32)

    async def run() -> None:
        server = KubeletServer(DRIVER, paths, Verbs(), lambda registered: None)  # type: ignore[arg-type]
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"unix:{paths.service}") as channel:
                chance = random.Random(seed)
                for _ in range(80):
                    await asyncio.gather(*(ask(channel, chance) for _ in range(50)))
            await probe(paths.service)
        finally:
            await server.stop(grace=1)

    with directory:
        try:
            asyncio.run(run())
        except Exception as error:
            error.add_note(f"{_SEED}={seed} repeats the requests")
            raise
    assert (node.plugin / "claims" / f"{uid(2)}.json").read_bytes() == kept


def test_there_were_enough_inputs(request: pytest.FixtureRequest, figures: Callable[[object], None]) -> None:
    """Of each subject whose test ran. A subject is counted by its test, so none is missed when all of them ran."""
    figures(f"fuzz: {inputs.total()} inputs: {', '.join(f'{n} {what}' for what, n in inputs.items())}")
    assert sum(_WANTED.values()) >= 20_000
    here = [item for item in request.session.items if item.path == request.path]
    assert len(inputs) == len(here) - 1, "each of the other tests has a subject of its own"
    assert [what for what, number in inputs.items() if number < _WANTED[what]] == []
