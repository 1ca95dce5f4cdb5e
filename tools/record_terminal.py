"""Run a command in a terminal of its own and save what it showed as an animated SVG.

    .docs-venv/bin/python tools/record_terminal.py docs/assets/demo.svg -- tinsmith demo

The picture is self-contained: no script, no font, no server. It plays the recording in a loop, with pauses shortened,
and a viewer that does not animate SVG shows the last screen. `--type TEXT` types a line when the command is silent
for a moment, as a person would at a prompt. Needs pyte (docs/requirements.txt), which turns the terminal's control
sequences into a screen.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import pty
import select
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import pyte

COLUMNS, ROWS = 100, 36
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.4, 18, 14
FRAME_S = 0.12
"""Screens closer together than this are one frame: a progress bar redraws ten times a second."""
MAX_LINE_S = 6.0
"""The time between two new lines is scaled down to this, so that minutes of training play in seconds."""
HOLD_S = 8.0
"""How long the last screen stays before the recording starts again."""
SILENCE_S = 2.0
"""A command that has printed nothing for this long waits for the next `--type`."""

NO_BREAK = "\N{NO-BREAK SPACE}"
"""SVG makes one space of several."""
FOREGROUND, BACKGROUND = "#d0d7de", "#0d1117"
COLORS = {
    "black": "#484f58",
    "red": "#ff7b72",
    "green": "#3fb950",
    "brown": "#d29922",
    "blue": "#58a6ff",
    "magenta": "#bc8cff",
    "cyan": "#39c5cf",
    "white": "#d0d7de",
}


class Frame(NamedTuple):
    """What the screen showed from `start_s` on: one string of SVG per row."""

    start_s: float
    rows: tuple[str, ...]


def record(command: list[str], lines: deque[str]) -> Iterator[tuple[float, bytes]]:
    """Run the command and yield its output, each piece with the second it came at."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    started = last = time.monotonic()
    tail = b""
    while True:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # Linux reports the end of a terminal so
                piece = b""
            if not piece:
                break
            last = time.monotonic()
            tail = (tail + piece)[-2000:]
            yield last - started, piece
        elif lines and time.monotonic() - last > SILENCE_S:
            for character in lines.popleft() + "\r":
                os.write(terminal, character.encode())
                time.sleep(0.05)
            last = time.monotonic()
    _, status = os.waitpid(child, 0)
    if status:
        sys.stderr.buffer.write(tail)
        sys.exit(f"{command[0]} ended with status {os.waitstatus_to_exitcode(status)}; nothing was written")


def frames_of(pieces: Iterable[tuple[float, bytes]], shown: str) -> list[Frame]:
    """The screens after each piece of output, on a time line that is short between two new lines."""
    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000)
    stream = pyte.ByteStream(screen)
    stream.feed(f"\x1b[32m$\x1b[0m {shown}\r\n".encode())
    stretches = [[Frame(0.0, _rows(screen))]]
    lines = 1
    for at, piece in pieces:
        stream.feed(piece)
        rows = _rows(screen)
        so_far = len(screen.history.top) + max(number for number, row in enumerate(rows, 1) if row)
        if so_far > lines:
            lines = so_far
            stretches.append([])
        stretches[-1].append(Frame(at, rows))
    frames: list[Frame] = []
    now = 0.0
    for stretch, following in itertools.pairwise([*stretches, stretches[-1][-1:]]):
        length_s = following[0].start_s - stretch[0].start_s
        scale = min(1.0, MAX_LINE_S / length_s) if length_s else 1.0
        for frame in stretch:
            start_s = now + (frame.start_s - stretch[0].start_s) * scale
            if not frames or start_s - frames[-1].start_s >= FRAME_S:
                frames.append(Frame(start_s, frame.rows))
            else:
                frames[-1] = Frame(frames[-1].start_s, frame.rows)
        now += length_s * scale
    return frames


def _rows(screen: pyte.Screen) -> tuple[str, ...]:
    return tuple(_row(screen, number) for number in range(ROWS))


def _row(screen: pyte.Screen, number: int) -> str:
    """One line of the screen as SVG: a <tspan> for each run of characters that look the same."""
    cells = [screen.buffer[number][column] for column in range(COLUMNS)]
    spans, start = [], 0
    for column in range(1, COLUMNS + 1):
        if column < COLUMNS and _style(cells[column]) == _style(cells[start]):
            continue
        text = "".join(cell.data for cell in cells[start:column])
        stripped = text.strip()
        if stripped:
            begin = start + len(text) - len(text.lstrip())
            x, width = MARGIN + begin * CELL_WIDTH, len(stripped) * CELL_WIDTH
            place = f'x="{x:.1f}" textLength="{width:.1f}"'
            solid = escape(stripped, quote=False).replace(" ", NO_BREAK)
            spans.append(f"<tspan {place}{_style(cells[start])}>{solid}</tspan>")
        start = column
    return "".join(spans)


def _style(cell: pyte.screens.Char) -> str:
    color = COLORS.get(cell.fg.removeprefix("bright"), f"#{cell.fg}" if len(cell.fg) == 6 else FOREGROUND)
    return (f' fill="{color}"' if color != FOREGROUND else "") + (' font-weight="bold"' if cell.bold else "")


def svg(frames: list[Frame], title: str) -> str:
    """The animation: every line is an element that is visible while the screen showed it."""
    end_s = frames[-1].start_s
    total_s = end_s + HOLD_S
    used = max((number for frame in frames for number, row in enumerate(frame.rows) if row), default=0) + 1
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, used * CELL_HEIGHT + 2 * MARGIN
    lines = []
    for number in range(used):
        y = MARGIN + (number + 0.8) * CELL_HEIGHT
        for start_s, until_s, row in _stretches(frames, number):
            if not row:
                continue
            if until_s is None:  # on the last screen: visible unless the animation hides it
                animation = f'<set attributeName="visibility" to="hidden" begin="loop.begin" dur="{start_s:.2f}s"/>'
                lines.append(f'<text y="{y:.0f}">{row}{animation if start_s else ""}</text>')
            else:
                begin = f"loop.begin+{start_s:.2f}s"
                animation = (
                    f'<set attributeName="visibility" to="visible" begin="{begin}" dur="{until_s - start_s:.2f}s"/>'
                )
                lines.append(f'<text y="{y:.0f}" visibility="hidden">{row}{animation}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" '
        f'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="14" '
        f'fill="{FOREGROUND}" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}">'
        f'<animate id="loop" attributeName="opacity" values="1;1" begin="0s;loop.end" dur="{total_s:.2f}s"/></rect>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def _stretches(frames: list[Frame], number: int) -> Iterator[tuple[float, float | None, str]]:
    """What one line of the screen showed, from when until when; None is until the end."""
    start = frames[0]
    for frame in frames[1:]:
        if frame.rows[number] != start.rows[number]:
            yield start.start_s, frame.start_s, start.rows[number]
            start = frame
    yield start.start_s, None, start.rows[number]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--keep", type=Path, help="also write what came, and when, to this file")
    parser.add_argument("--replay", type=Path, help="draw what --keep wrote, instead of running the command")
    parser.add_argument("--shown", help="the command as the picture shows it")
    parser.add_argument("--type", action="append", default=[], dest="lines", metavar="TEXT", help="a line to type")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    shown = given.shown or " ".join(given.command)
    if given.replay:
        pieces = [(at, text.encode()) for at, text in json.loads(given.replay.read_text())]
    else:
        pieces = list(record(given.command, deque(given.lines)))
    if given.keep:
        given.keep.write_text(json.dumps([(at, piece.decode(errors="replace")) for at, piece in pieces]))
    frames = frames_of(pieces, shown)
    given.output.write_text(svg(frames, f"A recording of {shown}"))
    print(f"{given.output}: {len(frames)} frames, {frames[-1].start_s:.0f} s, {given.output.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
