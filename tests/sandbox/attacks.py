"""What hostile programs try, as a table: a row is a name, how it must end, and a program.

A program prints BREACH if its attack succeeds. `{file}` is a file of the caller, `{folder}` a folder that the caller may
write into, `{tmp}` the program's own, `{port}` a port of the loopback at which the caller listens, `{unix}` and `{abstract}` its sockets, `{pid}`
the caller's process. To add an attack, add a row.

`kept` rows must print nothing of the sort; in the sandbox they end by themselves. Other rows name the verdict at which
a limit ends them. `PLAIN` has those that must succeed without a sandbox, so that the table cannot pass by mistake.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """One row."""

    name: str
    source: str
    ends: str = "kept"
    """`kept`, or the verdict: `timeout`, `memory`, `output`."""


def tries(name: str, body: str) -> Attack:
    """A row whose program breaches unless `body` raises."""
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    return Attack(
        name,
        f"try:\n{lines}\nexcept BaseException as e:\n    print('kept', type(e).__name__)\nelse:\n    print('BREACH')\n",
    )


CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
def raw(number, *args):
    if libc.syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), str(number))
"""

FILES = [
    tries("reads a file of the caller", "open({file!r}).read()"),
    tries("reads /etc/passwd", "open('/etc/passwd').read()"),
    tries("reads /etc/shadow", "open('/etc/shadow').read()"),
    tries("lists root's home", "import os; assert [x for x in os.listdir('/root') if x != '.pyenv']"),
    tries("lists the caller's folder", "import os; os.listdir({folder!r})"),
    tries("writes into the caller's folder", "open({folder!r} + '/breach', 'w').write('x')"),
    tries("writes into /usr", "open('/usr/breach', 'w')"),
    tries("writes into /", "open('/breach', 'w')"),
    tries("writes into /etc", "open('/etc/breach', 'w')"),
    tries("writes over the interpreter's library", "import os; open(os.__file__, 'a')"),
    tries("writes over the sandbox's programs", "open('/sandbox/zygote.py', 'a')"),
    tries(
        "makes a device",
        "import os, stat; os.mknod('{tmp}/d', 0o600 | stat.S_IFBLK, os.makedev(254, 0)); open('{tmp}/d', 'rb').read(1)",
    ),
    tries(
        "reads the disk",
        "import glob; open((glob.glob('/dev/vd*') + glob.glob('/dev/sd*') + glob.glob('/dev/nvme*'))[0], 'rb').read(1)",
    ),
    tries("reads kernel memory", "open('/dev/mem', 'rb').read(1)"),
    tries("follows a symbolic link out", "import os; os.symlink({file!r}, 'l'); open('l').read()"),
    tries("makes a hard link out", "import os; os.link({file!r}, 'l'); open('l').read()"),
    tries("opens by way of ..", "import os; open('{tmp}/' + '../' * 9 + {file!r}.lstrip('/')).read()"),
    tries("opens by way of /proc/1/root", "open('/proc/1/root' + {file!r}).read()"),
    tries(
        "opens by way of /proc/self/cwd", "import os; open('/proc/self/cwd/' + '../' * 9 + {file!r}.lstrip('/')).read()"
    ),
    tries("remounts / writable", CALL + "call('mount', b'none', b'/', None, 32, None)"),
    tries("mounts a file system", CALL + "call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None)"),
    tries("unmounts /tmp", CALL + "call('umount2', b'/tmp', 2)"),
    tries("changes its root", CALL + "call('chroot', b'/tmp')"),
    tries("pivots its root", CALL + "os.mkdir('/tmp/x'); call('pivot_root', b'/tmp', b'/tmp/x')"),
    tries("opens by a handle", CALL + "h = ctypes.create_string_buffer(128); call('open_by_handle_at', 3, h, 0)"),
    tries("changes the mode of a file of the caller", "import os; os.chmod({file!r}, 0o600)"),
    tries("changes the times of a file of the caller", "import os; os.utime({file!r})"),
    tries("sees whether a file of the caller exists", "import os; os.stat({file!r})"),
    tries(
        "watches the caller's folder",
        CALL + "fd = libc.inotify_init1(0); assert fd >= 0; call('inotify_add_watch', fd, {folder!r}.encode(), 0x100)",
    ),
    tries(
        "takes a lease on a file of the system, which others would wait for",
        "import fcntl, os; fcntl.fcntl(os.open('/usr/bin/env', 0), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    ),
    tries("sets a file's user to root", "import os; open('{tmp}/x', 'w').close(); os.chown('{tmp}/x', 0, 0)"),
]
PROCESSES = [
    tries("signals the caller", "import os; os.kill({pid}, 0)"),
    tries("signals its parent", "import os; assert os.getppid() > 1; os.kill(os.getppid(), 0)"),
    tries("kills its parent", "import os; assert os.getppid() > 1; os.kill(os.getppid(), 9)"),
    tries(
        "kills process 1 of its namespace",
        "import os, time; os.kill(1, 9); time.sleep(0.3); os.kill(1, 0); raise OSError('it lives')",
    ),
    tries(
        "signals all processes",
        "import os, signal; signal.signal(15, signal.SIG_IGN); os.kill(-1, 15)\nraise OSError('alone')",
    ),
    tries(
        "sees other processes",
        "import os; p = {{int(x) for x in os.listdir('/proc') if x.isdigit()}}; assert {pid} in p or len(p) > 3",
    ),
    tries("reads the caller's environment", "open('/proc/{pid}/environ', 'rb').read()"),
    tries("reads another process's memory", CALL + "open('/proc/1/mem', 'rb').read(1)"),
    tries("traces process 1", CALL + "call('ptrace', 16, 1, 0, 0)"),
    tries("traces a child", CALL + "call('ptrace', 0, 0, 0, 0)"),
    tries("reads by process_vm_readv", CALL + "raw(310, 1, 0, 0, 0, 0, 0)"),
    tries("sets the caller's priority", "import os; os.setpriority(0, {pid}, os.getpriority(0, {pid}))"),
    tries("reads or sets the caller's limits", "import resource; resource.prlimit({pid}, resource.RLIMIT_NOFILE)"),
    tries("binds the caller to cores", "import os; os.sched_setaffinity({pid}, os.sched_getaffinity({pid}))"),
    tries(
        "becomes root",
        CALL
        + "import struct; os.setuid(0); d = (ctypes.c_uint32 * 6)()\n"
        + "call('capget', struct.pack('Ii', 0x20080522, 0), d); assert any(d), 'root without rights'",
    ),
    tries(
        "regains a capability",
        CALL + "import struct; call('capset', struct.pack('Ii', 0x20080522, 0), struct.pack('6I', 1, 1, 0, 0, 0, 0))",
    ),
    tries(
        "raises its process limit",
        "from resource import *; n = getrlimit(RLIMIT_NPROC)[1] + 1; assert n > 0; setrlimit(RLIMIT_NPROC, (n, n))",
    ),
    tries("raises its memory limit", "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    tries("raises its own priority", "import os; os.setpriority(os.PRIO_PROCESS, 0, -5)"),
    tries("makes a user namespace", CALL + "call('unshare', 0x10000000)"),
    tries("makes a user namespace by clone", CALL + "raw(56, 0x10000000 | 17, 0, 0, 0, 0)"),
    tries(
        "makes a user namespace by clone3", CALL + "a = (ctypes.c_uint64 * 11)(0x10000000); a[4] = 17; raw(435, a, 88)"
    ),
    tries("enters a namespace", CALL + "call('setns', os.open('/proc/1/ns/mnt', 0), 0)"),
    tries("calls by the table of x32", CALL + "raw(0x40000000 | 39)"),
    tries("loads a program into the kernel", CALL + "raw(321, 0, 0, 0)"),
    tries("opens an io_uring", CALL + "raw(425, 1, ctypes.create_string_buffer(120))"),
    tries("handles its own page faults", CALL + "raw(323, 1)"),
    tries("reads the kernel's keys", CALL + "raw(250, 0, -3, 0)"),
    tries("opens performance counters", CALL + "raw(298, ctypes.create_string_buffer(120), 0, -1, -1, 0)"),
    tries("reads the kernel's log", CALL + "raw(103, 3, ctypes.create_string_buffer(64), 64)"),
    tries("sets the clock", "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())"),
    tries("sets the host's name", "import socket; socket.sethostname('breach')"),
    tries("reboots", CALL + "raw(169, 0xfee1dead, 672274793, 0, 0)"),
    tries(
        "finds its caller's open files",
        "import os\nfor i in range(3, 1024):\n  try: os.fstat(i)\n  except OSError: continue\n  else: break\nelse: raise OSError('none')",
    ),
    tries(
        "finds secrets in its environment",
        "import os; assert set(os.environ) - {{'PATH', 'HOME', 'TMPDIR', 'LANG', 'PWD', 'SHLVL', '_', 'LC_CTYPE', 'PYTHONPATH', 'PYTHONHASHSEED', 'PYTHONDONTWRITEBYTECODE', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'}}",
    ),
]
NETWORK = [
    tries(
        "connects to a port of the loopback",
        "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)",
    ),
    tries(
        "connects by MPTCP",
        "import socket; s = socket.socket(2, 1, 262); s.settimeout(2); s.connect(('127.0.0.1', {port}))",
    ),
    tries(
        "connects by TCP fast open",
        "import errno, socket; s = socket.socket(2, 1)\ntry: s.sendto(b'x', 0x20000000, ('127.0.0.1', {port}))\n"
        "except BlockingIOError: s.settimeout(2)\ns.getpeername()",
    ),
    tries("connects by IPv6", "import socket; socket.create_connection(('::1', {port}), timeout=2)"),
    tries("connects to the outside", "import socket; socket.create_connection(('192.0.2.1', 80), timeout=2)"),
    tries("sends a datagram out", "import socket; socket.socket(2, 2).sendto(b'x', ('192.0.2.1', 53))"),
    tries("looks up a name", "import socket; socket.getaddrinfo('example.com', 80)"),
    tries("connects to a socket in the caller's folder", "import socket; socket.socket(1, 1).connect({unix!r})"),
    tries("connects to an abstract socket", "import socket; socket.socket(1, 1).connect('\\0' + {abstract!r})"),
    tries("opens a raw socket", "import socket; socket.socket(2, 3, 1)"),
    tries("opens a packet socket", "import socket; socket.socket(17, 3, 3)"),
    tries("talks to the kernel by netlink", "import socket; socket.socket(16, 3, 0)"),
    tries("talks to the host of a virtual machine", "import socket; socket.socket(40, 1)"),
    tries("uses the kernel's ciphers", "import socket; socket.socket(38, 5)"),
]
BOMBS = [
    Attack("loops", "while True: pass", "timeout"),
    Attack("sleeps", "import time; time.sleep(1000)", "timeout"),
    Attack("stops itself", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    Attack(
        "ignores signals",
        "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\nwhile True: pass",
        "timeout",
    ),
    Attack("loops in a library", "9 ** 9 ** 9 ** 9", "timeout"),
    Attack("matches a hostile pattern", "import re; re.match('(a+)+$', 'a' * 40 + 'b')", "timeout"),
    Attack("waits for input", "import sys; sys.stdin.read(); import time; time.sleep(1000)", "timeout"),
    Attack("takes memory at once", "x = bytearray(10 ** 11)", "memory"),
    Attack("takes memory in steps", "x = []\nwhile True: x.append(bytearray(10 ** 7))", "memory"),
    Attack(
        "takes memory in many processes",
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n    x = bytearray(b'x' * (40 << 20)); time.sleep(1000)\ntime.sleep(1000)",
        "memory",
    ),
    Attack("recurses without end", "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()", "ended"),
    Attack("writes without end", "import os\nwhile True: os.write(1, b'x' * 65536)", "output"),
    Attack("writes errors without end", "import os\nwhile True: os.write(2, b'x' * 65536)", "output"),
    Attack("prints 10 GB", "print('x' * (10 << 30))", "memory"),
    Attack(
        "fills /tmp",
        "import os\nn = 0\ntry:\n  while True:\n    open(f'{tmp}/{{n}}', 'wb').write(b'x' * (1 << 20)); n += 1\nexcept OSError as e: print('kept', n)\nif n > 64: print('BREACH')",
    ),
    Attack(
        "fills /dev/shm",
        "n = 0\ntry:\n  while True:\n    open(f'/dev/shm/{{n}}', 'wb').write(b'x' * (1 << 20)); n += 1\nexcept OSError as e: print('kept', n)\nif n > 64: print('BREACH')",
    ),
    Attack(
        "fills the disk with files that it has removed",
        "import os\nn, x = 0, []\ntry:\n  while n < 100:\n    x.append(open(f'{tmp}/{{n}}', 'wb', 0)); os.unlink(f'{tmp}/{{n}}')\n    for _ in range(4): x[-1].write(b'x' * (1 << 20)); n += 1\nexcept OSError: print('kept', n)\nif n > 64: print('BREACH')",
    ),
    Attack(
        "makes many files",
        "n = 0\ntry:\n  while n < 100000:\n    open(f'{tmp}/{{n}}', 'w').close(); n += 1\nexcept OSError: print('kept', n)\nif n > 9999: print('BREACH')",
    ),
    Attack(
        "writes one large file",
        "f = open('{tmp}/x', 'wb')\ntry:\n  f.truncate(1 << 40)\nexcept OSError: print('kept')\nelse: print('BREACH')",
    ),
    Attack(
        "forks without end",
        "import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(1000)\n    n += 1\nexcept OSError: print('kept', n)\nif n > 16: print('BREACH')",
    ),
    Attack(
        "makes threads without end",
        "import threading, time\nn = 0\ntry:\n  while True:\n    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); n += 1\nexcept RuntimeError: print('kept', n)\nif n > 16: print('BREACH')\nimport os, sys; sys.stdout.flush(); os._exit(0)",
    ),
    Attack(
        "opens files without end",
        "x = []\ntry:\n  while True: x.append(open('/dev/null'))\nexcept OSError: pass\nprint('BREACH' if len(x) > 64 else 'kept')",
    ),
    Attack(
        "leaves a daemon",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    while True: time.sleep(1)\n  os._exit(0)\nprint('kept')",
    ),
    Attack("dumps core", "import ctypes; ctypes.string_at(0)", "ended"),
    Attack(
        "keeps the pipe open after its end",
        "import os, time\nif os.fork() == 0: time.sleep(1000)\nprint('kept', flush=True); os._exit(0)",
    ),
]
UNCOUNTED = [
    tries("takes shared memory without a file", "import mmap; mmap.mmap(-1, 1 << 20)"),
    tries(
        "takes shared memory by /dev/zero",
        "import mmap; f = open('/dev/zero', 'r+b', 0); mmap.mmap(f.fileno(), 1 << 20)",
    ),
    tries("takes memory by a file without a name", "import os; os.memfd_create('x')"),
    tries("takes memory that the kernel itself cannot read", CALL + "raw(447, 0)"),
    tries(
        "takes huge pages", "import mmap; mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)"
    ),
    tries(
        "takes shared memory of System V",
        CALL + "i = libc.shmget(0, 1 << 20, 0o1600); assert i >= 0; call('shmctl', i, 0, None)",
    ),
    tries(
        "takes semaphores of System V",
        CALL + "i = libc.semget(0, 1, 0o1600); assert i >= 0; call('semctl', i, 0, 0)",
    ),
    tries(
        "opens a message queue of System V",
        CALL + "i = libc.msgget(0, 0o1600); assert i >= 0; call('msgctl', i, 0, None)",
    ),
    tries("lists what others hold of System V", CALL + "call('shmctl', 0, 14, ctypes.create_string_buffer(256))"),
    tries("opens a POSIX message queue", CALL + "call('mq_open', b'/breach', 0o102, 0o600, None)"),
    tries(
        "holds pages by a pipe, beside its memory",
        CALL + "b = ctypes.create_string_buffer(4096); v = (ctypes.c_size_t * 2)(ctypes.addressof(b), 4096)\n"
        "call('vmsplice', os.pipe()[1], v, ctypes.c_size_t(1), 0)",
    ),
    tries(
        "holds pages of a file by a pipe, beside its memory",
        "import os; f = open('{tmp}/x', 'w+b', 0); f.write(b'x' * 4096); os.splice(f.fileno(), os.pipe()[1], 1, 0)",
    ),
    tries(
        "holds pages of a file by a pipe and sendfile",
        "import os; f = open('{tmp}/x', 'w+b', 0); f.write(b'x' * 4096); os.sendfile(os.pipe()[1], f.fileno(), 0, 1)",
    ),
    tries("enlarges a pipe", "import fcntl, os; fcntl.fcntl(os.pipe()[1], 1031, 1 << 17)"),
    tries("enlarges a socket's buffer", "import socket; socket.socketpair()[0].setsockopt(1, 7, 1 << 16)"),
    tries("opens a socket of IP, whose buffers grow", "import socket; socket.socket(2, 1)"),
    tries("opens a pair of sockets of another family", "import socket; socket.socketpair(30, 1)"),
    tries("sets up asynchronous reading", CALL + "raw(206, 1, ctypes.byref(ctypes.c_ulong(0)))"),
    tries(
        "keeps access lists of files, which no quota counts",
        "import os, struct; open('{tmp}/x', 'w').close()\n"
        "entries = [struct.pack('HHI', kind, 6, -1 & 0xFFFFFFFF) for kind in (1, 4, 32)]\n"
        "os.setxattr('{tmp}/x', 'system.posix_acl_access', struct.pack('I', 2) + b''.join(entries))",
    ),
    tries("makes a call that filters do not know", CALL + "open('{tmp}/x', 'w'); raw(452, -100, b'{tmp}/x', 0o600, 0)"),
    tries("opens a terminal", "import os; os.openpty()"),
    tries(
        "locks a file of the system, which others would wait for",
        "import fcntl, os; fcntl.flock(os.open('/usr/bin/env', 0), fcntl.LOCK_SH | fcntl.LOCK_NB)",
    ),
    tries(
        "is told of changes in a folder of the system",
        "import fcntl, os; fcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, 2)",
    ),
    tries(
        "sets limits of its parent",
        "import os, resource; p, w = os.getppid(), resource.RLIMIT_CORE; assert p\n"
        "resource.prlimit(p, w, resource.prlimit(p, w))",
    ),
    tries("runs before all others", "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"),
    Attack(
        "queues signals without end",
        CALL
        + "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\nn = 0\n"
        + "while n < 1000 and libc.sigqueue(os.getpid(), 40, None) == 0: n += 1\nprint('BREACH' if n > 64 else 'kept')",
    ),
]
LEFTOVERS = [
    Attack(
        "leaves folders that are closed",
        "import os\n"
        "for mode in (0o300, 0o100, 0):\n"
        "  os.mkdir(f'{tmp}/{{mode}}', 0o300); os.mkdir(f'{tmp}/{{mode}}/in', 0o300)\n"
        "  open(f'{tmp}/{{mode}}/in/file', 'w').close(); os.mkdir(f'{tmp}/{{mode}}/in/in', mode)\n"
        "  os.close(os.open(f'{tmp}/{{mode}}/file', os.O_CREAT, 0))\n"
        "os.mkdir('{tmp}/shut', 0); print('kept')",
    ),
    Attack(
        "leaves folders within each other",
        "import os\nos.chdir('{tmp}')\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')\nopen('file', 'w').close()\nprint('kept')",
    ),
    Attack(
        "leaves folders within each other with long names",
        "import os\nos.chdir('{tmp}')\nfor _ in range(60): os.mkdir('d' * 255); os.chdir('d' * 255)\nopen('d' * 255, 'w').close()\nprint('kept')",
    ),
    Attack(
        "leaves odd names",
        "import os\nplace = os.fsencode('{tmp}/')\n"
        "for name in (b'-rf', b'\\n', b'\\xff\\xfe', b' ', b'*', b'...', b'~', b'$(id)', b'\\x1b[2J', b'x' * 255):\n"
        "  os.mkdir(place + name); open(place + name + b'/' + name, 'w').close(); os.mkdir(place + name + b'/-d')\nprint('kept')",
    ),
    Attack(
        "leaves links, pipes and sockets",
        "import os, socket\nos.chdir('{tmp}')\nos.mkdir('d')\n"
        "for n, to in enumerate(({file!r}, {folder!r}, '/', '..', '.', 'd', 'none', '0')):\n"
        "  os.symlink(to, f'{{n}}'); os.symlink(to, f'd/{{n}}')\n"
        "os.mkfifo('d/pipe'); socket.socket(1).bind('d/socket'); open('d/file', 'w').close(); os.link('d/file', 'd/link')\nprint('kept')",
    ),
]
"""Programs that reach nothing: the next one, and the disk, show what they left."""
ATTACKS = [*FILES, *PROCESSES, *NETWORK, *BOMBS, *UNCOUNTED, *LEFTOVERS]
PLAIN = {
    *("reads a file of the caller", "lists the caller's folder", "writes into the caller's folder"),
    *("follows a symbolic link out", "opens by way of ..", "opens by way of /proc/self/cwd", "signals the caller"),
    *("sees other processes", "traces a child", "makes a user namespace", "makes a user namespace by clone"),
    *("connects to a port of the loopback", "connects to a socket in the caller's folder"),
    *("connects to an abstract socket", "talks to the kernel by netlink", "watches the caller's folder"),
    *("changes the mode of a file of the caller", "changes the times of a file of the caller"),
    *("sees whether a file of the caller exists", "sets the caller's priority"),
    *("reads or sets the caller's limits", "binds the caller to cores", "sets limits of its parent"),
    *("takes shared memory without a file", "takes shared memory by /dev/zero"),
    *("takes memory by a file without a name", "takes shared memory of System V", "takes semaphores of System V"),
    *("opens a message queue of System V", "lists what others hold of System V"),
    *("holds pages by a pipe, beside its memory", "enlarges a pipe", "enlarges a socket's buffer"),
    *("holds pages of a file by a pipe, beside its memory", "holds pages of a file by a pipe and sendfile"),
    *("opens a socket of IP, whose buffers grow", "opens a terminal"),
    *("locks a file of the system, which others would wait for", "is told of changes in a folder of the system"),
}
"""Attacks that succeed without a sandbox, whoever the caller is, and do no harm there."""
UNPROMISED: dict[str, dict[str, str]] = {
    "bubblewrap": {},
    "sandlock": {
        "sees whether a file of the caller exists": "Landlock keeps content and lists from programs, not stat",
        "makes threads without end": "it counts processes; addresses are what bounds threads",
        "fills the disk with files that it has removed": "the folder's size is looked at, and they are not in it",
    },
}
"""Attacks that a sandbox does not keep in, and why. docs/sandbox.md says so too."""
ENDS: dict[str, dict[str, str]] = {
    "bubblewrap": {},
    # No quota refuses files there: the watcher ends the program, or time does while it makes small ones. It also ends
    # one whose files it cannot count, if it looks in time. x32 is another architecture to its filter.
    "sandlock": {
        "fills /tmp": "memory",
        "makes many files": "ended",
        "calls by the table of x32": "ended",
        "leaves folders that are closed": "ended",
        "leaves folders within each other": "ended",
        "leaves folders within each other with long names": "ended",
    },
}
"""How attacks end where it is another way than the table says."""
