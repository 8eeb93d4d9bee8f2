"""Results as JSON lines: one a model or trial, with commit, machine, seconds, the configuration's hash."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "results"


def digest(path: Path) -> str:
    """The mark of the configuration that a result was made with."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def provenance() -> dict[str, str]:
    """Commit and machine, without the machine's name."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "commit": done.stdout.strip() or "unknown",
        "machine": f"{os.cpu_count()} shared {platform.machine()} cores, one thread a model",
    }


def append(file: Path, row: dict[str, Any]) -> None:
    """Add one result."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, separators=(",", ":")) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """All results of a file; none where it is not there yet."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]


def checked(file: Path, configuration: Path) -> list[dict[str, Any]]:
    """Results of a file, all made with the configuration as it is now.

    Raises:
        ValueError: Some were made with another configuration.
    """
    rows = read(file)
    now = digest(configuration)
    other = [row["name"] for row in rows if row["configuration"] != now]
    if other:
        raise ValueError(
            f"{file}: expected results of {configuration.name} as it is now ({now}), got {len(other)} of "
            "another "
            f"version ({other[0]} first); put the file back, or remove the results and run again"
        )
    return rows


def packed(right: NDArray[np.bool_]) -> str:
    """Flags as base64 of their bits."""
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def unpacked(text: str, count: int) -> NDArray[np.bool_]:
    """Flags again."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8))[:count].astype(bool)


def packed_bytes(values: NDArray[np.floating[Any]]) -> str:
    """Numbers of [0, 1] as base64 of a byte each, of their square roots: small ones are kept too."""
    return base64.b64encode(np.round(255 * np.sqrt(values)).astype(np.uint8).tobytes()).decode()


def unpacked_bytes(text: str) -> NDArray[np.float64]:
    """The numbers again, to 0.002 and, near 0, to 4e-6."""
    return (np.frombuffer(base64.b64decode(text), np.uint8) / 255) ** 2


def packed_halves(values: NDArray[np.floating[Any]]) -> str:
    """Small numbers as base64 of half precision."""
    return base64.b64encode(np.asarray(values).astype("<f2").tobytes()).decode()


def unpacked_halves(text: str) -> NDArray[np.float64]:
    """The numbers again, to 0.05 %."""
    return np.frombuffer(base64.b64decode(text), "<f2").astype(float)
