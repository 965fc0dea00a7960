"""The system calls that a program in the sandbox may make: a list of what is allowed; all else fails with ENOSYS.

A list of what is forbidden would let pass whatever a newer kernel adds. ENOSYS, not EPERM: the C library then takes the
older call it knows (`clone` for `clone3`). Not on the list are, among others, ptrace and reading another process's
memory, mount, chroot, namespaces, bpf, perf, userfaultfd, io_uring, keys, kexec, modules, sockets other than pairs,
memory that neither the limit of address space nor the quota of /tmp counts (memfd, System V, message queues), sessions
and process groups of its own, and new processes: `clone` makes threads only. Calls by another architecture's entry
(32-bit `int 0x80`) kill the process.

The filter is compiled by libseccomp, which knows the numbers of this machine's calls and is on nearly every Linux.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import lru_cache

from alignment.errors import UserError

_NAMES = """
    read write readv writev pread64 pwrite64 lseek close close_range dup dup2 dup3 pipe pipe2 fcntl flock
    open openat creat access faccessat faccessat2 stat lstat fstat newfstatat statx statfs fstatfs
    getdents getdents64 getcwd chdir fchdir umask mkdir mkdirat rmdir rename renameat renameat2 link linkat
    symlink symlinkat unlink unlinkat readlink readlinkat chmod fchmod fchmodat truncate ftruncate fallocate
    fsync fdatasync fadvise64 utimensat utimes futimesat sendfile copy_file_range
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2
    socketpair sendto recvfrom sendmsg recvmsg shutdown getsockopt setsockopt getsockname getpeername
    mmap munmap mprotect mremap madvise brk
    futex set_robust_list get_robust_list set_tid_address rseq membarrier restart_syscall
    arch_prctl execve exit exit_group wait4 waitid
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack
    kill tkill tgkill pause alarm getitimer setitimer
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times
    getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid
    getrlimit setrlimit prlimit64 getrusage uname sysinfo getrandom getcpu getpriority
    sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min
"""
ALLOWED = tuple(_NAMES.split())
"""Calls allowed whatever their arguments. Limits can only be lowered: raising one needs a capability."""

# Thread flags of clone(2); with CLONE_THREAD the kernel shares memory and descriptors, and no namespace may be new.
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000  # user, pid, net, uts, ipc, cgroup and mount namespaces
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what opening and asking a file or a pipe needs."""
PRCTLS = (15, 16)
"""PR_SET_NAME, PR_GET_NAME."""

_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000
_BAD_ARCHITECTURE = 2
_EQUAL, _MASKED_EQUAL = 4, 7


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`: an argument's number, how it is compared, and with what."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise UserError(
            "libseccomp is missing, and programs that a model wrote run only behind its filter: "
            "apt-get install libseccomp2"
        ) from error
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    library.seccomp_attr_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    library.seccomp_rule_add_array.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Comparison)),
    ]
    library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return library


@lru_cache(maxsize=4)
def compiled(without: frozenset[str] = frozenset()) -> bytes:
    """The filter as a BPF program for this machine, as bubblewrap's `--seccomp` reads it.

    Args:
        without: calls of the list to forbid as well.

    Raises UserError when libseccomp is missing or refuses.
    """
    library = _library()
    context = library.seccomp_init(_ERRNO | errno.ENOSYS)
    if not context:
        raise UserError("libseccomp cannot make a filter (seccomp_init failed)")
    try:
        _check(library.seccomp_attr_set(context, _BAD_ARCHITECTURE, _KILL_PROCESS), "the wrong-architecture action")
        for name in ALLOWED:
            if name not in without:
                _allow(library, context, name)
        threads = _Comparison(0, _MASKED_EQUAL, _CLONE_THREAD | _CLONE_NEW, _CLONE_THREAD)
        _allow(library, context, "clone", threads)
        for request in IOCTLS:
            _allow(library, context, "ioctl", _Comparison(1, _EQUAL, request, 0))
        for option in PRCTLS:
            _allow(library, context, "prctl", _Comparison(0, _EQUAL, option, 0))
        return _exported(library, context)
    finally:
        library.seccomp_release(context)


def _allow(library: ctypes.CDLL, context: int, name: str, comparison: _Comparison | None = None) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:  # this architecture has no such call, or this libseccomp does not know it: it stays forbidden
        return
    compared = None if comparison is None else ctypes.pointer(comparison)
    _check(library.seccomp_rule_add_array(context, _ALLOW, number, int(compared is not None), compared), name)


def _exported(library: ctypes.CDLL, context: int) -> bytes:
    file = os.memfd_create("seccomp")
    try:
        _check(library.seccomp_export_bpf(context, file), "the program")
        return os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise UserError(f"libseccomp refuses {what}: {os.strerror(-result)}")
