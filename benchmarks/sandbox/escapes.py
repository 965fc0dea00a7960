"""Programs that try to get out of the sandbox, for R10.

Each prints ESCAPED where it gets what it should not get; that none passes by not having tried, it must also print its
`proof` and end as stated. CANARY, PORT and LIBRARY in a text stand for a file of the host, a port on which the host
listens, and the folder of the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignment.sandbox import Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Escape:
    """A program, the text that shows that it tried, the ending it must have, and how often it is run."""

    program: str
    proof: str = "HELD"
    ending: Ending = "finished"
    runs: int = 1


def _calls(*names_and_numbers: tuple[str, int]) -> str:
    """A program that makes system calls by their numbers on x86_64; each must be unknown to the filter."""
    return f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = {list(names_and_numbers)!r} if os.uname().machine == 'x86_64' else []
for name, number in calls:
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 38:
        print('ESCAPED', name, ctypes.get_errno())
print('HELD')
"""


ESCAPES: dict[str, Escape] = {
    "fork bomb": Escape(
        program="""
import os
made = 0
for _ in range(10000):
    try:
        if os.fork() == 0:
            os._exit(0)
        made += 1
    except OSError:
        pass
print('ESCAPED' if made else 'HELD')
"""
    ),
    "starts programs": Escape(
        program="""
import os, subprocess, sys
for start in (
    lambda: subprocess.run([sys.executable, '-c', 'pass']),
    lambda: subprocess.run('true', shell=True),
    lambda: os.posix_spawn(sys.executable, [sys.executable, '-c', 'pass'], {}),
    lambda: os.popen('true'),
):
    try:
        start()
        print('ESCAPED')
    except OSError:
        pass
print('HELD')
"""
    ),
    "thread bomb": Escape(
        program="""
import os, threading
threading.stack_size(64 << 10)
hold, made = threading.Event(), 0
try:
    while made < 500:
        threading.Thread(target=hold.wait, daemon=True).start()
        made += 1
except (RuntimeError, MemoryError):
    pass
print('ESCAPED' if made > 40 else 'HELD', flush=True)
os._exit(0)
"""
    ),
    "memory bomb": Escape(
        program="""
held = []
try:
    while len(held) < 100:
        held.append(bytearray(16 << 20))
    print('ESCAPED')
except MemoryError:
    held.clear()
    print('HELD')
"""
    ),
    "maps memory": Escape(
        program="""
import mmap
for flags in (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS):
    try:
        mmap.mmap(-1, 1 << 34, flags=flags)
        print('ESCAPED')
    except OSError:
        pass
print('HELD')
"""
    ),
    "output flood": Escape(program="while True:\n    print('x' * 10000)", proof="x", ending="output"),
    "error flood": Escape(
        program="import sys\nwhile True:\n    print('x' * 10000, file=sys.stderr)", proof="", ending="output"
    ),
    "fills the disk": Escape(
        program="""
written = 0
for i in range(64):
    try:
        with open('/tmp/%d' % i, 'wb', buffering=0) as file:
            for _ in range(64):
                written += file.write(bytes(1 << 20))
    except OSError:
        pass
print('ESCAPED' if written > 5 << 20 else 'HELD')
"""
    ),
    "makes a big file": Escape(
        program="""
import os
with open('/tmp/big', 'wb') as file:
    for grow in (lambda: os.truncate('/tmp/big', 1 << 32), lambda: os.posix_fallocate(file.fileno(), 0, 1 << 32)):
        try:
            grow()
            print('ESCAPED')
        except OSError:
            pass
print('HELD')
"""
    ),
    "writes elsewhere": Escape(
        program="""
import os, sys
for path in ('/x', '/usr/x', '/usr/lib/x', 'LIBRARY/x.py', 'LIBRARY/os.py', '/dev/x', '/dev/shm/x', '/etc/x',
             '/var/tmp/x', '/home/x', '/root/x', 'CANARY', sys.executable):
    try:
        open(path, 'ab').close()
        print('ESCAPED', path)
    except OSError:
        pass
print('HELD')
"""
    ),
    "reads the host": Escape(
        program="""
import os
for path in ('CANARY', '/etc/passwd', '/etc/shadow', '/etc/hostname', '/root/.bashrc', '/var', '/sys', '/proc',
             '/proc/self/environ', '/proc/1/root', '/run', '/boot'):
    if os.path.exists(path):
        print('ESCAPED', path)
print('HELD')
"""
    ),
    "links to the host": Escape(
        program="""
import os
os.symlink('CANARY', '/tmp/link')
os.symlink('/proc/1/root/etc/passwd', '/tmp/other')
for path in ('/tmp/link', '/tmp/other'):
    try:
        open(path).read()
        print('ESCAPED', path)
    except OSError:
        pass
try:
    os.link('CANARY', '/tmp/hard')
    print('ESCAPED')
except OSError:
    print('HELD')
"""
    ),
    "reaches the network": Escape(
        program="""
import socket
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', PORT)),
    (socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', PORT)),
    (socket.AF_INET6, socket.SOCK_STREAM, ('::1', PORT)),
    (socket.AF_INET, socket.SOCK_RAW, ('127.0.0.1', 1)),
    (socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + 'alignment-canary'),
    (socket.AF_UNIX, socket.SOCK_STREAM, '/run/systemd/private'),
    (socket.AF_NETLINK, socket.SOCK_RAW, (0, 0)),
):
    try:
        socket.socket(family, kind).connect(address)
        print('ESCAPED', address)
    except OSError:
        pass
print('HELD')
"""
    ),
    "reads the environment": Escape(
        program="""
import os
known = {'PATH', 'HOME', 'TMPDIR', 'LANG', 'PYTHONUTF8', 'PYTHONHASHSEED', 'MALLOC_ARENA_MAX', 'PWD', 'LC_CTYPE'}
print('ESCAPED' if set(os.environ) - known else 'HELD', sorted(set(os.environ) - known))
"""
    ),
    "uses inherited descriptors": Escape(
        program="""
import os
for number in range(3, 1024):
    try:
        os.fstat(number)
        print('ESCAPED', number)
    except OSError:
        pass
print('HELD')
"""
    ),
    "signals others": Escape(
        program="""
import os, signal
reached = []
for number in (-1, 1, os.getppid(), *range(3, 3000)):
    try:
        os.kill(number, signal.SIGKILL)
        reached += [number] if number > 2 else []
    except OSError:
        pass
print('ESCAPED' if reached else 'HELD', reached[:5])
"""
    ),
    "kills its group": Escape(
        program="import os\nprint('TRIED', flush=True)\nos.kill(0, 9)\nprint('ESCAPED')", proof="TRIED"
    ),
    "looks into other processes": Escape(
        program=_calls(
            *(("ptrace", 101), ("process_vm_readv", 310), ("process_vm_writev", 311), ("pidfd_open", 434)),
            *(("pidfd_getfd", 438), ("kcmp", 312), ("process_madvise", 440), ("move_pages", 279)),
        )
    ),
    "makes namespaces and mounts": Escape(
        program=_calls(
            *(("mount", 165), ("umount2", 166), ("pivot_root", 155), ("chroot", 161), ("unshare", 272), ("setns", 308)),
            *(("clone3", 435), ("fork", 57), ("vfork", 58), ("clone", 56), ("fsopen", 430), ("open_tree", 428)),
            *(("move_mount", 429), ("open_by_handle_at", 304), ("mount_setattr", 442)),
        )
    ),
    "opens the kernel's doors": Escape(
        program=_calls(
            *(("bpf", 321), ("perf_event_open", 298), ("userfaultfd", 323), ("io_uring_setup", 425), ("keyctl", 250)),
            *(("add_key", 248), ("request_key", 249), ("kexec_load", 246), ("init_module", 175), ("reboot", 169)),
            *(("finit_module", 313), ("fanotify_init", 300), ("swapon", 167), ("syslog", 103), ("acct", 163)),
            *(("quotactl", 179), ("modify_ldt", 154), ("iopl", 172), ("seccomp", 317), ("personality", 135)),
            *(("settimeofday", 164), ("sethostname", 170), ("sync", 162), ("mknod", 133), ("execveat", 322)),
        )
    ),
    "takes memory nobody counts": Escape(
        program=_calls(
            *(("memfd_create", 319), ("memfd_secret", 447), ("shmget", 29), ("shmat", 30), ("msgget", 68)),
            *(("semget", 64), ("mq_open", 240), ("mlock", 149), ("mlockall", 151), ("vmsplice", 278)),
        )
    ),
    "becomes somebody else": Escape(
        program=_calls(
            *(("setuid", 105), ("setgid", 106), ("setresuid", 117), ("setgroups", 116), ("capset", 126)),
            *(("setsid", 112), ("setpgid", 109), ("setfsuid", 122), ("setpriority", 141), ("sched_setscheduler", 144)),
        )
    ),
    "enters the 32-bit way": Escape(
        program="""
import ctypes, mmap, os
print('TRIED', flush=True)
if os.uname().machine == 'x86_64':
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # mov eax, 20 (getpid); int 0x80; ret
    entry = ctypes.addressof(ctypes.c_char.from_buffer(page))
    ctypes.CFUNCTYPE(ctypes.c_int)(entry)()
    print('ESCAPED')
""",
        proof="TRIED",
    ),
    "enters the x32 way": Escape(
        program="""
import ctypes, os
print('TRIED', flush=True)
libc = ctypes.CDLL(None, use_errno=True)
if os.uname().machine == 'x86_64' and libc.syscall(0x40000000 + 39) > 0:
    print('ESCAPED')
""",
        proof="TRIED",
    ),
    "raises its limits": Escape(
        program="""
import resource
for name in ('AS', 'CPU', 'FSIZE', 'NOFILE', 'NPROC', 'MEMLOCK', 'CORE'):
    number = getattr(resource, 'RLIMIT_' + name)
    hard = resource.getrlimit(number)[1]
    try:
        resource.setrlimit(number, (hard + 1, hard + 1))
        print('ESCAPED', name)
    except (OSError, ValueError):
        pass
print('HELD')
"""
    ),
    "opens devices": Escape(
        program="""
import os
for path in ('/dev/mem', '/dev/kmsg', '/dev/kvm', '/dev/vda', '/dev/sda', '/dev/tty', '/dev/ptmx', '/dev/fuse'):
    try:
        os.open(path, os.O_RDWR)
        print('ESCAPED', path)
    except OSError:
        pass
try:
    os.mknod('/tmp/disk', 0o600 | 0o060000, os.makedev(254, 0))
    print('ESCAPED')
except OSError:
    print('HELD')
"""
    ),
    "is deaf": Escape(
        program="""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
print('TRIED', flush=True)
while True:
    pass
""",
        proof="TRIED",
        ending="timeout",
    ),
    "is silent": Escape(
        program="import os, time\nos.closerange(0, 64)\ntime.sleep(3600)", proof="", ending="timeout"
    ),
    "leaves state": Escape(
        program="""
import os
places = ('/tmp/state', '/dev/shm/state', '/state', os.path.expanduser('~/state'))
if any(map(os.path.exists, places)):
    print('ESCAPED')
for place in places:
    try:
        open(place, 'w').write('here')
    except OSError:
        pass
print('HELD')
""",
        runs=2,
    ),
    "crashes": Escape(
        program="import ctypes\nprint('TRIED', flush=True)\nctypes.string_at(0)\nprint('ESCAPED')", proof="TRIED"
    ),
    "finds other programs": Escape(
        program="""
import os
for path in ('/bin/sh', '/bin/bash', '/usr/bin/sudo', '/bin/su', '/usr/bin/env', '/usr/bin/bwrap', '/usr/bin/gdb'):
    if os.path.exists(path):
        print('ESCAPED', path)
print('HELD')
"""
    ),
}
"""What it tries -> the program."""
