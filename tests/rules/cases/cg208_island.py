"""Cases in which CG208 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Island
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [
    case(islands=(Island(name="note", where=where(12, "note(y)")),)),
    *(
        case(islands=(Island(name="note", where=where(12, "note(y)"), obstacle=obstacle, fix=fix),))
        for obstacle, fix in (
            ("is called where results need gradients", "gradients"),
            ("gets a tensor that needs gradients: pass it with .detach()", "detach"),
            ("keeps a tensor that it gives", "clone"),
            ("is called after the body changed self.last, and would see it as it was", "order"),
            ("gets an object of type set", "inside"),
            ("raises ValueError, which the body catches", ""),
        )
    ),
]
NEAR_MISSES: list[Case] = [case()]
