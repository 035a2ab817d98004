"""A report as one HTML file: well-formed, whole, nothing fetched, nothing from outside taken for markup."""

from __future__ import annotations

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from io_daemon.bench.report.page import render_page, write_page
from io_daemon.bench.result import Report
from io_daemon.errors import ConfigError
from tests.support.bench_reports import RESULTS, WARNING, machine_facts, report

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

VOID = {"meta", "br", "img", "link", "hr", "input"}
HOSTILE = '/nvme0/<script>alert("1")</script>&amp;"\'><img src=x onerror=y> $x^2$ {{ 7*7 }}'


class Page(HTMLParser):
    """Every element closed in order; collects text, attributes and ids."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.styles: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.styles if "style" in self.open else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@cache
def rendered(kind: str) -> tuple[Report, Page]:
    made = report(kind, warnings=[WARNING])
    return made, Page(render_page(made))


@pytest.mark.parametrize("kind", RESULTS)
def test_holds_everything(kind: str) -> None:
    made, page = rendered(kind)
    for word in (made.advice, WARNING, made.started, made.version, "ACME Turbo 3840", "noatime", "memlock", "seed"):
        assert word in page.text, word
    assert " ".join(made.command) in page.text
    assert page.elements.count("svg") == page.elements.count("figure") >= 1
    assert page.elements.count("table") >= 3


@pytest.mark.parametrize("kind", RESULTS)
def test_fetches_nothing(kind: str) -> None:
    _, page = rendered(kind)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page.elements)
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        if name.startswith("xmlns"):
            continue  # a name, not an address
        assert "//" not in value, (tag, name, value)
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#"), (tag, name, value)
    styles = " ".join([*page.styles, *(value for _, name, value in page.attributes if name == "style")])
    assert "@import" not in styles
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", styles))


@pytest.mark.parametrize("kind", RESULTS)
def test_ids_are_unique_and_what_is_referred_to_is_there(kind: str) -> None:
    _, page = rendered(kind)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    values = [value for _, name, value in page.attributes if name != "id"]
    used = [value[1:] for value in values if value.startswith("#") and "picture" in value]
    used += [name for value in values for name in re.findall(r"url\(#([^)]*)\)", value)]
    assert used
    assert set(used) <= set(ids)


@pytest.mark.parametrize("kind", RESULTS)
def test_what_comes_from_outside_is_text(kind: str) -> None:
    facts = machine_facts(HOSTILE, processor=HOSTILE, notes=[HOSTILE])
    made = report(kind, directory=HOSTILE, machine=facts, warnings=[HOSTILE]).model_copy(update={"advice": HOSTILE})
    page = Page(render_page(made))
    assert " ".join(HOSTILE.split()) in page.text
    assert "script" not in page.elements
    assert "img" not in page.elements


def test_pictures_take_the_pages_colours() -> None:
    html = render_page(report("io"))
    assert "currentColor" in html
    assert "prefers-color-scheme: dark" in html


def test_machine_facts_of_another_version_are_left_out() -> None:
    made = report("io").model_copy(update={"machine": {"unknown": 1}})
    assert made.advice in Page(render_page(made)).text


def test_replaces_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    write_page(report("step"), path)
    assert path.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [path]


def test_leaves_nothing_where_it_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.mkdir()
    with pytest.raises(OSError):
        write_page(report("step"), path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("module", ["jinja2", "matplotlib.figure"])
def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"infinity\[plot\]"):
        write_page(report("io"), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_utf8_are_written(tmp_path: Path) -> None:
    write_page(report("step", warnings=["/nvme0/\udcff"]), tmp_path / "report.html")
    assert r"/nvme0/\udcff" in (tmp_path / "report.html").read_text()
