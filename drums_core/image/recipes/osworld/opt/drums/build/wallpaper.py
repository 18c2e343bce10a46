"""Draws the wallpaper: a gradient from top to bottom. Its argument is the file to write."""

import sys

from PIL import Image

WIDTH, HEIGHT = 1920, 1080
TOP, BOTTOM = (0x5E, 0x27, 0x50), (0xC9, 0x4E, 0x2F)

column = Image.new("RGB", (1, HEIGHT))
for y in range(HEIGHT):
    share = y / (HEIGHT - 1)
    column.putpixel((0, y), tuple(round(a + (b - a) * share) for a, b in zip(TOP, BOTTOM, strict=True)))
column.resize((WIDTH, HEIGHT), Image.Resampling.NEAREST).save(sys.argv[1], optimize=True)
