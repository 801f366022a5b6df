"""What a rule is given."""

from __future__ import annotations

from capture.core.data import frozen
from capture.core.facts import Facts
from capture.core.options import Annotation


@frozen(kw_only=True)
class Case:
    """All that a rule may read."""

    annotation: Annotation
    facts: Facts
