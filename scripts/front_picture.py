"""The picture of README.md, light and dark: the chart of the demo's page, as a headless Chromium draws it.

    python scripts/front_picture.py

runs ``screen-checkpoints --demo -o demo.html`` and writes ``docs/pictures/demo-light.png`` and
``docs/pictures/demo-dark.png``. No test runs it.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser  # noqa: E402

OUT = ROOT / "docs" / "pictures"
WIDTH = 900
PLACE = """(() => {
    const box = document.querySelector(".chart svg").getBoundingClientRect();
    return { x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height };
})()"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "demo.html"
        command = [str(Path(sys.executable).parent / "screen-checkpoints"), "--demo", "-q", "-o", str(page)]
        subprocess.run(command, check=True)
        for scheme in ("light", "dark"):
            with Browser() as browser:
                browser.size(WIDTH, 900)
                browser.media(scheme)
                browser.open(page)
                place = browser.value(PLACE)
                edge = 12
                clip = {
                    "x": place["x"] - edge,
                    "y": place["y"] - edge,
                    "width": place["width"] + 2 * edge,
                    "height": place["height"] + 2 * edge,
                    "scale": 2,
                }
                shot = browser.call(
                    "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
                )
                (OUT / f"demo-{scheme}.png").write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
