"""What the experiments need of the machine, and in one line what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from studies.experiments import core


class Missing(Exception):
    """This machine or this user cannot run the experiments; the message is one line for the user."""


def check() -> None:
    """Raises Missing."""
    if not sys.platform.startswith("linux"):
        raise Missing("namespaces and cgroups are Linux's; this is another system")
    check_network()
    check_core()
    if len(os.sched_getaffinity(0)) < 2:
        raise Missing("two cores are needed: one for the edge, one for the cloud; there is one")


def check_network() -> None:
    """Raises Missing where no namespaces can be made or no traffic shaped."""
    if os.geteuid() != 0:
        raise Missing("needs root, to make network namespaces and hold a process to a share of a core")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Missing(f"needs the command {tool} (package iproute2)")
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if done.returncode:
        raise Missing("network namespaces are not permitted here, not even to root (a container without NET_ADMIN?)")


def check_core() -> None:
    """Raises Missing where no process can be held to a share of a core."""
    if os.geteuid() != 0:
        raise Missing("needs root, to hold a process to a share of a core")
    if core.find() is None:
        raise Missing("needs a cgroup with a cpu controller (v1 or v2) that may be written to")
