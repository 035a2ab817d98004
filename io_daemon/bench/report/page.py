"""A report as one HTML file that needs nothing else: styles and pictures are inside it, and it loads nothing."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from io_daemon.bench.report.machine_sheet import directory_line, machine_sheets
from io_daemon.bench.report.plot import report_figures, svg_text
from io_daemon.bench.report.sheet import report_sheets, report_warnings
from io_daemon.bench.result import Report
from io_daemon.errors import ConfigError
from io_daemon.machine.facts import MachineFacts

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

TEMPLATES: Final = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Picture:
    caption: str
    svg: Markup


def write_page(report: Report, path: Path) -> None:
    """Replaces ``path`` once all of it is written. Raises ConfigError without the ``plot`` extra, OSError."""
    text = render_page(report)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names need not be UTF-8
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def render_page(report: Report) -> str:
    """The HTML. Everything but the pictures, which are ours, is escaped."""
    template = _template()
    from markupsafe import Markup

    facts = MachineFacts.of_report(report.machine)
    pictures = [
        Picture(caption, Markup(svg_text(figure, f"picture{number}")))  # drawn from figures alone
        for number, (caption, figure) in enumerate(report_figures(report))
    ]
    return template.render(
        report=report,
        warnings=report_warnings(report),
        pictures=pictures,
        sheets=report_sheets(report),
        command=shlex.join(report.command),
        settings=[(name, _word(value)) for name, value in report.settings.items()],
        directory_lines=[] if facts is None else [directory_line(directory) for directory in facts.directories],
        machine_sheets=[] if facts is None else machine_sheets(facts),
    )


def _template() -> Template:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ConfigError(
            "html", str(error), "a page needs matplotlib and Jinja2: pip install 'infinity[plot]'"
        ) from error
    loader = FileSystemLoader(TEMPLATES)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("report.html")


def _word(value: Any) -> str:
    """Strings lose their quotes; lists and the like are JSON."""
    return value if isinstance(value, str) else json.dumps(value)
