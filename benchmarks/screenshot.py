"""What a screenshot costs, in milliseconds: through the guest server, and its parts beside Pillow's own encoder.

    sudo .venv/bin/python benchmarks/screenshot.py [--rounds 20] [--image minimal] [--json]

In a desktop of the image: the parts run in the image's interpreter as the agent's user, on the desktop's own screen.
The baseline in the same run is Pillow with its quickest compression, on the same picture.
"""

from __future__ import annotations

import json
import time

import trio
from samples import arguments, tell

from drums_core import load_config, open_host

PARTS = """
import io, json, sys, time
from PIL import Image
sys.path.insert(0, "/opt/drums")
from guest import png, x11

def pillow(width, height, strips):
    image = Image.new("RGB", (width, height))
    for number, strip in enumerate(strips):
        image.paste(strip, (0, number * strips[0].height))
    output = io.BytesIO()
    image.save(output, "PNG", compress_level=1)
    return output.getvalue()

samples = {}
for number in range(ROUNDS + 1):
    began = time.perf_counter()
    with x11.Display() as display:
        width, height, strips = display.picture()
        strips = list(strips)
    spent = {"grab": time.perf_counter() - began}
    for name, encode in (("encode", png.encode), ("encode by Pillow (baseline)", pillow)):
        began = time.perf_counter()
        size = len(encode(width, height, strips))
        spent[name] = time.perf_counter() - began
        samples[name + ", KB"] = [size / 1e3]
    if number:  # the first warms up
        for name, seconds in spent.items():
            samples.setdefault(name, []).append(seconds * 1e3)
print(json.dumps(samples))
"""


async def measure(rounds: int, image: str | None) -> dict[str, list[float]]:
    """Samples by part."""
    async with open_host(load_config()) as host, await host.create(image=image, purpose="benchmark") as slot:
        done = await slot.execute(["python3", "-c", PARTS.replace("ROUNDS", str(rounds))], timeout_s=120)
        if done.returncode:
            raise SystemExit(f"the parts could not be measured: {done.error}")
        samples: dict[str, list[float]] = json.loads(done.output)
        whole = []
        for _ in range(rounds):
            began = time.perf_counter()
            await slot.screenshot()
            whole.append((time.perf_counter() - began) * 1e3)
        return {"screenshot, as a client of the host gets it": whole, **samples}


def main() -> None:
    """Parse the arguments and run."""
    parser = arguments(__doc__, rounds=20)
    parser.add_argument("--image", help="the image; the host's default otherwise")
    options = parser.parse_args()
    tell(trio.run(measure, options.rounds, options.image), as_json=options.json)


if __name__ == "__main__":
    main()
