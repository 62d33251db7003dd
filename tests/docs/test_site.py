"""The site: `mkdocs build --strict` has no warning, pages need no network, and links of README.md
lead somewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from bash_blocks import ROOT

pytestmark = pytest.mark.slow
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. It contains every page of docs/ and no other file of this
    machine."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
    ]
    result = subprocess.run(
        [*command, "--site-dir", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return folder


class Seen(HTMLParser):
    """Addresses that a browser loads with the page, and the anchors of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "id" in given:
            self.anchors.add(given["id"])
        if tag in _FETCHED and given.get("rel") != "canonical" and given.get(_FETCHED[tag]):
            self.loaded.append(given[_FETCHED[tag]])


def seen_in(page) -> Seen:
    found = Seen()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def test_every_page_is_built_and_none_loads_anything_from_the_network(site):
    pages = [
        page.relative_to(ROOT / "docs").with_suffix(".html")
        for page in (ROOT / "docs").rglob("*.md")
    ]
    assert [page for page in pages if not (site / page).exists()] == []
    loaded = {address for page in site.rglob("*.html") for address in seen_in(page).loaded}
    assert not [address for address in loaded if re.match(r"(https?:)?//", address)]


@pytest.mark.parametrize("name", sorted(page.name for page in ROOT.glob("*.md")))
def test_links_of_a_page_outside_of_the_site(site, name):
    for link in _LINK.findall((ROOT / name).read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if link.startswith(("http:", "https:")) or not path:
            continue
        assert (ROOT / path).exists(), f"{name} links to {path}, which does not exist"
        if anchor:
            page = site / path.removeprefix("docs/").replace(".md", ".html")
            assert anchor in seen_in(page).anchors, (
                f"{name} links to {link}, which has no such heading"
            )
