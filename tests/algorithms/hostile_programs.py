"""Programs as a model might write them to break out, to use up the machine, or to pass without an answer. Data for
test_grading_code.py: they are run in the sandbox alone."""

from __future__ import annotations

GOOD = "def f(x):\n    return x + 1\n"
TEST = "assert f(1) == 2\nassert f(2) == 3\n"

# the system refuses each with an OSError, ValueError or MemoryError, and the program goes on
REFUSED: dict[str, str] = {
    "memory_gibibyte": "bytearray(1 << 30)\n",
    "network": "import socket\ns = socket.create_connection(('127.0.0.1', 80), 1)\n",
    "udp": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))\n",
    "unix_socket": "import socket\nsocket.socketpair()\n",
    "passwd": "open('/etc/passwd').read()\n",
    "home": "import os\nos.listdir(os.path.expanduser('~'))\n",
    "group": "open('/etc/group').read()\n",
    "list_root": "import os\nos.listdir('/')\n",
    "proc": "import os\nos.listdir('/proc')\n",
    "proc_mem": "open('/proc/self/mem', 'rb')\n",
    "proc_fd": "import os\nos.listdir('/proc/self/fd')\n",
    "write_file": "open('x', 'w').write('x')\n",
    "write_tmp": "open('/tmp/fedsilo_hostile', 'w').write('x')\n",
    "mkdir": "import os\nos.mkdir('x')\n",
    "remove": "import os\nos.remove('/etc/hostname')\n",
    "kill_parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "kill_all": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
    "kill_group": "import os, signal\nos.killpg(0, signal.SIGKILL)\n",
    "kill_self": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "exec": "import os\nos.execv('/bin/sh', ['/bin/sh', '-c', 'true'])\n",
    "subprocess": "import subprocess\nsubprocess.run(['true'], check=True)\n",
    "memfd": "import os\nos.memfd_create('x')\n",
    "multiprocessing": "import multiprocessing\nmultiprocessing.Pool(4)\n",
    "shared_memory": (
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=1 << 20)\n"
    ),
    "setrlimit": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n",
    "tempfile": "import tempfile\ntempfile.NamedTemporaryFile()\n",
    "environment": "import os\nassert not os.environ\nraise OSError('empty')\n",
    "own_source": "import os\nopen(os.path.join(os.getcwd(), 'pyproject.toml')).read()\n",
}

# these end, or are ended
HARMFUL: dict[str, str] = {
    "fork_bomb": "import os\nwhile True:\n    os.fork()\n",
    "fork_in_call": "import os\ndef f(x):\n    while True:\n        os.fork()\n",
    "memory_bomb": "x = []\nwhile True:\n    x.append(bytearray(1 << 24))\n",
    "memory_one": "x = bytearray(64 << 30)\n",
    "big_power": "x = 9 ** 9 ** 9 ** 9\n",
    "endless_loop": "while True:\n    pass\n",
    "endless_in_call": "def f(x):\n    while True:\n        pass\n",
    "sleep": "import time\ntime.sleep(3600)\n",
    "system": "import os\nassert os.system('true') == 0\n",
    "thread": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\n",
    "thread_bomb": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()\n"
    ),
    "unshare": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\n",
    "ptrace": "import ctypes\nassert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0\n",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/', b'tmpfs', 0, None) == 0\n",
    "segfault": "import ctypes\nctypes.string_at(0)\n",
    "recursion": "import sys\nsys.setrecursionlimit(1 << 30)\ndef g(n):\n    return g(n + 1)\ng(0)\n",
    "print_forever": "while True:\n    print('x' * 1_000_000)\n",
    "syntax": "def f(x)\n    return x\n",
    "null": "\u0000",
}

# these want to pass the test without the right answer
FORGED: dict[str, str] = {
    "exit_before": "import os\nos._exit(0)\n",
    "sys_exit": "import sys\nsys.exit(0)\n",
    "raise_exit": "raise SystemExit(0)\n",
    "exit_in_call": "import os\ndef f(x):\n    os._exit(0)\n",
    "sys_exit_in_call": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "quit": "quit()\n",
    "print_marker": "print('passed')\nprint('1')\nprint('correct')\n",
    "write_all": (
        "import os\nfor d in range(64):\n    try:\n        os.write(d, b'1')\n    except OSError:\n        pass\n"
    ),
    "write_frames": (
        "import os\n"
        "for d in range(3, 64):\n"
        "    try:\n"
        "        os.write(d, b'\\x0c\\0\\0\\0[\"ok\", 2, 0]' * 9)\n"
        "    except OSError:\n"
        "        pass\n"
    ),
    "close_all": "import os\nos.closerange(0, 64)\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError\n",
    "always_equal": (
        "class Y:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\ndef f(x):\n    return Y()\n"
    ),
    "always_equal_int": (
        "class Y(int):\n"
        "    def __eq__(self, other):\n"
        "        return True\n"
        "    __hash__ = None\n"
        "def f(x):\n"
        "    return Y(7)\n"
    ),
    "proxy": (
        "class M(type):\n"
        "    def __getattr__(c, n):\n"
        "        return True\n"
        "class f(metaclass=M):\n"
        "    def __init__(self, x): pass\n"
        "    def __eq__(self, o): return True\n"
    ),
    "builtins": (
        "import builtins\n"
        "builtins.AssertionError = BaseException\n"
        "builtins.exec = lambda *a: None\n"
        "builtins.compile = lambda *a: None\n"
    ),
    "assertion": (
        "import builtins\n"
        "class Quiet(Exception):\n"
        "    def __new__(cls, *a):\n"
        "        import os\n"
        "        os._exit(0)\n"
        "builtins.AssertionError = Quiet\n"
        "def f(x):\n"
        "    return 0\n"
    ),
    "stack": (
        "import sys\n"
        "frame = sys._getframe()\n"
        "while frame:\n"
        "    frame.f_globals['Examiner'] = None\n"
        "    frame = frame.f_back\n"
        "def f(x):\n"
        "    return 0\n"
    ),
    "trace": "import sys, os\nsys.settrace(lambda *a: os._exit(0))\ndef f(x):\n    return 0\n",
    "profile": "import sys, os\ndef f(x):\n    return 0\nsys.setprofile(lambda *a: os._exit(0))\n",
    "excepthook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\nraise ValueError\n",
    "unraisable": "import sys, os\nclass D:\n    def __del__(self):\n        os._exit(0)\nD()\n",
    "signal": (
        "import signal, os\n"
        "signal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "def f(x):\n"
        "    while True: pass\n"
    ),
    "gc": (
        "import gc, sys\n"
        "for o in gc.get_objects():\n"
        "    if type(o).__name__ == 'Wire':\n"
        "        o.receive = lambda: ['ok', True, None]\n"
        "        o.send = lambda m: None\n"
        "def f(x):\n"
        "    return 0\n"
    ),
    "wire_success": (
        "import sys\n"
        "frame = sys._getframe()\n"
        "while frame:\n"
        "    for v in list(frame.f_locals.values()):\n"
        "        if type(v).__name__ == 'Wire':\n"
        "            for _ in range(9):\n"
        "                v.send(['ok', True, [[], {}]])\n"
        "    frame = frame.f_back\n"
    ),
    "callback": (
        "import sys\n"
        "frame = sys._getframe()\n"
        "wire = None\n"
        "while frame:\n"
        "    for v in list(frame.f_locals.values()):\n"
        "        if type(v).__name__ == 'Wire':\n"
        "            wire = v\n"
        "    frame = frame.f_back\n"
        "def f(x):\n"
        "    wire.send(['back', 0, []])\n"
        "    wire.send(['module', 'os'])\n"
        "    return ['module', 'os']\n"
    ),
    "lent": "def f(x):\n    return 0\ndef abs(x):\n    return 0\ndef sorted(*a):\n    return 0\n",
    "main_module": "import __main__\n__main__.main = lambda *a: None\ndef f(x):\n    return 0\n",
    "deep": "def f(x):\n    y = []\n    for _ in range(100000):\n        y = [y]\n    return y\n",
    "huge": "def f(x):\n    return 'x' * (300 << 20)\n",
    "endless_iterator": "import itertools\ndef f(x):\n    return itertools.count()\n",
    "wrong": "def f(x):\n    return x\n",
}
