"""A report for the terminal: tables, then warnings, then one sentence of advice."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from io_daemon.bench.report.machine_sheet import directory_line
from io_daemon.bench.report.sheet import Sheet, report_sheets, report_warnings
from io_daemon.bench.result import Report
from io_daemon.machine.facts import MachineFacts

COLOURS = {"good": "green", "bad": "bold red"}


def print_report(report: Report, console: Console) -> None:
    """What came from outside is taken neither for markup nor for the terminal's control sequences."""
    for line in _machine_lines(report):
        console.print(_plain(line, style="dim"))
    for sheet in report_sheets(report):
        console.print()
        console.print(_plain(sheet.title, style="bold"))
        console.print(Padding(_table(sheet), (0, 2)))
        if sheet.note:
            console.print(Padding(_plain(sheet.note, style="dim"), (0, 2)))
    warnings = report_warnings(report)
    if warnings:
        console.print()
        console.print(_plain("warnings", style="bold yellow"))
        for warning in warnings:
            console.print(Padding(_plain(f"! {warning}", style="yellow"), (0, 2)))
    console.print()
    console.print(_plain(report.advice, style="bold"))


def _machine_lines(report: Report) -> list[str]:
    """The rest of the facts is in the JSON and on the page."""
    facts = MachineFacts.of_report(report.machine)
    return [] if facts is None else [directory_line(directory) for directory in facts.directories]


def _table(sheet: Sheet) -> Table:
    table = Table(box=None, show_header=bool(sheet.headings), header_style="underline", padding=(0, 2, 0, 0))
    if sheet.headings:
        table.add_column(sheet.headings[0], overflow="fold")
        for heading in sheet.headings[1:]:
            table.add_column(heading, justify="right", overflow="fold")
    else:
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
    for index, row in enumerate(sheet.rows):
        table.add_row(*(_plain(cell) for cell in row), style=COLOURS.get(sheet.marks.get(index, ""), ""))
    return table


def _plain(text: str, style: str = "") -> Text:
    """Control characters, and bytes of file names that are no UTF-8, are shown as escapes."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return Text(shown, style=style)
