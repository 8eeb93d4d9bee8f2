"""Waits between attempts are short here: how long they are is tested by itself."""

from __future__ import annotations

import pytest
from lmeval_screener.checkpoints import http


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five attempts within a fraction of a second."""
    monkeypatch.setattr(http, "FIRST_WAIT", 0.01)
