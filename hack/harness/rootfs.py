"""The root file system of a kind node: Debian or Ubuntu packages and the base files of the kind module."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from harness import debian
from harness.cache import artefact, content_key, log_file
from harness.gobuild import CNI_PLUGINS, KUBERNETES_VERSION
from harness.shell import HarnessError, run

# What kind's own base image installs (images/base/Dockerfile of its module), less the storage clients, and what
# the bench's simulated hardware and tests call inside a node.
PACKAGES = (
    "systemd", "dbus", "conntrack", "iptables", "nftables", "iproute2", "ethtool", "util-linux", "mount", "kmod",
    "libseccomp2", "pigz", "e2fsprogs", "bash", "ca-certificates", "jq", "procps", "hostname", "busybox-static",
)  # fmt: skip
_LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
_RUNTIME = ("containerd", "containerd-shim-runc-v2", "ctr", "crictl")
_KUBERNETES = ("kubelet", "kubeadm", "kubectl")
BINARIES = (*_RUNTIME, "runc", *_KUBERNETES, *CNI_PLUGINS)

# kind applies these two right after `kubeadm init`; there is no CNI daemon and no provisioner here.
_MANIFESTS = {
    "default-cni.yaml": """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: node-image-without-cni-daemon
  namespace: kube-system
""",
    "default-storage.yaml": """\
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: standard
  annotations:
    storageclass.kubernetes.io/is-default-class: "true"
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
""",
}


def packages_key(source: debian.Distribution) -> str:
    """Key of the bare package tree."""
    return content_key(source.id, source.codename, source.components, *PACKAGES, *_LEFT_OUT)


def packages_tree(source: debian.Distribution) -> Path:
    """The bare package tree, made by mmdebstrap from the machine's own archive (under a minute)."""

    def make(directory: Path) -> None:
        tool = debian.unpacked("mmdebstrap", ("mmdebstrap",))
        if not Path(source.keyring).exists():
            raise HarnessError(
                f"{source.keyring} is missing; install it (apt-get install {source.id}-archive-keyring)"
            )
        environment = {name: tool.environment()[name] for name in ("PATH", "PERL5LIB")}
        environment["TMPDIR"] = "/tmp"
        run(
            ["nice", "mmdebstrap", "--mode=root", "--variant=minbase", f"--keyring={source.keyring}",
             f"--components={source.components}", f"--include={','.join(PACKAGES)}",
             '--aptopt=APT::Install-Recommends "false"', '--aptopt=Acquire::Languages "none"',
             *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
             source.codename, directory / "root", source.mirror],
            env=environment, log=log_file("rootfs"),
        )  # fmt: skip

    what = f"installing {source.id} {source.codename} packages into a directory"
    return artefact("rootfs", packages_key(source), make, what) / "root"


def build(
    root: Path, packages: Path, kind_source: Path, binaries: Mapping[str, Path], sandbox_image: str
) -> None:
    """Fills `root` with everything of a node but its preloaded images."""
    run(["cp", "-a", "--reflink=auto", packages, root])
    _clear(root)
    _add_kind_files(root, kind_source / "images/base/files")
    _trim_systemd(root)
    _add_binaries(root, binaries)
    _configure_containerd(root, sandbox_image, binaries["ctr"])
    (root / "kind/version").write_text(KUBERNETES_VERSION)
    for name, text in _MANIFESTS.items():
        path = root / "kind/manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("etc/cni/net.d", "etc/kubernetes/manifests", "lib/modules", "etc/cdi"):
        (root / name).mkdir(parents=True, exist_ok=True)


def _clear(root: Path) -> None:
    for pattern in ("etc/apt/sources.list", "etc/apt/sources.list.d/*", "var/cache/apt/*", "var/lib/apt/lists/*",
                    "var/log/*", "dev/*"):  # fmt: skip
        for path in root.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _add_kind_files(root: Path, files: Path) -> None:
    for source in sorted(path for path in files.rglob("*") if path.is_file()):
        part = source.relative_to(files)
        if part.parts[0] == "LICENSES" or part.name == "containerd-fuse-overlayfs.service":
            continue
        target = root / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        # The module zip keeps no modes; everything in a bin directory is a script.
        target.chmod(0o755 if "bin" in part.parts else 0o644)


def _trim_systemd(root: Path) -> None:
    """Units that a container has no use for, as kind's Dockerfile removes them, and those it enables."""
    for pattern in (
        "lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service",
        "lib/systemd/system/multi-user.target.wants/*",
        "etc/systemd/system/*.wants/*",
        "lib/systemd/system/local-fs.target.wants/*",
        "lib/systemd/system/sockets.target.wants/*udev*",
        "lib/systemd/system/sockets.target.wants/*initctl*",
        "lib/systemd/system/basic.target.wants/*",
    ):
        for path in root.glob(pattern):
            path.unlink()
    with (root / "etc/systemd/journald.conf").open("a") as file:
        file.write("ReadKMsg=no\n")
    init = root / "sbin/init"
    init.unlink(missing_ok=True)
    init.symlink_to("/usr/lib/systemd/systemd")
    systemctl: list[str | Path] = ["chroot", root, "systemctl"]
    run([*systemctl, "enable", "kubelet.service", "containerd.service", "undo-mount-hacks.service"])
    run(
        [*systemctl, "mask", "systemd-binfmt.service"]
    )  # it would register handlers with the machine's kernel


def _add_binaries(root: Path, binaries: Mapping[str, Path]) -> None:
    places = {
        **dict.fromkeys(_RUNTIME, "usr/local/bin"),
        "runc": "usr/local/sbin",
        **dict.fromkeys(_KUBERNETES, "usr/bin"),
        **dict.fromkeys(CNI_PLUGINS, "opt/cni/bin"),
    }
    for name, place in places.items():
        (root / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(binaries[name], root / place / name)


def _configure_containerd(root: Path, sandbox_image: str, ctr: Path) -> None:
    path = root / "etc/containerd/config.toml"
    path.write_text(containerd_config(path.read_text(), sandbox_image))
    spec = json.loads(run([ctr, "oci", "spec"]))
    spec["process"].pop("rlimits", None)
    hooks = spec.setdefault("hooks", {}).setdefault("createContainer", [])
    hooks.append({"path": "/kind/bin/mount-product-files.sh"})
    (root / "etc/containerd/cri-base.json").write_text(json.dumps(spec))


def containerd_config(text: str, sandbox_image: str) -> str:
    """kind's containerd configuration with our pause image and without the fuse snapshotter, which is not built.

    Raises HarnessError when the text is not what the pinned kind module has.
    """
    text, proxies = re.subn(
        r"^\[proxy_plugins\]\n.*?(?=^\[plugins)", "", text, flags=re.DOTALL | re.MULTILINE
    )
    text, images = re.subn(r'sandbox_image = ".*"', f'sandbox_image = "{sandbox_image}"', text)
    if (proxies, images) != (1, 1):
        raise HarnessError(
            "kind's containerd configuration has changed; adapt containerd_config in harness/rootfs.py"
        )
    return text
