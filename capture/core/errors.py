"""Exceptions.

CaptureError(Exception)
  AnnotationError(TypeError)         a wrong option, raised at decoration
  UncapturableError(RuntimeError)    ``fallback="error"`` or ``rng="forbid"``; carries ``findings``
  BorrowedOutputError(RuntimeError)  a borrowed output was used after its step
  CaptureBug(RuntimeError)           a fault of this library; please report it
CaptureWarning(UserWarning)          a call runs eagerly, said once
"""

from __future__ import annotations

from collections.abc import Sequence

from capture.core.findings import Finding


class CaptureError(Exception):
    """Base of all errors this library raises."""


class AnnotationError(CaptureError, TypeError):
    """An option given to ``capture`` is unknown or has a value it cannot have."""


class UncapturableError(CaptureError, RuntimeError):
    """The call cannot be recorded and the annotation asks for an error instead of eager execution.

    ``findings`` holds the reasons, most severe first.
    """

    def __init__(self, message: str, findings: Sequence[Finding] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


class BorrowedOutputError(CaptureError, RuntimeError):
    """An output handed out with ``outputs="borrow"`` was used after the step it belongs to."""


class CaptureBug(CaptureError, RuntimeError):
    """An invariant of this library does not hold. Please report it with the message."""


class CaptureWarning(UserWarning):
    """A captured function runs eagerly, or slower than it could; said once a function and reason."""
