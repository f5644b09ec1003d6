"""What a recommendation is asked for, with few rows and no time of its own."""

import models

from kbatch.memory.max_batch import data_source
from kbatch.recommendation.budget_clock import BudgetClock
from kbatch.recommendation.recommendation_task import Task
from kbatch.training.accumulation.parts_checks import PartsChecks
from kbatch.training.data.data import FitData


def make_task(x, y=None, *, budget_s=60.0, **changed):
    fields = {
        "build": models.mlp,
        "is_given": False,
        "data": FitData(x, y),
        "source": data_source(x, y),
        "base_batch_size": 32,
        "epochs": None,
        "memory_limit_bytes": None,
        "memory_window": (0.8, 0.9),
        "clock": BudgetClock(budget_s),
        "checks": PartsChecks(),
        "seed": 0,
    }
    return Task(**(fields | changed))
