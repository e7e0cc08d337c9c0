"""Control groups are found on every kind of machine, and what they counted is read right. On copies of kernel files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.sandbox.cgroups import CgroupsUnavailableError, Counters, Group, Hierarchy, own_groups

MIXED = (
    "30 1 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "31 30 0:28 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "32 30 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "33 30 0:30 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n"
    "34 30 0:31 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def test_the_groups_of_a_mixed_machine_are_found_each_by_its_own_path() -> None:
    found = own_groups(MIXED, "4:memory:/service/abc\n8:pids:/\n1:cpu,cpuacct:/\n0::/\n")
    assert found == {
        "memory": "/sys/fs/cgroup/memory/service/abc",
        "pids": "/sys/fs/cgroup/pids",
        "cpu": "/sys/fs/cgroup/cpu",
        "cpuacct": "/sys/fs/cgroup/cpu",
        "unified": "/sys/fs/cgroup/unified",
    }


def test_the_group_of_a_version_2_machine_is_found_also_in_a_container() -> None:
    mount = "30 1 0:27 {} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    assert own_groups(mount.format("/"), "0::/user.slice/a.scope\n") == {"unified": "/sys/fs/cgroup/user.slice/a.scope"}
    assert own_groups(mount.format("/docker/x"), "0::/docker/x/y\n") == {"unified": "/sys/fs/cgroup/y"}
    assert own_groups(mount.format("/docker/x"), "0::/elsewhere\n") == {}


def test_version_2_sets_limits_and_reads_what_was_counted(tmp_path: Path) -> None:
    path = str(tmp_path)
    for name in ("memory.swap.max", "memory.oom.group"):
        (tmp_path / name).touch()
    group = Group(version=2, memory=path, pids=path, unified=path)
    assert group.directories() == (path,)
    assert group.entrances(forked_into=False) == (f"{path}/cgroup.procs",)
    assert group.entrances(forked_into=True) == ()
    group.limit(memory_bytes=1000, max_pids=7)
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert written == {"memory.max": "1000", "pids.max": "7", "memory.swap.max": "0", "memory.oom.group": "1"}
    assert group.counters() == Counters()
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 3\noom_group_kill 1\n")
    (tmp_path / "memory.peak").write_text("999\n")
    (tmp_path / "pids.events").write_text("max 4\n")
    (tmp_path / "pids.peak").write_text("8\n")
    assert group.counters() == Counters(memory_kills=3, refused_forks=4, peak_memory_bytes=999, peak_pids=8)


def test_a_version_2_group_without_controllers_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    with pytest.raises(
        CgroupsUnavailableError, match=r"not given the controllers memory: .*systemd-run --user --scope"
    ):
        Hierarchy({"unified": str(tmp_path)}, "1-2", os.getpid())


def test_a_machine_without_control_groups_is_told_so() -> None:
    with pytest.raises(CgroupsUnavailableError, match="no control group file system"):
        Hierarchy({}, "1-2", os.getpid())


def test_groups_that_may_not_be_made_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    hierarchy = Hierarchy({"memory": f"{tmp_path}/file", "pids": f"{tmp_path}/file"}, "1-2", os.getpid())
    with pytest.raises(CgroupsUnavailableError, match=r"cannot be made here .*run as root, or by `systemd-run"):
        hierarchy.make()


def test_version_2_moves_only_its_own_processes_out_of_the_way(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")
    hierarchy = Hierarchy({"unified": str(tmp_path)}, "1-2", os.getpid())
    hierarchy.make()
    assert hierarchy.directories() == (f"{tmp_path}/asyncrl-1-2",)
    assert (tmp_path / "asyncrl-1-2" / "cgroup.subtree_control").read_text() == "+memory +pids"
