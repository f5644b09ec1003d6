"""What a recommendation is asked for, with few rows and no time of its own."""

import small_models as models

from kbatch.memory.find import data_source
from kbatch.recommendation.budget import Budget
from kbatch.recommendation.measure import Task
from kbatch.training.accumulation.parts_check import PartsChecks
from kbatch.training.data.forms import FitData


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
        "budget": Budget(budget_s),
        "checks": PartsChecks(),
        "seed": 0,
    }
    return Task(**(fields | changed))
