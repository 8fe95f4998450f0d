"""Settings of property tests in inherited test bodies. The health check that is off warns of a method that several
classes run: here that is the point."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

PROPERTY = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors],
)
