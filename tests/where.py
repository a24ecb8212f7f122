"""The device of the `any_device` suites; see `conftest.py`."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("TESTS_DEVICE", "cpu"))
