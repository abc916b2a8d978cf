"""The engines' conformance suite, as the reference engine passes it, against real SGLang."""

from __future__ import annotations

import pytest

from tests.engines.test_conformance import *  # noqa: F403

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
