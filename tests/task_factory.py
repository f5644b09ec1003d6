"""What a recommendation is asked for, with few rows and no time of its own."""

import small_models as models

from kbatch.memory.find import data_source
from kbatch.recommendation.measure import Budget, Task
from kbatch.training.data.forms import FitData


def make_task(x, y=None, *, budget_s=60.0, **changed):
    fields = {
        "build": models.mlp,
        "is_given": False,
        "data": FitData(x, y),
        "source": data_source(x, y),
        "base_batch_size": 32,
        "memory_limit_bytes": None,
        "budget": Budget(budget_s),
        "seed": 0,
    }
    return Task(**(fields | changed))
