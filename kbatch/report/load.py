"""Records read back from a file or folder that tells itself what it holds."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from kbatch.records.json_codec import RecordError, read_json, read_record, shown
from kbatch.study.study import load_study

if TYPE_CHECKING:
    from kbatch.report.content import Reported

# The module of each record that is kept as a file of its own, by the kind that the file names.
_HOME_OF = {
    "InferenceProfile": "kbatch.inference.profile",
    "InputPipelineProfile": "kbatch.input_pipeline.record",
    "MaxBatchSizeResult": "kbatch.memory.record",
    "Recommendation": "kbatch.recommendation.record",
    "Study": "kbatch.study.study",
    "TrainingProfile": "kbatch.throughput.record",
}


def load_record(path: str | Path) -> "Reported":
    """Read a study from the folder of its search, or whatever record a JSON file holds."""
    path = Path(path)
    if not path.is_file():
        return load_study(path)
    try:
        kind = shown(read_json(path)["kind"], str)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path} is no kbatch record or is damaged: {error!r}.") from error
    if kind not in _HOME_OF:
        raise RecordError(
            f"{path} holds a {kind}: a file must hold one of {', '.join(_HOME_OF)}. For a study "
            "give the folder of its search (`directory/project_name`)."
        )
    return read_record(getattr(importlib.import_module(_HOME_OF[kind]), kind), path)
