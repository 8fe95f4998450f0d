"""Host scheduler: pages, sequences, step plans. Pure Python and numpy.

``Scheduler`` is the whole of it for others; ``table_width`` gives the shapes its plans will have before there is one.
"""

from jaxsqueeze.sched.pages import table_width
from jaxsqueeze.sched.scheduler import Scheduler
from jaxsqueeze.sched.stats import SchedulerStats

__all__ = ["Scheduler", "SchedulerStats", "table_width"]
