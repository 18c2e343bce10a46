"""Writes "Google Chrome" for "Chromium" in a file of the browser's texts; its argument is the file.

The tasks know the browser by its window's title. The format, version 5: a head, one entry (number, offset) per text and
one more for the end, aliases (number, index), then the texts.
"""

import itertools
import struct
import sys

OLD, NEW = b"Chromium", b"Google Chrome"

with open(sys.argv[1], "rb") as file:
    data = file.read()
version, encoding, count, aliases = struct.unpack_from("<IBxxxHH", data)
if (version, encoding) != (5, 1):
    sys.exit(f"version {version}, encoding {encoding} of {sys.argv[1]!r}: only version 5 in UTF-8 (1) is known")
entries = [struct.unpack_from("<HI", data, 12 + 6 * i) for i in range(count + 1)]
rest = data[12 + 6 * (count + 1) :][: 4 * aliases]
texts = [data[here:there] for (_, here), (_, there) in itertools.pairwise(entries)]
changed = [text.replace(OLD, NEW) for text in texts]
if changed == texts:
    sys.exit(f"{sys.argv[1]!r} does not name {OLD.decode()!r}")
offset = 12 + 6 * (count + 1) + 4 * aliases
head = struct.pack("<IBxxxHH", version, encoding, count, aliases)
for (number, _), text in zip(entries, [*changed, b""], strict=True):
    head += struct.pack("<HI", number, offset)
    offset += len(text)
with open(sys.argv[1], "wb") as file:
    file.write(head + rest + b"".join(changed))
