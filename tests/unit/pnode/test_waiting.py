"""Threads that wait sleep, unless the environment says otherwise."""

from __future__ import annotations

import os

import pytest

from pnode.waiting import sleep_while_waiting


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    sleep_while_waiting()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    sleep_while_waiting()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
