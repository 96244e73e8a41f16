"""When would it happen? Timelines of an emulated CTA, and predictions of how long a launch takes.

recorder.py   an observer: what each warp did (events.py), without times
ops.py, issue.py, schedule.py   PTX -> machine instructions -> the order that ptxas would issue them in
cost.py       what things cost on an SM, each figure with its source
replay.py     gives times to the events (parts.py: the hardware); the result is a Timeline (timeline.py)
trace.py, draw.py   a timeline for chrome://tracing or Perfetto, and as a picture
predict.py, calibrate.py   whole launches, and how far predictions are from a GPU
"""

from __future__ import annotations

from fa3.emulator.timing.cost import Cost
from fa3.emulator.timing.events import Trace
from fa3.emulator.timing.replay import ReplayError, replay
from fa3.emulator.timing.timeline import Interval, Timeline

__all__ = ["Cost", "Interval", "ReplayError", "Timeline", "Trace", "replay"]
