"""The Helm chart: what it installs fits the driver, the API's files and the simulated node."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import railmate
from harness.gobuild import program
from harness.simnode import LABEL, STATE
from railmate.cli.node import add_parser
from railmate.errors import UsageError
from railmate.inventory import nvml
from railmate.provision.file import load_provisioning
from railmate.publish.shared import parse_shared_pfs
from railmate_api.admission import policy_spec
from railmate_api.provisioning import json_schema

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "driver/chart"
Render = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(scope="session")
def helm() -> Path:
    return program("helm")


@pytest.fixture(scope="session")
def render(helm: Path) -> Render:
    """The rendered objects by kind/name; fails as `helm install` would on refused values."""

    def rendered(*arguments: str, release: str = "railmate") -> dict[str, dict[str, Any]]:
        command: list[str | Path] = [helm, "template", release, CHART, "--namespace", "somewhere", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr)
        objects = [item for item in yaml.safe_load_all(done.stdout) if item]
        return {f"{item['kind']}/{item['metadata']['name']}": item for item in objects}

    return rendered


def parse(arguments: list[str]) -> argparse.Namespace:
    """What `railmate node` makes of the arguments; ends the test when it refuses them."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(["node", *arguments])


def driver_pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (daemonset,) = [item for key, item in objects.items() if key.startswith("DaemonSet/")]
    return dict(daemonset["spec"]["template"]["spec"])


def test_the_chart_has_the_version_of_the_driver() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == railmate.__version__


def test_the_chart_ships_the_device_classes_of_the_api() -> None:
    assert (CHART / "files/deviceclasses.yaml").resolve() == ROOT / "api/railmate_api/deviceclasses.yaml"


def test_every_value_has_a_place_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    for name in ("image", "admission", "topology", "provisioning"):
        assert set(values[name]) == set(schema["properties"][name]["properties"])


@pytest.mark.parametrize(
    "setting", ["", "hostPID=true", "privileged=true", "sharePairVFs=true", "publish=nics"]
)
def test_the_driver_accepts_the_arguments_that_the_chart_passes(render: Render, setting: str) -> None:
    (container,) = driver_pod(render("--set", setting) if setting else render())["containers"]
    assert container["command"] == ["railmate", "node"]
    parsed = parse(container["args"])
    assert parsed.driver_name == "railmate.dev"
    assert parsed.http_address == f"unix:{container['readinessProbe']['exec']['command'][1]}"
    assert parsed.grace_period == driver_pod(render())["terminationGracePeriodSeconds"]
    assert parsed.share_pair_vfs is (setting == "sharePairVFs=true")
    assert parsed.publish == ("nics" if setting == "publish=nics" else "all")


def test_paths_are_the_same_in_the_pod_and_on_the_node(render: Render) -> None:
    pod = driver_pod(render())
    hosts = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"] if m["name"] in hosts}
    # /proc is the driver's own; the node's is looked at beside it
    assert (mounts.pop("host-proc"), hosts.pop("host-proc")) == ("/host/proc", "/proc")
    assert mounts == hosts
    parsed = parse(pod["containers"][0]["args"])
    plugin = parsed.kubelet_dir / "plugins" / parsed.driver_name
    for path in (plugin, parsed.kubelet_dir / "plugins_registry", parsed.cdi_dir, parsed.nri_socket.parent):
        assert str(path) in hosts.values()


def test_the_driver_has_two_capabilities_and_a_read_only_root(render: Render) -> None:
    context = driver_pod(render())["containers"][0]["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN", "SYS_ADMIN"]}
    assert context["readOnlyRootFilesystem"] is True
    assert "privileged" not in context


def test_a_driver_that_sees_the_nodes_processes_may_raise_their_limits(render: Render) -> None:
    """prlimit(2) on another's process, and above the hard limit, takes CAP_SYS_RESOURCE."""
    pod = driver_pod(render("--set", "hostPID=true"))
    assert pod["hostPID"] is True
    capabilities = pod["containers"][0]["securityContext"]["capabilities"]
    assert set(capabilities["add"]) == {"NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE", "SYS_RESOURCE"}


def test_ipam_plugins_find_their_settings_and_cannot_change_them(render: Render) -> None:
    (container,) = driver_pod(render())["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "cni-conf"]
    assert mount == {"name": "cni-conf", "mountPath": "/etc/cni/net.d", "readOnly": True}


def test_nvidias_library_is_mounted_for_a_container_that_may_open_the_gpus(render: Render) -> None:
    """At the place where the driver looks for it (railmate.inventory.nvml)."""
    assert "nvidia-driver" not in str(driver_pod(render()))
    pod = driver_pod(render("--set", "nvidiaDriverRoot=/"))
    (container,) = pod["containers"]
    assert container["securityContext"]["privileged"] is True
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "nvidia-driver"]
    assert mount["mountPath"] == nvml.DRIVER_ROOT
    assert mount["readOnly"] is True
    (volume,) = [one for one in pod["volumes"] if one["name"] == "nvidia-driver"]
    assert volume["hostPath"]["path"] == "/"


def test_the_drivers_of_vfs_are_changed_through_a_writable_sysfs_on_demand_only(render: Render) -> None:
    pod = driver_pod(render("--set", "rebindVFs=true"))
    (container,) = pod["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "sysfs"]
    assert mount == {"name": "sysfs", "mountPath": "/sys"}
    assert [one["hostPath"]["path"] for one in pod["volumes"] if one["name"] == "sysfs"] == ["/sys"]
    assert container["securityContext"]["appArmorProfile"] == {"type": "Unconfined"}
    plain = driver_pod(render())
    assert "sysfs" not in {one["name"] for one in plain["volumes"]}
    assert "appArmorProfile" not in plain["containers"][0]["securityContext"]


RULES = 'provisioning.rules=[{"select": {"role": "rail", "vendor": "8086"}, "vfs": 4, "mtu": 9000}]'


def test_rules_for_vfs_reach_the_driver_as_they_are(render: Render, tmp_path: Path) -> None:
    objects = render("--set-json", RULES)
    pod = driver_pod(objects)
    (path,) = [
        one.partition("=")[2] for one in pod["containers"][0]["args"] if one.startswith("--vf-provisioning=")
    ]
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    (name,) = [v["configMap"]["name"] for v in pod["volumes"] if v["name"] == "provisioning"]
    key = Path(path).relative_to(mounts["provisioning"])
    written = tmp_path / "provisioning"
    written.write_text(objects[f"ConfigMap/{name}"]["data"][str(key)])
    (rule,) = load_provisioning(written).rules
    assert (rule.select.role, rule.select.vendor, rule.vfs, rule.mtu) == ("rail", "8086", 4, 9000)


def test_a_driver_that_makes_vfs_is_not_ended_for_taking_its_time(render: Render) -> None:
    """8 NICs with 128 VFs each, at a second each."""
    (container,) = driver_pod(render("--set-json", RULES))["containers"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > 8 * 128
    assert startup["exec"]["command"][1:3] == container["livenessProbe"]["exec"]["command"][1:3]
    (without,) = driver_pod(render())["containers"]
    assert "startupProbe" not in without, "what does not come up within a minute hangs"


def test_sysfs_is_writable_only_for_a_driver_that_makes_vfs(render: Render) -> None:
    without, with_rules = (driver_pod(render(*extra)) for extra in ((), ("--set-json", RULES)))
    assert "/sys" not in {mount["mountPath"] for mount in without["containers"][0]["volumeMounts"]}
    assert "appArmorProfile" not in without["containers"][0]["securityContext"]
    (sysfs,) = [m for m in with_rules["containers"][0]["volumeMounts"] if m["mountPath"] == "/sys"]
    assert not sysfs.get("readOnly")
    assert with_rules["containers"][0]["securityContext"]["appArmorProfile"] == {"type": "Unconfined"}


def test_what_is_to_be_shared_reaches_the_driver_as_it_is(render: Render) -> None:
    wanted = ["0000:0c:00.0=2", "15b3:101e=4", "enp*=16", "*=8"]
    objects = render("--set-json", f"sharedPFs={json.dumps(wanted)}")
    assert parse(driver_pod(objects)["containers"][0]["args"]).shared_pfs == wanted
    short = driver_pod(render("--set", "sharedPFs={*=16}"))["containers"][0]["args"]
    assert parse(short).shared_pfs == ["*=16"], "as the example's page has it"
    assert parse(driver_pod(render())["containers"][0]["args"]).shared_pfs == []


@pytest.mark.parametrize("rule", ["enp*", "enp*=", "=4", "enp*=many", "a b=4"])
def test_the_chart_refuses_to_share_what_the_driver_would_refuse(render: Render, rule: str) -> None:
    with pytest.raises(ValueError, match="sharedPFs"):
        render("--set-json", f"sharedPFs={json.dumps([rule])}")
    with pytest.raises(UsageError, match="--shared-pfs"):
        parse_shared_pfs(rule)


def test_a_change_of_the_rules_restarts_the_driver(render: Render) -> None:
    def annotations(rules: str) -> dict[str, str]:
        objects = render("--set-json", rules)
        (daemonset,) = [item for key, item in objects.items() if key.startswith("DaemonSet/")]
        return dict(daemonset["spec"]["template"]["metadata"]["annotations"])

    assert annotations(RULES) == annotations(RULES)
    assert annotations(RULES) != annotations(RULES.replace("4", "8"))


def test_the_chart_refuses_the_rules_that_the_driver_would_refuse(render: Render) -> None:
    for wrong in (
        '[{"select": {}, "vfs": 1}]',
        '[{"select": {"role": "rail"}}]',
        '[{"select": {"vendor": 8086}}]',
    ):
        with pytest.raises(ValueError, match=r"provisioning[./]rules"):
            render("--set-json", f"provisioning.rules={wrong}")
    chart = json.loads((CHART / "values.schema.json").read_text())["properties"]["provisioning"]
    own = json_schema()["properties"]["rules"]
    assert chart["properties"]["rules"] == {k: v for k, v in own.items() if k != "minItems"}


def test_a_simulated_node_is_mounted_and_selected(render: Render) -> None:
    roots = f"sysfsRoot={STATE}/sys,procRoot={STATE}/proc,devRoot={STATE}/dev"
    label = LABEL.replace(".", "\\.")
    pod = driver_pod(render("--set", roots, "--set-string", f"nodeSelector.{label}=true"))
    mounts = {m["mountPath"]: m.get("readOnly") for m in pod["containers"][0]["volumeMounts"]}
    assert all(mounts[f"{STATE}/{part}"] is True for part in ("sys", "proc", "dev"))
    assert pod["nodeSelector"] == {LABEL: "true"}


def test_classes_select_the_driver_by_its_name_and_keep_the_attribute_domain(render: Render) -> None:
    objects = render("--set", "driverName=gpus.example.org")
    for name in ("gpu.railmate.dev", "rdma-vf.railmate.dev", "gpu-rdma-pair.railmate.dev"):
        (selector,) = objects[f"DeviceClass/{name}"]["spec"]["selectors"]
        expression = selector["cel"]["expression"]
        assert expression.startswith(
            'device.driver == "gpus.example.org" && device.attributes["railmate.dev"]'
        )
    assert not [key for key in render("--set", "deviceClasses=false") if key.startswith("DeviceClass/")]


def test_the_role_allows_what_the_driver_does_and_no_more(render: Render) -> None:
    rules = render()["ClusterRole/railmate"]["rules"]
    allowed = {
        (group, what): rule["verbs"]
        for rule in rules
        for group in rule["apiGroups"]
        for what in rule["resources"]
    }
    assert allowed == {
        ("resource.k8s.io", "resourceclaims"): ["get"],
        ("resource.k8s.io", "resourceclaims/status"): ["patch"],
        ("resource.k8s.io", "resourceclaims/driver"): ["associated-node:patch"],
        ("resource.k8s.io", "resourceslices"): ["list", "watch", "create", "update", "delete"],
        ("", "nodes"): ["get"],
        ("", "events"): ["create"],
    }


def test_the_role_is_for_the_status_of_the_drivers_own_devices(render: Render) -> None:
    rules = render("--set", "driverName=gpus.example.org")["ClusterRole/railmate"]["rules"]
    (names,) = [rule["resourceNames"] for rule in rules if "resourceclaims/driver" in rule["resources"]]
    assert names == ["gpus.example.org"]


def test_the_slice_policy_is_about_the_drivers_service_account_and_name(render: Render) -> None:
    objects = render("--set", "driverName=gpus.example.org", release="second")
    policy = objects["ValidatingAdmissionPolicy/second-railmate-slices"]["spec"]
    account = (
        f"system:serviceaccount:somewhere:{objects['ServiceAccount/second-railmate']['metadata']['name']}"
    )
    assert [one["expression"] for one in policy["matchConditions"]] == [
        f'request.userInfo.username == "{account}"'
    ]
    assert {"name": "driver", "expression": '"gpus.example.org"'} in policy["variables"]
    assert policy["failurePolicy"] == "Fail"


def test_the_config_policy_looks_at_config_for_the_drivers_name(render: Render) -> None:
    plain = render()["ValidatingAdmissionPolicy/railmate-config"]["spec"]
    assert plain == policy_spec()
    named = render("--set", "driverName=gpus.example.org")["ValidatingAdmissionPolicy/railmate-config"]
    text = json.dumps(named)
    assert text.count('orValue(\\"\\") == \\"gpus.example.org\\"') == json.dumps(plain).count(
        'orValue(\\"\\") == \\"railmate.dev\\"'
    )
    assert '\\"railmate.dev\\"' not in text
    assert named["spec"]["failurePolicy"] == "Fail"


@pytest.mark.parametrize("which", ["slices", "config"])
def test_each_policy_denies_and_can_be_left_out(render: Render, which: str) -> None:
    binding = render()[f"ValidatingAdmissionPolicyBinding/railmate-{which}"]["spec"]
    assert binding == {"policyName": f"railmate-{which}", "validationActions": ["Deny"]}
    left = [key for key in render("--set", f"admission.{which}=false") if "AdmissionPolicy" in key]
    assert len(left) == 2
    assert not [key for key in left if key.endswith(which)]


@pytest.mark.parametrize(
    "setting",
    [
        "logLevel=loud",
        "sysfsRoot=sys",
        "driverName=Not_A_Domain",
        "terminationGracePeriodSeconds=0",
        "unknown=1",
    ],
)
def test_values_out_of_range_are_refused(render: Render, setting: str) -> None:
    with pytest.raises(ValueError, match=setting.split("=")[0]):
        render("--set", setting)


def test_releases_of_other_names_do_not_meet(render: Render) -> None:
    assert "DaemonSet/second-railmate" in render(release="second")
