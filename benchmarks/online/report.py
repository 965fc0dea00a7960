"""`reports/NAME.md`: prose written by hand, and between markers what each part measured."""

from __future__ import annotations

import re
from pathlib import Path

TITLE = "# Online RL: real runs\n"


def put_block(page: Path, part: str, lines: list[str], title: str = TITLE) -> None:
    """Replace the block of a part, or add it at the end of the page; all else on the page stays."""
    start, end = f"<!-- {part}: measured -->", f"<!-- {part}: end -->"
    block = "\n".join([start, *lines, end])
    text = page.read_text(encoding="utf-8") if page.exists() else title
    found = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if not found.search(text):
        text = f"{text.rstrip()}\n\n## {part}\n\n{start}{end}\n"
    text = found.sub(lambda _: block, text)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
