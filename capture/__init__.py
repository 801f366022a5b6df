from __future__ import annotations
from capture._decorate import capture as capture
from capture._step import mark_step_begin as mark_step_begin
from capture._step import step as step
