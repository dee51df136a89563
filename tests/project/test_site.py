"""The site of the documentation: no link is dead, and its search finds the page that helps."""

import html
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote_plus, unquote

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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", f"{folder}-doctrees"]
    done = subprocess.run([*command, ROOT / "docs", folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_link_of_the_site_is_dead(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    dead = [(page.name, link) for page in pages for link in set(links_of(page)) if not leads_somewhere(page, link)]
    assert dead == []


@pytest.mark.parametrize("words", ["out of memory", "CUDA out of memory", "torch.OutOfMemoryError", "OOM"])
def test_the_search_finds_first_what_to_do_when_memory_runs_out(site, words, require_tool):
    address = f"{(site / 'search.html').as_uri()}?q={quote_plus(words)}"
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom")
    command = [require_tool("chromium"), *flags, address]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    results = re.findall(r'<li class="kind-\w+"><a href="([^"?#]+)', found)
    assert len(results) >= 5
    assert results[0] == "snapshots.html"


def test_the_api_pages_describe_every_parameter(site):
    """In an entry of a section, as code in a sentence, or as "x (B,S,E)"."""
    missing, seen = [], 0
    for page in (site / "api").glob("*.html"):
        for entry in page.read_text(encoding="utf-8").split('<dt class="sig sig-object py" id="')[1:]:
            signature, _, text = entry.partition("</dt>")
            parameters = re.findall(r'<em class="sig-param">.*?<span class="n"><span class="pre">(\w+)', signature)
            listed = ", ".join(re.findall(r"<strong>([\w, ]+)</strong>", text)).split(", ")
            missing += [
                (signature.partition('"')[0], name)
                for name in parameters
                if name not in listed and not re.search(rf'<span class="pre">{name}</span></code>|\b{name} \(', text)
            ]
            seen += len(parameters)
    assert missing == []
    assert seen > 300
