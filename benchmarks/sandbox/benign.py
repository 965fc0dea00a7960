"""Programs of the kinds that models are asked for, which must run in the sandbox as they do outside, for R10."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Benign:
    """A program, its standard input, and what it prints."""

    program: str
    stdin: str
    stdout: str


BENIGN: dict[str, Benign] = {
    "adds": Benign("a, b = map(int, input().split())\nprint(a + b)", "3 4\n", "7\n"),
    "reads to the end": Benign(
        "import sys\nprint(sum(int(line) for line in sys.stdin))", "".join(f"{i}\n" for i in range(100)), "4950\n"
    ),
    "reads until EOFError": Benign(
        "n = 0\nwhile True:\n    try:\n        input()\n    except EOFError:\n        break\n    n += 1\nprint(n)",
        "a\nb\n",
        "2\n",
    ),
    "has a main guard": Benign(
        "def main():\n    print(input()[::-1])\n\nif __name__ == '__main__':\n    main()", "abc\n", "cba\n"
    ),
    "leaves by exit": Benign("print('done')\nexit()", "", "done\n"),
    "leaves by sys.exit": Benign("import sys\nprint('done')\nsys.exit(3)", "", "done\n"),
    "prints, then raises": Benign("print('done')\nraise ValueError('late')", "", "done\n"),
    "ignores its input": Benign("print('no')", "x" * 300_000, "no\n"),
    "prints much": Benign("for i in range(10000):\n    print(i)", "", "".join(f"{i}\n" for i in range(10_000))),
    "reads much": Benign("print(len(input()))", "y" * 300_000 + "\n", "300000\n"),
    "writes Unicode": Benign("print(input().upper(), '\\u20ac')", "straße žluť\n", "STRASSE ŽLUŤ €\n"),
    "recurses deeply in a thread": Benign(
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def depth(n):\n    return 0 if n == 0 else 1 + depth(n - 1)\n"
        "thread = threading.Thread(target=lambda: print(depth(20000)))\nthread.start()\nthread.join()",
        "",
        "20000\n",
    ),
    "shares work among threads": Benign(
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
        "    print(sum(pool.map(lambda x: x * x, range(10))))",
        "",
        "285\n",
    ),
    "runs an event loop": Benign(
        "import asyncio\nasync def work(x):\n    await asyncio.sleep(0)\n    return x + 1\n"
        "async def main():\n    print(await asyncio.gather(work(1), work(2)))\nasyncio.run(main())",
        "",
        "[2, 3]\n",
    ),
    "uses a temporary file": Benign(
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    path = os.path.join(folder, 'x')\n"
        "    with open(path, 'w') as file:\n        file.write('text')\n"
        "    print(open(path).read(), os.listdir(folder))",
        "",
        "text ['x']\n",
    ),
    "copies files": Benign(
        "import pathlib, shutil\nfirst = pathlib.Path('/tmp/a.txt')\nfirst.write_text('one')\n"
        "shutil.copy2(first, '/tmp/b.txt')\nshutil.move('/tmp/b.txt', '/tmp/c.txt')\n"
        "print(pathlib.Path('/tmp/c.txt').read_text(), sorted(p.name for p in pathlib.Path('/tmp').iterdir()))",
        "",
        "one ['a.txt', 'c.txt']\n",
    ),
    "pickles its own class": Benign(
        "import pickle\nclass Point:\n    def __init__(self, x):\n        self.x = x\n"
        "print(pickle.loads(pickle.dumps(Point(5))).x)",
        "",
        "5\n",
    ),
    "uses data classes": Benign(
        "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass Item:\n    cost: int\n"
        "    tags: list = field(default_factory=list)\nprint(min(Item(3), Item(2, ['a'])))",
        "",
        "Item(cost=2, tags=['a'])\n",
    ),
    "uses regular expressions": Benign(
        "import re\nprint(re.sub(r'(\\d+)-(\\d+)', r'\\2-\\1', input()))", "10-20 a 3-4\n", "20-10 a 4-3\n"
    ),
    "counts and sorts": Benign(
        "from collections import Counter\nprint(sorted(Counter(input()).items(), key=lambda kv: (-kv[1], kv[0])))",
        "abca\n",
        "[('a', 2), ('b', 1), ('c', 1)]\n",
    ),
    "uses a heap": Benign(
        "import heapq\nheap = []\nfor x in input().split():\n    heapq.heappush(heap, int(x))\n"
        "print(*[heapq.heappop(heap) for _ in range(len(heap))])",
        "5 1 4\n",
        "1 4 5\n",
    ),
    "memoises": Benign(
        "from functools import lru_cache\n@lru_cache(None)\ndef fib(n):\n"
        "    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "print(fib(90))",
        "",
        "2880067194370816120\n",
    ),
    "counts exactly": Benign(
        "from fractions import Fraction\nfrom decimal import Decimal\n"
        "print(Fraction(1, 3) + Fraction(1, 6), Decimal('0.1') + Decimal('0.2'), 2**100)",
        "",
        "1/2 0.3 1267650600228229401496703205376\n",
    ),
    "reads and writes JSON": Benign(
        "import json\nprint(json.dumps(json.loads(input()), sort_keys=True))",
        '{"b": [1, null], "a": true}\n',
        '{"a": true, "b": [1, null]}\n',
    ),
    "reads CSV": Benign(
        "import csv, sys\nprint(sum(int(row['n']) for row in csv.DictReader(sys.stdin)))", "n,m\n1,x\n2,y\n", "3\n"
    ),
    "reckons with dates": Benign(
        "from datetime import date, timedelta\nprint(date(2024, 2, 28) + timedelta(days=2))", "", "2024-03-01\n"
    ),
    "hashes and packs": Benign(
        "import base64, hashlib, struct, zlib\nprint(hashlib.sha256(b'abc').hexdigest()[:8], "
        "base64.b64encode(b'abc').decode(), struct.pack('>H', 258), zlib.crc32(b'abc'))",
        "",
        "ba7816bf YWJj b'\\x01\\x02' 891568578\n",
    ),
    "draws with a seed": Benign(
        "import random\nrandom.seed(1)\nfirst = [random.random() for _ in range(3)]\nrandom.seed(1)\n"
        "print(first == [random.random() for _ in range(3)])",
        "",
        "True\n",
    ),
    "sleeps and measures": Benign(
        "import time\nbegan = time.perf_counter()\ntime.sleep(0.05)\nprint(time.perf_counter() - began >= 0.05)",
        "",
        "True\n",
    ),
    "asks a database": Benign(
        "import sqlite3\nbase = sqlite3.connect(':memory:')\nbase.execute('create table t (x)')\n"
        "base.executemany('insert into t values (?)', [(1,), (5,)])\n"
        "print(base.execute('select sum(x) from t').fetchone()[0])",
        "",
        "6\n",
    ),
    "logs to stderr": Benign(
        "import logging, sys\nlogging.basicConfig(stream=sys.stderr, level=20)\nlogging.info('busy')\nprint('ok')",
        "",
        "ok\n",
    ),
}
"""What it does -> the program."""
