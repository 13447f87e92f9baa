"""Random nodes and claims for the allocator: everything that slices and claims may say, in small numbers.

A case is what hack/tools/kubernetes/allocate reads. The same seed gives the same cases.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]
DRIVER, OTHER = "railmate.dev", "nic.example.com"
SWITCH, NUMA = "railmate.dev/pcieSwitch", "resource.kubernetes.io/numaNode"
PAIR, PAIR_NUMA = "gpu-rdma-pair.railmate.dev", "gpu-rdma-pair-numa.railmate.dev"
NODE = "gpu-rdma-node.railmate.dev"
KIND = 'device.driver == "railmate.dev" && device.attributes["railmate.dev"].?kind.orValue("") == "{}"'
CLASSES = {
    "gpu": [KIND.format("gpu")],
    "vf": [KIND.format("vf")],
    PAIR: [KIND.format("pair"), 'device.attributes["railmate.dev"].?pcieSwitch.hasValue()'],
    PAIR_NUMA: [KIND.format("pair"), '!device.attributes["railmate.dev"].?pcieSwitch.hasValue()'],
    NODE: [KIND.format("node")],
    "any": [],
    "ours": ['device.driver == "railmate.dev"'],
    "other": ['device.driver == "nic.example.com"'],
    "split": [
        'device.attributes["railmate.dev"].?kind.orValue("") != "vf"',
        '"railmate.dev" in device.attributes',
    ],
    # reads what a device may lack: an error that ends the scheduling of the pod
    "careless": ['device.driver == "railmate.dev" && device.attributes["railmate.dev"].pcieSwitch == "s0"'],
}
SELECTORS = (
    'device.attributes["railmate.dev"].?pcieSwitch.orValue("") == "s0"',
    'device.attributes["railmate.dev"].?pcieSwitch.orValue("") in ["s0", "s1"]',
    'device.attributes["resource.kubernetes.io"].?numaNode.orValue(-1) == 0',
    'cel.bind(a, device.attributes["railmate.dev"], a.?fast.orValue(false) || a.?kind.orValue("") == "gpu")',
    'device.capacity["railmate.dev"].?memory.orValue(quantity("0")).compareTo(quantity("40Gi")) >= 0',
    '!device.attributes["railmate.dev"].?firmware.hasValue() || '
    'device.attributes["railmate.dev"].firmware.isGreaterThan(semver("1.2.0"))',
    '"nosuch" in device.attributes || !("railmate.dev" in device.attributes)',
    "!device.allowMultipleAllocations",
    "device.attributes[device.driver].?fast.orValue(true)",
    'device.attributes["railmate.dev"].?kind.orValue("x").matches("^(gpu|pair)$")',
)
TAINT = {"key": "railmate.dev/unhealthy", "value": "link-down", "effect": "NoSchedule"}


def cases(seed: int, count: int) -> Iterator[Case]:
    for number in range(count):
        yield _Maker(random.Random(f"{seed}-{number}")).case()


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.devices: list[dict[str, Any]] = []  # with their driver and pool, for allocations
        self.plain = self.maybe(
            0.4
        )  # as machines are: devices of a kind are alike, and the search may say so

    def maybe(self, chance: float) -> bool:
        return self.rng.random() < chance

    def case(self) -> Case:
        slices = self._machine()
        if self.maybe(0.3):
            slices += self._other_driver()
        if self.maybe(0.04):
            slices.pop(self.rng.randrange(len(slices)))  # a pool that is being rewritten
        self.rng.shuffle(slices)
        others = self._others()
        claims = [self._claim(f"claim{n}") for n in range(1 if self.maybe(0.7) else self.rng.randint(2, 3))]
        classes = {name: _class(name, expressions) for name, expressions in CLASSES.items()}
        node = {"metadata": {"name": "n1", "labels": {"zone": "a"}}}
        return {"node": node, "slices": slices, "classes": classes, "claims": claims, "others": others}

    # --- what there is
    def _machine(self) -> list[dict[str, Any]]:
        switches, gpus, vfs = self.rng.randint(1, 4), self.rng.randint(1, 2), self.rng.randint(1, 3)
        sets: list[dict[str, Any]] = []
        groups: dict[str, list[dict[str, Any]]] = {"pair": [], "node": [], "gpu": [], "vf": [], "more": []}
        for switch in range(switches):
            counters: dict[str, Any] = {}
            place = {} if not self.plain and self.maybe(0.07) else {SWITCH: {"string": f"s{switch}"}}
            place[NUMA] = {"int": switch % 2}
            for gpu in range(gpus):
                counters[f"gpu-{gpu}"], counters[f"vf-{gpu}"] = {"value": "1"}, {"value": "1"}
                name = f"{switch}-{gpu}"
                both = (f"set-{switch}", {f"gpu-{gpu}": "1", f"vf-{gpu}": "1"})
                groups["pair"].append(self._device(f"pair-{name}", "pair", place, both))
                groups["gpu"].append(
                    self._device(f"gpu-{name}", "gpu", place, (both[0], {f"gpu-{gpu}": "1"}))
                )
                if self.maybe(0.5):
                    groups["vf"].append(
                        self._device(f"vf-{name}", "vf", place, (both[0], {f"vf-{gpu}": "1"}))
                    )
            groups["vf"] += [self._device(f"vf-{switch}-x{vf}", "vf", place, None) for vf in range(vfs)]
            sets.append({"name": f"set-{switch}", "counters": counters})
        if switches <= 2 and self.maybe(0.6):  # a device consumes from two sets at most
            node = self._device("node", "node", {}, None)
            node["consumesCounters"] = [
                {"counterSet": one["name"], "counters": one["counters"]} for one in sets
            ]
            groups["node"].append(node)
        if self.maybe(0.3):
            groups["more"] = self._partitions(sets)
        if self.maybe(0.3):
            groups["more"] += [self._shared(n) for n in range(self.rng.randint(1, 2))]
        order = ["pair", "node", "gpu", "vf", "more"]
        if self.maybe(0.3):
            self.rng.shuffle(order)
        devices = [device for kind in order for device in groups[kind]]
        if self.maybe(0.02):
            devices.append(dict(devices[0]))  # the same name twice: the pool is invalid
        for device in devices:
            self.devices.append({"driver": DRIVER, "pool": "n1", "body": device})
        cut = self.rng.randint(1, len(devices))
        parts: list[dict[str, Any]] = [{"sharedCounters": sets}, {"devices": devices[:cut]}]
        if devices[cut:]:
            parts.append({"devices": devices[cut:]})
        return self._slices(DRIVER, "n1", parts)

    def _partitions(self, sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parts of one thing: any two of them, or the whole."""
        sets.append({"name": "parts", "counters": {"slots": {"value": "4"}, "memory": {"value": "80Gi"}}})
        devices = []
        for number in range(self.rng.randint(2, 4)):
            slots = self.rng.choice(["1", "2", "2", "4"])
            memory = self.rng.choice(["10Gi", "20Gi", "80Gi"])
            body = self._device(f"part-{number}", "gpu", {}, ("parts", {"slots": slots, "memory": memory}))
            devices.append(body)
        return devices

    def _shared(self, number: int) -> dict[str, Any]:
        body = self._device(f"shared-{number}", self.rng.choice(["vf", "gpu"]), {}, None)
        bandwidth: dict[str, Any] = {"value": "10"}
        policy = self.rng.choice(
            [
                None,
                {"default": "2", "validValues": ["2", "4", "8"]},
                {"default": "1", "validRange": {"min": "1", "max": "6", "step": "1"}},
                {"default": "3", "validRange": {"min": "3"}},
            ]
        )
        if policy:
            bandwidth["requestPolicy"] = policy
        return body | {"allowMultipleAllocations": True, "capacity": {"bandwidth": bandwidth}}

    def _device(
        self, name: str, kind: str, place: dict[str, Any], consumes: tuple[str, dict[str, str]] | None
    ) -> dict[str, Any]:
        attributes: dict[str, Any] = {"railmate.dev/kind": {"string": kind}, **place}
        if self.plain:
            body: dict[str, Any] = {"name": name, "attributes": attributes}
            return body | self._consumption(consumes)
        if self.maybe(0.3):
            attributes["railmate.dev/fast"] = {"bool": self.maybe(0.5)}
        if self.maybe(0.3):
            attributes["firmware"] = {"version": self.rng.choice(["1.2.0", "1.10.3", "2.0.0-rc.1"])}
        if self.maybe(0.03):
            attributes[NUMA] = {"string": "0"}
        body = {"name": name, "attributes": attributes, **self._consumption(consumes)}
        if kind in ("gpu", "pair"):
            body["capacity"] = {"railmate.dev/memory": {"value": self.rng.choice(["24Gi", "80Gi"])}}
        if self.maybe(0.06):
            body["taints"] = [
                TAINT | {"effect": self.rng.choice(["NoSchedule", "NoSchedule", "NoExecute", "None"])}
            ]
        return body

    def _consumption(self, consumes: tuple[str, dict[str, str]] | None) -> dict[str, Any]:
        if consumes is None:
            return {}
        counters = {counter: {"value": value} for counter, value in consumes[1].items()}
        return {"consumesCounters": [{"counterSet": consumes[0], "counters": counters}]}

    def _other_driver(self) -> list[dict[str, Any]]:
        devices = []
        for number in range(self.rng.randint(1, 3)):
            attributes: dict[str, Any] = {NUMA: {"int": number % 2}, "speed": {"int": 400}}
            if self.maybe(0.5):
                attributes[SWITCH] = {"string": f"s{number}"}
            devices.append({"name": f"nic-{number}", "attributes": attributes})
        for device in devices:
            self.devices.append({"driver": OTHER, "pool": "rack", "body": device})
        where: dict[str, Any] = self.rng.choice(
            [
                {"allNodes": True},
                {"nodeSelector": _selector("zone", self.rng.choice(["a", "a", "b"]))},
                {"perDeviceNodeSelection": True},
                {"nodeName": "n1"},
            ]
        )
        if where.get("perDeviceNodeSelection"):
            for device in devices:
                device |= self.rng.choice([{"nodeName": "n1"}, {"nodeName": "n2"}, {"allNodes": True}])
        return self._slices(OTHER, "rack", [{"devices": devices}], where)

    def _slices(
        self, driver: str, pool: str, parts: list[dict[str, Any]], where: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        generation = self.rng.randint(1, 3)
        slices = []
        for index, part in enumerate(parts):
            about = {"name": pool, "generation": generation, "resourceSliceCount": len(parts)}
            spec = {"driver": driver, "pool": about, **(where or {"nodeName": pool}), **part}
            slices.append({"metadata": {"name": f"{index:05x}-{driver}-{pool}"}, "spec": spec})
        if self.maybe(0.05):  # left over from before
            old = {"name": pool, "generation": 0, "resourceSliceCount": 1}
            devices = [{"name": "old", "attributes": {"railmate.dev/kind": {"string": "gpu"}}}]
            spec = {"driver": driver, "pool": old, **(where or {"nodeName": pool}), "devices": devices}
            slices.append({"metadata": {"name": f"old-{driver}"}, "spec": spec})
        return slices

    # --- what others have
    def _others(self) -> list[dict[str, Any]]:
        others = []
        used: dict[tuple[str, str], int] = {}
        reckless = self.maybe(0.03)  # more than the counters allow, as after a change of the offer
        most = self.rng.choice([0, len(self.devices) // 3, len(self.devices)])
        for number, device in enumerate(self.rng.sample(self.devices, self.rng.randint(0, most))):
            body = device["body"]
            keys = [
                (one["counterSet"], counter)
                for one in body.get("consumesCounters", ())
                for counter in one["counters"]
            ]
            if any(key in used for key in keys) and not reckless:
                continue
            used |= dict.fromkeys(keys, 1)
            result = {
                "request": "r",
                "driver": device["driver"],
                "pool": device["pool"],
                "device": body["name"],
            }
            if body.get("allowMultipleAllocations"):
                result["shareID"] = f"00000000-0000-0000-0000-{number:012d}"
                result["consumedCapacity"] = {"bandwidth": self.rng.choice(["2", "4", "8"])}
            elif self.maybe(0.05):
                result["adminAccess"] = True
            elif self.maybe(0.5):
                continue
            claim = {"metadata": {"name": f"other{number}", "namespace": "default"}, "spec": {}}
            status = {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": f"pod{number}", "uid": "u"}],
            }
            others.append(claim | {"status": status})
        return others

    # --- what is asked for
    def _claim(self, name: str) -> dict[str, Any]:
        requests = [self._request(f"r{n}") for n in range(self.rng.choice([1, 1, 2, 2, 3, 4]))]
        devices: dict[str, Any] = {"requests": requests}
        if len(requests) > 1 or self.maybe(0.3):
            devices["constraints"] = [
                self._constraint(requests) for _ in range(self.rng.choice([0, 1, 1, 2]))
            ]
        return {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": devices}}

    def _request(self, name: str) -> dict[str, Any]:
        if self.maybe(0.2):
            alternatives = []
            for number in range(self.rng.randint(1, 3)):
                one = self._exactly()
                one.pop("adminAccess", None)
                alternatives.append({"name": f"a{number}", **one})
            return {"name": name, "firstAvailable": alternatives}
        return {"name": name, "exactly": self._exactly()}

    def _exactly(self) -> dict[str, Any]:
        # a careless class is rare, else most answers are errors
        names = ["gpu", "vf", PAIR, PAIR_NUMA, NODE, "any", "ours", "other", "split"]
        weights = [6, 6, 6, 1, 4, 1, 2, 1, 1]
        body: dict[str, Any] = {"deviceClassName": self.rng.choices(names, weights)[0]}
        if self.maybe(0.01):
            body["deviceClassName"] = self.rng.choice(["careless", "nosuch"])
        if self.maybe(0.06):
            body["allocationMode"] = "All"
        else:
            body |= {"allocationMode": "ExactCount", "count": self.rng.choice([1, 1, 1, 1, 2, 2, 3, 4])}
            if self.maybe(0.01):
                body["count"] = 33
        if self.maybe(0.25):
            chosen = self.rng.sample(SELECTORS, self.rng.choice([1, 1, 2]))
            body["selectors"] = [{"cel": {"expression": expression}} for expression in chosen]
        if self.maybe(0.1):
            body["tolerations"] = [
                self.rng.choice(
                    [{"operator": "Exists"}, {"key": TAINT["key"], "operator": "Equal", "value": "other"}]
                )
            ]
        if self.maybe(0.04):
            body["adminAccess"] = True
        if self.maybe(0.08):
            name = self.rng.choice(["bandwidth", "railmate.dev/memory"])
            body["capacity"] = {"requests": {name: self.rng.choice(["1", "3", "5", "40Gi"])}}
        return body

    def _constraint(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        names = [one["name"] for one in requests]
        chosen = sorted(self.rng.sample(names, self.rng.randint(1, len(names))))
        with_alternatives = [one for one in requests if "firstAvailable" in one and one["name"] in chosen]
        if with_alternatives and self.maybe(0.3):
            one = with_alternatives[0]
            chosen[chosen.index(one["name"])] = f"{one['name']}/{one['firstAvailable'][0]['name']}"
        kind = "distinctAttribute" if self.maybe(0.15) else "matchAttribute"
        constraint: dict[str, Any] = {kind: self.rng.choice([SWITCH, SWITCH, NUMA, "railmate.dev/firmware"])}
        if self.maybe(0.8):
            constraint["requests"] = chosen
        return constraint


def _selector(key: str, value: str) -> dict[str, Any]:
    return {"nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}]}


def _class(name: str, expressions: list[str]) -> dict[str, Any]:
    selectors = [{"cel": {"expression": one}} for one in expressions]
    return {"metadata": {"name": name}, "spec": {"selectors": selectors}}
