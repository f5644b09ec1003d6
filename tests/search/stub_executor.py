"""An executor whose tasks train nothing and only write a record."""

import json

from records_factory import VAL_ACCURACY, make_execution, make_trial

from kbatch.records.json_codec import record_text
from kbatch.records.training_run import RECORD_NAME
from kbatch.search.executors import TaskResult


class StubFuture:
    """A task that is done when it is its turn. One task ends each time that all are polled."""

    def __init__(self, executor, outcome):
        self._executor, self._outcome = executor, outcome
        self.cancelled = False

    def done(self):
        turn, waiting = self._executor.turn, self._executor.open
        return turn is None or waiting[turn] is self

    def result(self):
        self._executor.open.remove(self)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def cancel(self):
        self.cancelled = True


class StubExecutor:
    """Ends its oldest task first; with `turn=-1` the newest, with `turn=None` all at once.

    Args:
        outcomes: A result or an error in place of a record, by the number of a submission from 0.
        accuracy: Returns the validation accuracy for a batch size and the number of the run.
    """

    def __init__(self, *, turn=0, outcomes=None, accuracy=lambda size, number: 0.5):
        self.turn, self._outcomes, self._accuracy = turn, outcomes or {}, accuracy
        self.open, self.tasks, self.most_open = [], [], 0
        self.log = []  # Batch size and number of each run, and the number of open tasks.

    @property
    def ran(self):
        return [(size, number) for size, number, _ in self.log]

    def submit(self, function, search, task):
        outcome = self._outcomes.get(len(self.tasks)) or trained(task, self._accuracy)
        self.tasks.append(task)
        self.log.append((values_of(task)["batch_size"], task.asked.executions - 1, len(self.open)))
        self.open.append(StubFuture(self, outcome))
        self.most_open = max(self.most_open, len(self.open))
        return self.open[-1]


def values_of(task):
    state = json.loads(task.files[f"trial_{task.trial_id}/trial.json"])
    return state["hyperparameters"]["values"]


def trained(task, accuracy):
    """The result of a task that has trained."""
    file, values = f"trial_{task.trial_id}/{RECORD_NAME}", values_of(task)
    size, number = values["batch_size"], task.asked.executions - 1
    execution = make_execution(size, seed=number, accuracies=(accuracy(size, number),))
    trial = make_trial(size, execution, trial_id=task.trial_id, hyperparameters=values)
    document = json.loads(record_text(trial))
    if number:
        before = json.loads(task.files[file])["record"]["executions"]
        document["record"]["executions"] = [*before, *document["record"]["executions"]]
    document["record"]["objective"] = {"name": VAL_ACCURACY.name, "direction": "max"}
    document["record"]["hyperparameters"] = values
    return TaskResult({file: json.dumps(document).encode()})
