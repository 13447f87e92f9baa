"""Builds everything that the component and e2e tests take from the cache, slowest first.

Tests take each piece when they need it and wait for it if this is still building it; a build that
fails here fails again there, with its log.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness import driverimage, gobuild, vnode_disk, vnode_images
from harness.cluster import Cluster
from harness.cluster_cli import build
from harness.shell import main_guard, progress
from harness.vnode_packages import UnavailableError


def main(argv: Sequence[str]) -> int:
    if argv == ["component"]:
        gobuild.build(
            [
                "etcd",
                "kube-apiserver",
                "kube-scheduler",
                "kube-controller-manager",
                "kubectl",
                "helm",
                "allocate",
            ]
        )
        return 0
    if argv:
        print(f"prepare: unknown argument {argv[0]!r}", file=sys.stderr)
        return 2
    build(Cluster().wanted)
    image = driverimage.build()
    try:
        vnode_disk.boot_files()
        vnode_images.store_disk(image)
    except UnavailableError as error:
        progress("prepare", f"no virtual node: {error}")
    progress("prepare", "all that the tests need is in the cache")
    return 0


if __name__ == "__main__":
    main_guard(main)
