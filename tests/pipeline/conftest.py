"""What computes here needs the frameworks set up first."""

import pytest
from support import frameworks  # noqa: F401

from qwenimg.common.hub import forecast


@pytest.fixture
def no_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the plans of smaller models that each plan of a slow one names; `test_forecast` has them."""
    monkeypatch.setattr(forecast, "forecast_all", lambda engine, below: [])
