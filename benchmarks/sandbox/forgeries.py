"""Programs that try to forge the verdict, for R10.

Each is a program for the task of writing `secret`, whose expected value it cannot know: whatever it does, it must score
0. What they search for is the form of the value, which is told to them.
"""

from __future__ import annotations

SECRET = "hidden-7f3a91c2e5"
"""What the hidden test expects. Programs know its form, not its digits."""
PATTERN = "hidden-[0-9a-f]{10}"

FORGERIES: dict[str, str] = {
    "exits with 0": "import sys\nsys.exit(0)",
    "exits inside the call": "import os\ndef secret(x):\n    os._exit(0)",
    "prints that it passed": "def secret(x):\n    print('PASSED 1/1', 'OK', '1.0')\n    return 'PASSED'",
    "writes to every descriptor": """
import os
def secret(x):
    for number in range(3, 256):
        for text in (b'ready\\n', b'compiled', b'{"passed": true}', b'"ok"'):
            try:
                os.write(number, text)
            except OSError:
                pass
""",
    "patches json": """
import json
json.dumps = lambda *args, **kwargs: 'true'
json.loads = lambda *args, **kwargs: True
json.JSONEncoder.encode = json.JSONEncoder.iterencode = lambda self, o: '"*"'
def secret(x):
    return True
""",
    "is equal to everything": """
class Everything:
    def __eq__(self, other):
        return True
    def __hash__(self):
        return 0
def secret(x):
    return Everything()
""",
    "is a text equal to everything": """
class Text(str):
    def __eq__(self, other):
        return True
    def __hash__(self):
        return 0
def secret(x):
    return Text('any')
""",
    "patches built-ins": """
import builtins, operator, unittest
builtins.all = builtins.any = builtins.isinstance = lambda *args: True
operator.eq = lambda a, b: True
unittest.TestCase.assertEqual = lambda *args: None
builtins.AssertionError = type('Never', (BaseException,), {})
def secret(x):
    return 1
""",
    "looks through its callers": f"""
import re, sys
def secret(x):
    frame, found = sys._getframe(1), []
    while frame:
        found += re.findall('{PATTERN}', repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    return found[0] if found else 'none'
""",
    "looks through all objects": f"""
import gc, re
def secret(x):
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple)):
            found = re.findall('{PATTERN}', repr(thing))
            if found:
                return found[0]
    return 'none'
""",
    "reads every descriptor": f"""
import os, re
def secret(x):
    for number in range(64):
        try:
            os.set_blocking(number, False)
            data = os.pread(number, 1 << 20, 0)
        except OSError:
            try:
                data = os.read(number, 1 << 20)
            except OSError:
                continue
        found = re.findall(b'{PATTERN}', data)
        if found:
            return found[0].decode()
    return 'none'
""",
    "reads every file": f"""
import os, re
def secret(x):
    for folder, folders, files in os.walk('/'):
        folders[:] = [name for name in folders if name not in ('lib', 'lib64', 'share')]
        for name in files:
            try:
                with open(os.path.join(folder, name), 'rb') as file:
                    found = re.findall(b'{PATTERN}', file.read(1 << 20))
            except OSError:
                continue
            if found:
                return found[0].decode()
    return 'none'
""",
    "reads memory by /proc": f"""
import re
def secret(x):
    for who in ('self', '1', '2'):
        for name in ('mem', 'environ', 'cmdline', 'maps', 'fd/0'):
            try:
                with open('/proc/' + who + '/' + name, 'rb') as file:
                    found = re.findall(b'{PATTERN}', file.read(1 << 24))
            except OSError:
                continue
            if found:
                return found[0].decode()
    return 'none'
""",
    "traces its caller": """
import sys
def trace(frame, event, argument):
    for name in list(frame.f_locals):
        frame.f_locals[name] = 'ok'
    return trace
def secret(x):
    frame = sys._getframe(1)
    frame.f_trace = trace
    sys.settrace(trace)
    sys.setprofile(trace)
    return 'ok'
""",
    "becomes another program": """
import os, sys
def secret(x):
    text = 'import os; [os.write(n, b"true") for n in range(3, 64)]'
    os.execv(sys.executable, [sys.executable, '-S', '-c', text])
""",
    "speaks twice": """
import atexit, os
def late():
    for number in range(3, 64):
        try:
            os.write(number, b'"ok"')
        except OSError:
            pass
atexit.register(late)
def secret(x):
    return 'any'
""",
    "answers with deep nesting": """
import os
def secret(x):
    for number in range(3, 64):
        try:
            os.write(number, b'[' * 60000)
        except OSError:
            pass
    os._exit(0)
""",
    "answers with endless digits": """
import sys
sys.set_int_max_str_digits(0)
def secret(x):
    return int('9' * 20000)
""",
    "answers everything": "def secret(x):\n    return ['hidden-' + format(i, '010x') for i in range(3000)]",
}
"""What it tries -> the program."""
