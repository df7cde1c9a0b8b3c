"""Segments: made, attached, verified, swept; and whether the memory for them is there."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import mmap
import os
from pathlib import Path

import pytest

from aioarena._platform import memory
from aioarena._platform.memory import (
    Segment,
    SegmentRef,
    attach,
    available_memory,
    cgroup_headroom,
    owned_name,
    require_memory,
    sweep,
)
from aioarena._platform.process import ProcessIdentity
from aioarena.exceptions import ArenaError, HandleError, NoSpaceError

GIB = 1 << 30
MIB = 1 << 20


# Is the memory there? ----------------------------------------------------------------------------------------------------


class Machine:
    """A /proc and a /sys/fs/cgroup of our own making.

    Args:
        root: Where to make them.
        available: MemAvailable in bytes, None for a kernel that does not say.
    """

    def __init__(self, root: Path, available: int | None = 64 * GIB) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        lines = ["MemTotal:       99999999 kB", f"MemAvailable:   {available // 1024} kB"] if available is not None else []
        (self.proc / "meminfo").write_text("\n".join([*lines, "Buffers:  12 kB"]))

    def belongs_to(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def v2(self, path: str, limit: str, usage: int, inactive: int = 0) -> None:
        directory = self.cgroup / path.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{usage}\n")
        (directory / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nfile 5\n")

    def v1(self, path: str, limit: int, usage: int, inactive: int = 0) -> None:
        directory = self.cgroup / "memory" / path.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (directory / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (directory / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {inactive}\n")

    @property
    def headroom(self) -> int | None:
        return cgroup_headroom(self.proc, self.cgroup)

    def require(self, nbytes: int) -> None:
        require_memory(nbytes, on_shm=False, proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_v2_limit(machine: Machine) -> None:
    """Limit minus usage; page cache that the kernel would give up does not count as used."""
    machine.belongs_to("0::/pod/container")
    machine.v2("pod/container", str(4 * GIB), 3 * GIB, inactive=GIB // 2)
    assert machine.headroom == GIB + GIB // 2


def test_v2_without_a_limit(machine: Machine) -> None:
    """ "max" is no limit."""
    machine.belongs_to("0::/pod")
    machine.v2("pod", "max", 3 * GIB)
    assert machine.headroom is None
    machine.require(GIB)


def test_v2_limits_of_ancestors(machine: Machine) -> None:
    """The tightest of all groups on the way to the root binds, whatever the innermost says."""
    machine.belongs_to("0::/slice/pod/container")
    machine.v2("slice/pod/container", "max", GIB)
    machine.v2("slice/pod", str(2 * GIB), GIB)
    machine.v2("slice", str(8 * GIB), 7 * GIB + GIB // 2)
    assert machine.headroom == GIB // 2
    machine.v2("slice", "max", 0)
    assert machine.headroom == GIB


def test_v2_inside_a_container(machine: Machine) -> None:
    """Where the group's path does not exist below the mount, the mount's own files count."""
    machine.belongs_to("0::/docker/0123456789abcdef")
    machine.v2("/", str(GIB), 100 * MIB)
    assert machine.headroom == GIB - 100 * MIB


def test_v2_path_outside_of_the_namespace(machine: Machine) -> None:
    """A group outside of this cgroup namespace shows a path that leads out of the mount: the mount's own files count."""
    machine.belongs_to("0::/../../other")
    machine.v2("/", str(GIB), 0)
    assert machine.headroom == GIB


def test_usage_over_the_limit(machine: Machine) -> None:
    """Never less than nothing."""
    machine.belongs_to("0::/")
    machine.v2("/", str(GIB), 2 * GIB)
    assert machine.headroom == 0


def test_v1_limit(machine: Machine) -> None:
    """The memory controller of v1, with its own names for files and fields."""
    machine.belongs_to("9:name=systemd:/", "4:cpu,memory:/pod", "0::/")
    machine.v1("pod", 4 * GIB, 3 * GIB, inactive=GIB // 4)
    assert machine.headroom == GIB + GIB // 4


def test_v1_without_a_limit(machine: Machine) -> None:
    """v1 says so with the largest multiple of a page."""
    machine.belongs_to("4:memory:/pod")
    machine.v1("pod", (1 << 63) - 4096, 3 * GIB)
    machine.v1("/", (1 << 63) - 4096, 3 * GIB)
    assert machine.headroom is None


def test_v1_limits_of_ancestors(machine: Machine) -> None:
    """As in v2."""
    machine.belongs_to("4:memory:/slice/pod")
    machine.v1("slice/pod", (1 << 63) - 4096, GIB)
    machine.v1("slice", 2 * GIB, GIB)
    assert machine.headroom == GIB


def test_both_hierarchies(machine: Machine) -> None:
    """Where both are mounted, the tighter one counts."""
    machine.belongs_to("4:memory:/pod", "0::/pod")
    machine.v1("pod", 3 * GIB, 0)
    machine.v2("pod", str(2 * GIB), 0)
    assert machine.headroom == 2 * GIB
    machine.v1("pod", GIB, 0)
    assert machine.headroom == GIB


def test_other_controllers_do_not_count(machine: Machine) -> None:
    """Only the hierarchy that has the memory controller says anything about memory."""
    machine.belongs_to("4:cpuset,memory_pressure:/pod", "3:pids:/pod")
    machine.v1("pod", GIB, 0)
    assert machine.headroom is None


@pytest.mark.parametrize("content", ["", "nonsense\n", "0::\n"])
def test_unreadable_groups(machine: Machine, content: str) -> None:
    """What cannot be understood is no limit, and no error."""
    machine.belongs_to()
    (machine.proc / "self" / "cgroup").write_text(content)
    assert machine.headroom is None
    machine.require(GIB)


def test_no_proc_at_all(tmp_path: Path) -> None:
    """Without the files nothing is refused."""
    assert cgroup_headroom(tmp_path, tmp_path) is None
    assert available_memory(tmp_path) is None
    require_memory(GIB, on_shm=False, proc=tmp_path, cgroup=tmp_path)


def test_a_limit_whose_usage_is_missing(machine: Machine) -> None:
    """Half of the numbers are no numbers."""
    machine.belongs_to("0::/")
    machine.v2("/", str(GIB), 0)
    (machine.cgroup / "memory.current").unlink()
    assert machine.headroom is None


def test_the_error_of_a_cgroup(machine: Machine) -> None:
    """It names what is needed, what is left, where, and what to do; the numbers are attributes; it is an OSError."""
    machine.belongs_to("0::/pod")
    machine.v2("pod", str(2 * GIB), GIB)
    machine.require(GIB)
    with pytest.raises(NoSpaceError) as caught:
        machine.require(GIB + 1)
    error = caught.value
    assert (error.needed, error.available) == (GIB + 1, GIB)
    assert isinstance(error, OSError)
    assert isinstance(error, ArenaError)
    assert "may use up to 1.0 GiB" in str(error)
    assert "the memory cgroup has 1.0 GiB left" in str(error)
    assert "ArenaConfig" in str(error)


def test_the_error_of_a_machine(tmp_path: Path) -> None:
    """Without a limit it is what the machine has available that counts."""
    machine = Machine(tmp_path, available=700 * MIB)
    machine.belongs_to("0::/")
    assert available_memory(machine.proc) == 700 * MIB
    machine.require(700 * MIB)
    with pytest.raises(NoSpaceError, match=r"the machine has 700.0 MiB left") as caught:
        machine.require(701 * MIB)
    assert (caught.value.needed, caught.value.available) == (701 * MIB, 700 * MIB)


def test_the_error_of_shm(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For file segments the free space of /dev/shm counts as well."""
    machine.belongs_to("0::/")
    monkeypatch.setattr(memory, "SHM_DIRECTORY", tmp_path)
    free = os.statvfs(tmp_path)
    free_bytes = free.f_bavail * free.f_frsize
    require_memory(MIB, on_shm=True, proc=machine.proc, cgroup=machine.cgroup)
    with pytest.raises(NoSpaceError, match=r"/dev/shm has .* free; raise --shm-size") as caught:
        require_memory(4 * free_bytes, on_shm=True, proc=machine.proc, cgroup=machine.cgroup)
    assert caught.value.needed == 4 * free_bytes
    assert caught.value.available < 2 * free_bytes


def test_this_machine() -> None:
    """The real files are understood."""
    available = available_memory()
    assert available is not None and available > 0
    headroom = cgroup_headroom()
    assert headroom is None or headroom >= 0


# Segments ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memfd", "shm"])
def segment(request: pytest.FixtureRequest, tmp_path: Path) -> Segment:
    if request.param == "memfd":
        return Segment.memfd("aioarena-test", 3 * 4096)
    return Segment.shm("arena", 3 * 4096, tmp_path)


def test_attach_shares_the_memory(segment: Segment) -> None:
    """What one side writes the other reads; it begins zeroed, and has the size asked for."""
    other = attach(segment.ref)
    assert other is not segment.mapping
    assert (len(other.view), other.nbytes) == (3 * 4096, 3 * 4096)
    assert not any(other.view)
    segment.mapping.view[5000] = 7
    assert other.view[5000] == 7
    other.view[1] = 9
    assert segment.mapping.view[1] == 9


def test_attaching_twice_is_one_mapping(segment: Segment) -> None:
    """Several readers of a process share the mapping, for as long as one of them has it."""
    mapping = attach(segment.ref)
    assert attach(segment.ref) is mapping
    before = len(os.listdir("/proc/self/fd"))
    del mapping
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert attach(segment.ref) is not None


def test_a_mapping_outlives_its_segment(segment: Segment) -> None:
    """Closing and unlinking take the name and the descriptor, not the memory of whoever is attached."""
    other = attach(segment.ref)
    segment.mapping.view[0] = 3
    segment.close()
    segment.close()
    del segment
    gc.collect()
    assert other.view[0] == 3


def test_a_closed_segment_cannot_be_attached(segment: Segment) -> None:
    """Its descriptor is gone, and its name too."""
    ref = segment.ref
    segment.close()
    with pytest.raises((FileNotFoundError, HandleError)):
        attach(ref)


def test_a_collected_segment_closes_itself(segment: Segment, request: pytest.FixtureRequest) -> None:
    """So that a constructor which fails half-way leaves nothing."""
    path = Path(segment.ref.path)
    other = Segment.memfd("aioarena-test", 4096)
    descriptor = Path(other.ref.path)
    assert descriptor.exists()
    del other
    gc.collect()
    assert not descriptor.exists()
    assert path.exists()


def test_a_forked_child_does_not_unlink(tmp_path: Path) -> None:
    """Only the process that made a file removes it, whatever dies in its children."""
    segment = Segment.shm("arena", 4096, tmp_path)
    pid = os.fork()
    if pid == 0:
        segment.unlink()
        segment.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert Path(segment.ref.path).exists()
    segment.close()
    assert not list(tmp_path.iterdir())


def test_memfd_is_sealed_against_shrinking() -> None:
    """Nobody can cut the memory away under a reader, who would get SIGBUS."""
    segment = Segment.memfd("aioarena-test", 8192)
    fd = os.open(segment.ref.path, os.O_RDWR)
    try:
        for size in (4096, 0, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(fd)


def test_shm_is_for_this_user_only(tmp_path: Path) -> None:
    """Whatever the umask says."""
    umask = os.umask(0)
    try:
        segment = Segment.shm("arena", 4096, tmp_path)
    finally:
        os.umask(umask)
    assert Path(segment.ref.path).stat().st_mode & 0o777 == 0o600


def test_shm_after_unlink_attaches_by_descriptor(tmp_path: Path) -> None:
    """The name may go while late readers are still to come."""
    segment = Segment.shm("arena", 4096, tmp_path)
    ref = segment.ref
    segment.unlink()
    segment.unlink()
    assert list(tmp_path.iterdir()) == []
    segment.mapping.view[0] = 5
    assert attach(ref).view[0] == 5


def test_reserve_takes_memory_piece_by_piece(tmp_path: Path) -> None:
    """A file segment knows what has memory behind it; reserving again, or less, is free."""
    segment = Segment.shm("arena", 64 * 4096, tmp_path)
    path = Path(segment.ref.path)
    assert (segment.reserved, path.stat().st_blocks) == (0, 0)
    assert segment.needs_reserve(1)
    segment.reserve(8 * 4096)
    assert segment.reserved == 8 * 4096
    assert path.stat().st_blocks * 512 == 8 * 4096
    assert not segment.needs_reserve(8 * 4096)
    segment.reserve(4096)
    assert segment.reserved == 8 * 4096
    assert not Segment.memfd("aioarena-test", 4096).needs_reserve(4096)


def test_mismatches_are_named(segment: Segment, tmp_path: Path) -> None:
    """Another inode, size or kind of file is refused with what was expected and found, before anything is mapped."""
    ref = segment.ref
    other = tmp_path / "other"
    other.write_bytes(bytes(ref.nbytes))
    for wrong, what in (
        (dataclasses.replace(ref, inode=ref.inode + 1), "inode"),
        (dataclasses.replace(ref, device=ref.device + 1), "inode"),
        (dataclasses.replace(ref, nbytes=4096), "size"),
        (dataclasses.replace(ref, path=str(other)), "inode"),
        (dataclasses.replace(ref, path="/dev/zero"), "type"),
        (dataclasses.replace(ref, path="/dev"), "type"),
    ):
        with pytest.raises(HandleError, match=f"is not the segment the handle names: {what} is ") as caught:
            attach(wrong)
        assert caught.value.expected != caught.value.found
    with pytest.raises(FileNotFoundError):
        attach(dataclasses.replace(ref, path="/proc/self/fd/99999", fallback=None))


def test_a_memfd_without_seals_is_refused() -> None:
    """Its owner could cut it short under us."""
    fd = os.memfd_create("aioarena-test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        status = os.fstat(fd)
        ref = SegmentRef(f"/proc/self/fd/{fd}", None, status.st_dev, status.st_ino, 4096, sealed=True)
        with pytest.raises(HandleError, match="seals is not sealed, expected sealed against shrinking"):
            attach(ref)
        assert attach(dataclasses.replace(ref, sealed=False)).nbytes == 4096
    finally:
        os.close(fd)


def test_mismatches_leave_no_descriptor(segment: Segment) -> None:
    """A refusal closes what it opened."""
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        with pytest.raises(HandleError):
            attach(dataclasses.replace(segment.ref, inode=1))
    assert os.listdir("/proc/self/fd") == before


def test_a_mapping_is_page_aligned(segment: Segment) -> None:
    """So that slots are."""
    assert segment.mapping.address % mmap.PAGESIZE == 0


# Sweeping ----------------------------------------------------------------------------------------------------------------


def test_sweep(tmp_path: Path) -> None:
    """What the dead left goes; everything else stays. A directory that is not there is none to sweep."""
    me = ProcessIdentity.current()
    dead = f"aioarena-{me.pid_namespace}-{me.pid}-{me.start_ticks + 1}"
    go = [f"{dead}-00.arena", f"{dead}-0a.control", f"{dead}-ff.sock"]
    stay = [
        owned_name("sock"),
        owned_name("arena"),
        f"aioarena-{me.pid_namespace + 1}-{me.pid}-1-00.arena",
        f"{dead}-00.txt",
        f"{dead}-XY.arena",
        f"{dead}.arena",
        "aioarena",
        "notes",
    ]
    for name in go + stay:
        (tmp_path / name).touch()
    assert sorted(sweep(tmp_path)) == sorted(go)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stay)
    assert sweep(tmp_path) == []
    assert sweep(tmp_path / "nowhere") == []


def test_owned_names_are_fresh_and_say_whose() -> None:
    """Two never collide, and the process can be told from the name."""
    names = {owned_name("sock") for _ in range(100)}
    assert len(names) == 100
    me = ProcessIdentity.current()
    assert all(name.startswith(f"aioarena-{me.pid_namespace}-{me.pid}-{me.start_ticks}-") for name in names)
