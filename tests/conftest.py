"""`pytest --device cuda`: the suites marked `any_device`, with models and tensors on that device.

The other tests are skipped then: they are about the host, or choose a device themselves.
"""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the any_device suites run: cpu, cuda")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "any_device: also runs under --device cuda")
    # Read once, by `where`, when the test modules are imported.
    os.environ["TESTS_DEVICE"] = config.getoption("--device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--device")
    if device == "cpu":
        return
    skip = pytest.mark.skip(reason=f"not a test for --device {device}")
    for item in items:
        if item.get_closest_marker("any_device") is None:
            item.add_marker(skip)
