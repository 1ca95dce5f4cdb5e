"""Curves as a PNG with nothing but the standard library: a canvas, lines, small letters, and the file's format.

Does not know: where the numbers come from.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping

from tinsmith.cli.report import Points

WIDTH, HEIGHT, HEAD = 900, 300, 40
"""Of the picture, of one curve in it, and of the title, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 120, 30, 36, 44
"""Around one curve."""
INK, GREY, LINE, PAPER = b"\x22\x22\x22", b"\x99\x99\x99", b"\xb4\x54\x1a", b"\xff\xff\xff"
SCALE = 2
"""Pixels of one dot of a letter."""
LETTERS = bytes.fromhex(
    "000000000000005f00000007000700147f147f14242a7f2a12231308646236495620500008070300001c2241000041221c00"
    "2a1c7f1c2a08083e080800807030000808080808000060600020100804023e5149453e00427f400072494949462141494d33"
    "1814127f1027454545393c4a49493141211109073649494936464949291e0000140000004034000000081422411414141414"
    "004122140802015909063e415d594e7c1211127c7f494949363e414141227f4141413e7f494949417f090909013e41415173"
    "7f0808087f00417f41002040413f017f081422417f404040407f021c027f7f0408107f3e4141413e7f090909063e4151215e"
    "7f09192946264949493203017f01033f4040403f1f2040201f3f4038403f631408146303047804036159494d43007f414141"
    "0204081020004141417f04020102044040404040000307080020545478407f284444383844444428384444287f3854545418"
    "00087e090218a4a49c787f0804047800447d40002040403d007f1028440000417f40007c047804787c080404783844444438"
    "fc1824241818242418fc7c08040408485454542404043f44243c4040207c1c2040201c3c4030403c44281028444c9090907c"
    "4464544c440008364100000077000000413608000201020402"
)
"""The printable characters of ASCII in 5 columns of dots each, the lowest bit at the top."""
FIRST, COLUMNS = 32, 5


class Canvas:
    """A picture to draw on."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._pixels = bytearray(PAPER * (width * height))

    def dot(self, x: int, y: int, colour: bytes, size: int = 1) -> None:
        """A square; what is outside is left out."""
        left, right = max(0, x), min(self.width, x + size)
        for row in range(max(0, y), min(self.height, y + size)):
            if left < right:
                start = 3 * (row * self.width + left)
                self._pixels[start : start + 3 * (right - left)] = colour * (right - left)

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: bytes, size: int = 1) -> None:
        count = max(1, math.ceil(max(abs(end[0] - start[0]), abs(end[1] - start[1]))))
        for step in range(count + 1):
            x = start[0] + (end[0] - start[0]) * step / count
            y = start[1] + (end[1] - start[1]) * step / count
            self.dot(round(x), round(y), colour, size)

    def text(self, x: int, y: int, text: str, colour: bytes = INK) -> None:
        """Letters from (x, y) on to the right; a character that is not ASCII becomes a question mark."""
        for place, character in enumerate(text):
            index = ord(character) - FIRST
            if not 0 <= index < len(LETTERS) // COLUMNS:
                index = ord("?") - FIRST
            for column in range(COLUMNS):
                dots = LETTERS[COLUMNS * index + column]
                for row in range(8):
                    if dots >> row & 1:
                        left = x + SCALE * (place * (COLUMNS + 1) + column)
                        self.dot(left, y + SCALE * row, colour, SCALE)

    def png(self) -> bytes:
        row_bytes = 3 * self.width
        rows = b"".join(
            b"\0" + self._pixels[start : start + row_bytes] for start in range(0, len(self._pixels), row_bytes)
        )
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows, 9)), _chunk(b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def curves_png(title: str, curves: Mapping[str, Points]) -> bytes:
    """Curves over steps, one below the other."""
    canvas = Canvas(WIDTH, HEAD + HEIGHT * len(curves))
    canvas.text(LEFT, 12, title)
    for number, (name, points) in enumerate(curves.items()):
        _draw(canvas, HEAD + HEIGHT * number, name, [(x, y) for x, y in points if math.isfinite(y)])
    return canvas.png()


def _draw(canvas: Canvas, top: int, name: str, points: Points) -> None:
    high_y, low_y = top + TOP, top + HEIGHT - BOTTOM
    canvas.text(LEFT, top + 8, name)
    canvas.line((LEFT, high_y), (LEFT, low_y), GREY)
    canvas.line((LEFT, low_y), (WIDTH - RIGHT, low_y), GREY)
    if not points:
        canvas.text(LEFT + 20, (high_y + low_y) // 2, "no finite values")
        return
    first, last = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        above = (y - low) / (high - low) if high > low else 0.5
        return LEFT + across * (WIDTH - LEFT - RIGHT), low_y - above * (low_y - high_y)

    before = place(*points[0])
    for x, y in points:
        canvas.line(before, place(x, y), LINE, 2 if len(points) > 1 else 5)
        before = place(x, y)
    for value in {high, low}:
        _right(canvas, LEFT - 8, round(place(first, value)[1]) - 7, f"{value:.4g}")
    canvas.text(LEFT, low_y + 12, f"step {first:g}")
    _right(canvas, WIDTH - RIGHT, low_y + 12, f"step {last:g}")


def _right(canvas: Canvas, x: int, y: int, text: str) -> None:
    """Text that ends at x."""
    canvas.text(x - SCALE * (COLUMNS + 1) * len(text), y, text)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
