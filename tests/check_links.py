#!/usr/bin/env python3
"""Checks that every relative link in the project's Markdown leads to a file that exists, and every #anchor to a heading.

Links to other hosts are not followed: a check that needs the network fails for reasons that are not the text's.
"""

import pathlib
import re
import subprocess
import sys

FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def prose(path):
    """The text without code, where brackets and number signs mean something else."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """The anchors that a forge makes of the headings: lower case, punctuation dropped, spaces to hyphens."""
    found = set()
    for heading in HEADING.findall(prose(path)):
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        count = 0
        while (name := slug if count == 0 else f"{slug}-{count}") in found:
            count += 1
        found.add(name)
    return found


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=root, capture_output=True, text=True, check=False,
    )
    if listed.returncode == 0:
        pages = [root / name for name in listed.stdout.splitlines()]
    else:
        pages = [page for page in root.rglob("*.md") if "target" not in page.relative_to(root).parts]
    pages = [page for page in pages if page.is_file()]

    links, broken = 0, []
    for page in pages:
        for link in LINK.findall(CODE.sub("", prose(page))):
            if re.match(r"[a-z][a-z0-9+.-]*:", link):
                continue
            links += 1
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.is_relative_to(root) or not target.exists():
                broken.append(f"{page.relative_to(root)}: {link}: no such file in the repository")
            elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
                broken.append(f"{page.relative_to(root)}: {link}: no such heading")
    for line in broken:
        print(line, file=sys.stderr)
    print(f"{len(pages)} pages, {links} links, {len(broken)} broken")
    return 1 if broken or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
