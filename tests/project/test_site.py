"""The site of the documentation: no link is dead."""

import html
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def links_of(page):
    """The links to other pages and files of the site, and to headings."""
    found = map(html.unescape, re.findall(r'(?:href|src)="([^"]+)"', page.read_text(encoding="utf-8")))
    return [link for link in found if not re.match(r"[a-z]+:|//", link)]


def leads_somewhere(page, link):
    path, _, heading = link.partition("#")
    target = page.parent / unquote(path.partition("?")[0]) if path else page
    if not target.is_file():
        return False
    return not heading or f'id="{unquote(heading)}"' in target.read_text(encoding="utf-8")


def test_no_link_of_the_site_is_dead(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", tmp_path / "doctrees"]
    done = subprocess.run([*command, ROOT / "docs", tmp_path / "site"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    dead = [(page.name, link) for page in pages for link in set(links_of(page)) if not leads_somewhere(page, link)]
    assert dead == []
