"""The chart's config policy against the real API server. The slice policy: test_slice_admission.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from component.config_values import KINDS, EveryType, edges, parameter_lists
from component.conftest import DRIVER, Cluster, wait_until
from harness.api import ApiError
from railmate_api import config, fields
from railmate_api.admission import policy_spec
from railmate_api.fields import Problem

CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
PROBE = "probe.example"
GOOD = {"apiVersion": "railmate.dev/v1alpha1", "kind": "RdmaVfConfig"}
#: Every field there is.
FULL = {
    **GOOD,
    **{"interfaceName": "rail0", "mtu": 9000, "mac": "02:00:00:00:00:0a", "addresses": ["10.0.0.2/24"]},
    "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}]]},
    "routes": [{"destination": "10.2.0.0/16", "gateway": "10.0.0.1", "source": "10.0.0.2", "metric": 5, "table": 100}],
    "rules": [{"table": 100, "source": "10.0.0.2/32", "destination": "10.2.0.0/16", "priority": 100}],
    "neighbours": [{"address": "10.0.0.1", "mac": "02:00:00:00:00:01"}],
    "sysctls": {"arpIgnore": 1, "arpAnnounce": 2, "arpFilter": True, "arpNotify": True, "rpFilter": 2,
                "acceptLocal": True, "acceptRA": 0, "disableIPv6": False},
    "features": {"rx-gro": False},
    "rings": {"rx": 512, "tx": 512},
    "channels": {"rx": 1, "tx": 1, "combined": 2},
    **{"vlan": 100, "vlanQoS": 3, "vlanProtocol": "802.1ad", "trust": True, "spoofCheck": False},
    **{"linkState": "enable", "minTxRate": 100, "maxTxRate": 1000},
}  # fmt: skip

Body = dict[str, Any]
Kinds = Mapping[str, type[Any]]


@pytest.fixture(scope="module")
def ready(cluster: Cluster) -> Cluster:
    """The policy is in force (the API server looks for new ones once a second)."""
    bad = claim([DRIVER], {})
    wait_until(lambda: refused(lambda: create(cluster, CLAIMS, bad)), "the config policy is in force")
    return cluster


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ApiError as error:
        return "ValidatingAdmissionPolicy" in str(error)
    return False


def claim(drivers: list[str], *parameters: Any) -> Body:
    """A claim with one config for each of the parameters; drivers are repeated as need be."""
    entries = [
        {"opaque": {"driver": drivers[i % len(drivers)], "parameters": one}}
        for i, one in enumerate(parameters)
    ]
    requests = [{"name": "vf", "exactly": {"deviceClassName": "rdma-vf.railmate.dev"}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"generateName": "adm-"},
        "spec": {"devices": {"requests": requests, "config": entries}},
    }


def template(parameters: Any) -> Body:
    inner = claim([DRIVER], parameters)["spec"]
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
    return {**kind, "metadata": {"generateName": "adm-"}, "spec": {"spec": inner}}


def device_class(parameters: Any, name: str = "adm", driver: str = DRIVER) -> Body:
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass"}
    spec = {"config": [{"opaque": {"driver": driver, "parameters": parameters}}]}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def create(cluster: Cluster, path: str, body: Body) -> Any:
    return cluster.plane.request("POST", f"{path}?dryRun=All", body)


CARRIERS: list[Any] = [
    pytest.param(CLAIMS, lambda p: claim([DRIVER], p), "spec.devices.config[0]", id="claim"),
    pytest.param(TEMPLATES, template, "spec.spec.devices.config[0]", id="template"),
    pytest.param(CLASSES, device_class, "spec.config[0]", id="class"),
]


@pytest.mark.parametrize(("path", "body", "place"), CARRIERS)
def test_good_config_passes(ready: Cluster, path: str, body: Callable[[Any], Body], place: str) -> None:
    create(ready, path, body(GOOD))
    create(ready, path, body(GOOD | {"interfaceName": "rail0"}))
    create(ready, path, body(FULL))


@pytest.mark.parametrize(("path", "body", "place"), CARRIERS)
@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (GOOD | {"interfaceName": "a/b"}, ".interfaceName must be 1 to 15 letters"),
        (GOOD | {"interfaceName": "eth0"}, ".interfaceName must be"),
        (GOOD | {"interfaceName": 1}, ".interfaceName must be"),
        (GOOD | {"interfaceName": None}, ".interfaceName must be"),
        (GOOD | {"interfacename": "net1"}, ' has no field "interfacename"; it has: addresses, apiVersion, channels'),
        (GOOD | {"vlanQoS": 3}, ".vlanQoS needs vlan beside it"),
        (GOOD | {"minTxRate": 200, "maxTxRate": 100}, ".minTxRate must not be above maxTxRate"),
        (GOOD | {"rules": [{"table": 100}]}, ".rules[0] must have at least one of source, destination"),
        (GOOD | {"ipam": {"subnet": "10.0.0.0/24"}}, ".ipam.type is missing"),
        (GOOD | {"features": {"RX": True}}, ".features has a name that is none"),
        (GOOD | {"features": {"rx-gro": 1}}, ".features.rx-gro must be true or false"),
        (GOOD | {"apiVersion": "railmate.dev/v2"}, ".apiVersion must be railmate.dev/v1alpha1"),
        (GOOD | {"kind": "RdmaVFConfig"}, ".kind must be RdmaVfConfig"),
        ({"apiVersion": GOOD["apiVersion"]}, ".kind must be RdmaVfConfig"),
        ({}, ".apiVersion must be"),
    ],
)  # fmt: skip
def test_bad_config_is_refused_and_its_field_named(
    ready: Cluster, path: str, body: Callable[[Any], Body], place: str, parameters: Body, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        create(ready, path, body(parameters))
    assert caught.value.status == 422
    assert f"{place}.opaque.parameters{said}" in str(caught.value)
    with pytest.raises(config.ConfigError):
        config.decode(parameters)


def test_config_of_other_drivers_is_their_own(ready: Cluster) -> None:
    create(ready, CLAIMS, claim(["gpu.example.org"], {"anything": 1}))


def test_all_wrong_configs_are_named_by_position(ready: Cluster) -> None:
    body = claim(
        ["gpu.example.org", DRIVER], {"x": 1}, GOOD, {}, GOOD | {"ntu": 1}, {}, GOOD | {"interfaceName": ""}
    )
    with pytest.raises(ApiError) as caught:
        create(ready, CLAIMS, body)
    assert 'config[3].opaque.parameters has no field "ntu"' in str(caught.value)
    assert "config[5].opaque.parameters.interfaceName must be" in str(caught.value)
    assert all(f"config[{i}]" not in str(caught.value) for i in (0, 1, 2, 4))


def test_message_stays_short_whatever_is_sent(ready: Cluster) -> None:
    """32 configs of nearly 10 KiB each, with the names of 800 fields: neither the cost limit nor the message overflow
    lets them pass or hides the reason."""
    noise = {f"f{n:03}": "" for n in range(800)}
    with pytest.raises(ApiError) as caught:
        create(ready, CLAIMS, claim([DRIVER], *[GOOD | noise] * 32))
    assert "has more than 8 fields too many" in str(caught.value)
    assert len(str(caught.value)) < 5000
    long = {f"{n}{'x' * 1200}\n": 1 for n in range(8)}
    with pytest.raises(ApiError, match=r"has no field .*\.\.\.") as caught:
        create(ready, CLAIMS, claim([DRIVER], *[GOOD | long] * 32))
    assert len(str(caught.value)) < 5000


def policy_objects(driver: str) -> list[tuple[str, Body]]:
    """The config policy over `KINDS`, for a driver of the tests' own."""
    text = json.dumps(policy_spec(KINDS)).replace(f'\\"{DRIVER}\\"', f'\\"{driver}\\"')
    name = {"metadata": {"name": driver}}
    binding = {"policyName": driver, "validationActions": ["Deny"]}
    return [(POLICIES, name | {"spec": json.loads(text)}), (BINDINGS, name | {"spec": binding})]


@pytest.fixture(scope="module")
def probe(ready: Cluster) -> Cluster:
    """A policy over kinds that use every type of field; a class with a bad config is older than it."""
    ready.plane.request("POST", CLASSES, device_class({"old": 1}, "adm-old", PROBE))
    for path, body in policy_objects(PROBE):
        ready.plane.request("POST", path, body)
    wait_until(
        lambda: refused(lambda: create(ready, CLAIMS, claim([PROBE], {}))), "the probe policy is in force"
    )
    return ready


def test_no_policy_has_a_type_warning(probe: Cluster) -> None:
    def checked() -> bool:
        items = probe.plane.request("GET", POLICIES)["items"]
        return all("observedGeneration" in one.get("status", {}) for one in items)

    wait_until(checked, "the policies are type checked")
    items = probe.plane.request("GET", POLICIES)["items"]
    assert {one["metadata"]["name"] for one in items} >= {"railmate-slices", "railmate-config", PROBE}
    assert [w for one in items for w in one["status"]["typeChecking"].get("expressionWarnings", [])] == []


def test_a_class_with_an_old_bad_config_stays_editable_in_the_rest(probe: Cluster) -> None:
    def patch(body: Body) -> None:
        path, merge = f"{CLASSES}/adm-old?dryRun=All", "application/merge-patch+json"
        probe.plane.request("PATCH", path, body, content_type=merge)

    patch({"metadata": {"labels": {"a": "b"}}})
    with pytest.raises(ApiError, match=r"spec.config\[0\].opaque.parameters.apiVersion must be"):
        patch({"spec": device_class({"new": 1}, driver=PROBE)["spec"]})


def test_the_largest_config_that_is_allowed_passes_in_every_place_of_a_claim(probe: Cluster) -> None:
    """Well inside the cost limits: 32 configs, each of the largest size that the API server takes."""
    routes = [
        {"to": f"2001:db8:ffff:ffff::{n:x}/128", "via": "fe80::ffff:ffff:ffff", "metric": 4294967295}
        for n in range(64)
    ]
    full = {
        **{"apiVersion": GOOD["apiVersion"], "kind": "EveryType"},
        **{"name": "a" * 15, "mtu": 9000, "trust": True, "link": "disable", "gateway": "2001:db8::1"},
        "addresses": ["2001:db8:ffff:ffff:ffff:ffff:ffff:ffff/128"] * 56,
        "routes": routes,
        "matrix": [[1] * 8] * 8,
        "ipam": {"type": "host-local", "ranges": ["10.0.0.0/8"] * 4},
        "plugin": {"type": "whereabouts", "whatever": [1, {"a": None}]},
        "selectors": [{"source": "10.0.0.0/8", "low": 1, "high": 9}] * 4,
        "features": {f"{'a' * 10}{n}": True for n in range(6)},
        "places": {f"{'b' * 10}{n}": ["2001:db8::1", "10.0.0.1"] for n in range(3)},
    }
    assert config.problems(full, KINDS) == []
    assert 9000 < len(json.dumps(full)) <= 10240
    create(probe, CLAIMS, claim([PROBE], *[full] * 32))


def test_the_largest_config_there_is_passes_in_every_place_of_a_claim(ready: Cluster) -> None:
    routes = [
        {
            "destination": f"2001:db8::{n:x}:0/112",
            "gateway": f"fe80::{n:x}",
            "source": "10.0.0.2",
            "metric": n,
        }
        for n in range(64)
    ]
    rules = [{"table": n + 1, "source": f"2001:db8::{n:x}/128"} for n in range(20)]
    features = {f"{'rx-' * 8}{n}": True for n in range(24)}
    full = FULL | {"routes": routes, "rules": rules, "features": features}
    assert config.problems(full) == []
    assert 8000 < len(json.dumps(full)) <= 10240
    create(ready, CLAIMS, claim([DRIVER], *[full] * 32))
    only_bad = GOOD | {"routes": [{"destination": ""}] * 64, "rules": [{}] * 32, "neighbours": [{}] * 64}
    with pytest.raises(ApiError) as caught:
        create(ready, CLAIMS, claim([DRIVER], *[only_bad] * 32))
    assert caught.value.status == 422
    assert len(str(caught.value)) < 5000


def expected_text(position: int, problem: Problem) -> str:
    at = f".{problem.at}" if problem.at else ""
    text = f"spec.devices.config[{position}].opaque.parameters{at} {problem.rule}"
    # Go and Python write odd characters of an unknown name differently; where it stands is what counts.
    return text.split('"')[0] if "has no field" in text else text


def check_agreement(cluster: Cluster, driver: str, parameters: list[Body], kinds: Kinds) -> None:
    """Same verdict, and each problem in the same words and no other."""
    found = [(i, problem) for i, one in enumerate(parameters) for problem in config.problems(one, kinds)]
    answer = ""
    try:
        create(cluster, CLAIMS, claim([driver], *parameters))
    except ApiError as error:
        answer = str(error)
        assert "ValidatingAdmissionPolicy" in answer
    assert bool(answer) == bool(found), answer or found
    if len(answer) < 3000:
        assert [text for i, one in found if (text := expected_text(i, one)) not in answer] == [], answer
        assert answer.count("spec.devices.config[") == len(found), answer


# No shrinking: it would take minutes with an API server behind every try.
BOUNDED = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@settings(BOUNDED, max_examples=150)
@given(parameter_lists())
def test_decoder_and_api_server_agree(probe: Cluster, parameters: list[Body]) -> None:
    check_agreement(probe, PROBE, parameters, KINDS)


@settings(BOUNDED, max_examples=60)
@given(parameter_lists(config.KINDS))
def test_decoder_and_chart_agree_on_the_config_there_is(ready: Cluster, parameters: list[Body]) -> None:
    check_agreement(ready, DRIVER, parameters, config.KINDS)


@pytest.mark.parametrize("name", [one.name for one in fields.settings(EveryType).values()])
def test_decoder_and_api_server_agree_at_every_limit(probe: Cluster, name: str) -> None:
    (one,) = [one for one in fields.settings(EveryType).values() if one.name == name]
    head = {"apiVersion": GOOD["apiVersion"], "kind": "EveryType"}
    for value in edges(one.type):
        check_agreement(probe, PROBE, [head | {name: value}], KINDS)
