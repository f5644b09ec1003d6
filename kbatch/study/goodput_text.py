"""Why a search by goodput tried the sizes that it tried, and why it stopped."""

from kbatch.document.number_text import counted, listed, percent
from kbatch.study.caveat import Caveat
from kbatch.study.goodput import SizeDecision
from kbatch.study.study_record import Study


def decision_text(decision: SizeDecision) -> str:
    """Words a decision in a sentence."""
    size, best, rival = decision.batch_size, decision.best, decision.rival
    match decision.kind:
        case "pilot":
            text = f"Batch size {size} comes first: it suits most noise scales."
        case "given":
            text = (
                f"Batch size {size} comes first: it is the base batch size, whose noise scale the "
                "learning-rate rule uses."
            )
        case "no target yet":
            text = f"Batch size {size} comes next: no trial has come to the target yet."
        case "gain":
            text = (
                f"Batch size {size} comes next: batch size {rival} is more than 5 % better than "
                f"{best} with a probability of {percent(decision.probability or 0.0)}."
            )
        case "separated":
            text = (
                f"Stopped: no other batch size is likely to be as good as {best}; {rival} is more "
                f"than 5 % better with a probability of {percent(decision.probability or 0.0)}."
            )
        case "tie":
            text = (
                f"Stopped: other batch sizes may be as good as {best}, and are hardly better: "
                f"{rival} is by more than 5 % with a probability of "
                f"{percent(decision.probability or 0.0)}."
            )
        case _:
            none = "" if best else " None came to the target."
            text = (
                "Stopped: each batch size was tried, or is larger than one that could not be "
                f"trained.{none}"
            )
    others = [f"{name} {value}" for name, value in decision.hyperparameters.items()]
    return f"{text[:-1]} ({listed(others)})." if others else text


def goodput_caveats(study: Study) -> tuple[Caveat, ...]:
    """Says which sizes a search by goodput left out, and why; nothing of other searches."""
    record = study.goodput
    if record is None:
        return ()
    tried = {trial.batch_size for trial in study.trials}
    left = [f"{size:,}" for size in record.batch_sizes if size not in tried]
    texts = [decision_text(d) for d in record.decisions if d.batch_size is None]
    if left:
        texts.insert(
            0,
            f"Strategy goodput: {counted(len(tried), 'batch size')} of {len(record.batch_sizes)} "
            f"had trials; what is known of {listed(left)} is the model's, from their step times "
            "and the noise scale.",
        )
    if record.extrapolated:
        sizes = listed(f"{size:,}" for size in record.extrapolated)
        texts.append(f"Batches of {sizes} were not timed: a line tells their step time.")
    return tuple(Caveat("sizes left out", text) for text in texts)
