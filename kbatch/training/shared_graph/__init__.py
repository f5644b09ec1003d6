"""One traced graph for the models of a search that train alike.

To build a small model and trace its step takes longer than some epochs of it. A graph takes batches
of any size, so that a search needs one. `SharedGraph.model_for` returns a model with that graph,
and `SharedGraph.release` lets the next model be a fresh one. Only this package uses its rules:

1. A graph is shared if the description of what is written into it is equal and certain. A part is
   described by all that it holds (`kbatch.training.fingerprint`).
2. Nothing is shared if a part cannot be described for certain, or may have state that kbatch
   cannot set back: a class, a layer function or a train step of the user's own, a variable that no
   part of the model lists, a table, a random number in a loss, a schedule of the learning rate.
3. What may differ between sizes is read by the graph and not written into it: weights, the
   optimizer's state and its learning rate are variables already. `GraphNumber` and `GraphCount`
   make variables of the other settings that follow the batch size.
4. Before a model trains again, all its variables get the values of the fresh model, and metrics are
   reset. A model that somebody has changed since it was traced is not used again.
"""

from typing import Any

from kbatch.library_internals import layers_of
from kbatch.training.learning_rate import followed_settings
from kbatch.training.shared_graph.description import description
from kbatch.training.shared_graph.kept_model import GraphNumber, read_settings, set_state
from kbatch.training.steps_per_execution import GraphCount


class SharedGraph:
    """Keeps a model of a search under each policy, with its graphs, and gives it later states."""

    def __init__(self):
        # By policy: a model, and what it was when its graphs were not traced yet.
        self._kept: dict[str, tuple[Any, Any]] = {}

    def model_for(self, fresh: Any) -> Any:
        """Return a model that trains as `fresh` does: the one that is kept, or else `fresh`."""
        policy, found = fresh.dtype_policy.name, description(fresh)
        if found is None:
            self.release()
            return fresh
        kept, known = self._kept.get(policy, (None, None))
        if kept is not None and found == known and _is_as_kept(kept, known, fresh):
            set_state(kept, fresh)
            return kept
        self._kept[policy] = fresh, found
        read_settings(fresh)
        return fresh

    def is_kept(self) -> bool:
        """Return whether the next model may be one that is kept."""
        return bool(self._kept)

    def release(self, *, but: str | None = None) -> None:
        """Let the next model be a fresh one, as after a failure, of all policies `but`."""
        self._kept = {policy: one for policy, one in self._kept.items() if policy == but}

    def __reduce__(self):
        return SharedGraph, ()  # No model travels to another process.


def _is_as_kept(kept: Any, known: Any, fresh: Any) -> bool:
    """Return whether nobody has changed the kept model, and `fresh` has no part of it."""
    settings = [getattr(owner, name) for owner, name in followed_settings(kept)]
    parts = {id(part) for part in (*layers_of(kept), kept.optimizer)}
    return (
        not any(id(part) in parts for part in (*layers_of(fresh), fresh.optimizer))
        and all(isinstance(setting, GraphNumber) for setting in settings)
        and isinstance(kept.steps_per_execution, GraphCount)
        and description(kept) == known
    )
